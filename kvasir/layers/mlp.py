"""Feed-forward networks: with a gate, without one, and as a mixture of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from kvasir import kernels
from kvasir.layers.base import Build, DecoderBuild, Kinds, WeightLayer
from kvasir.layers.linear import column_linear, replicated_linear, row_linear
from kvasir.layers.norm import Norm
from kvasir.layers.spec import GatedMLPSpec, MLPSpec, MoESpec, SoftmaxRoutingSpec
from kvasir.quantization.base import ExpertsShape, TensorKey


class FeedForward(nn.Module, ABC):
    """What a decoder asks of any kind of feed-forward network."""

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""

    def leave_parts(self) -> None:
        """From now on `forward` may return parts for Norm.add to sum."""
        return None

    @property
    def fuses_one_row(self) -> bool:
        """Whether `one_row` may be called; only known once the weights are loaded."""
        return False

    def one_row(self, stream: torch.Tensor, norm: Norm) -> torch.Tensor:
        """stream + forward(norm(stream)) for one row, with norm, activation and sum computed inside the products."""
        raise AssertionError(f"{type(self).__name__} does not fuse one row")


FEED_FORWARDS: Kinds[FeedForward] = Kinds("feed-forward network")  # built from (build, spec, prefix)


@FEED_FORWARDS.register(GatedMLPSpec)
class GatedMLP(FeedForward):
    """down(activation(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, build: DecoderBuild, spec: GatedMLPSpec, prefix: str) -> None:
        super().__init__()
        hidden, inner, bias = build.hidden_size, spec.intermediate_size, spec.bias
        self.gate_up = column_linear(build, f"{prefix}.gate_up", hidden, {"gate": inner, "up": inner}, bias=bias)
        self.down = row_linear(build, f"{prefix}.down", inner, hidden, bias=bias)
        self.activation = spec.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(kernels.gated_activation(self.gate_up(x), self.activation))
        return y

    def leave_parts(self) -> None:
        self.down.leaves_parts = True

    @property
    def fuses_one_row(self) -> bool:
        # SiLU is the only activation that kernels.fused_linear computes.
        return self.activation == "silu" and self.gate_up.fuses_one_row and self.down.fuses_one_row

    def one_row(self, stream: torch.Tensor, norm: Norm) -> torch.Tensor:
        fused, options = kernels.fused_linear, norm.fused_options
        assert options is not None, "the norm can be fused"
        active = fused(stream, self.gate_up.weight, self.gate_up.bias, **options, gated=True)
        return fused(active, self.down.weight, self.down.bias, add=stream)


@FEED_FORWARDS.register(MLPSpec)
class MLP(FeedForward):
    """down(activation(up(x)))"""

    def __init__(self, build: DecoderBuild, spec: MLPSpec, prefix: str) -> None:
        super().__init__()
        hidden, inner = build.hidden_size, spec.intermediate_size
        self.up = column_linear(build, f"{prefix}.up", hidden, {"up": inner}, bias=spec.bias)
        self.down = row_linear(build, f"{prefix}.down", inner, hidden, bias=spec.bias)
        self.activation = spec.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(kernels.ACTIVATIONS[self.activation](self.up(x)))
        return y

    def leave_parts(self) -> None:
        self.down.leaves_parts = True


# ---------------------------------------------------------------- mixture of experts


class Experts(WeightLayer):
    """The matrices of all experts, kept by any method; each rank has its share of every expert's inner dimension, and
    outputs are summed over ranks."""

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, build: Build, prefix: str, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        own = build.mesh.shard(intermediate_size, "moe_intermediate_size")
        self.mesh, self.shape = build.mesh, ExpertsShape(num_experts, hidden_size, intermediate_size, own)
        self.method = build.methods.experts(prefix)
        self.method.create(self, build.dtype, build.device)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, activation: str) -> torch.Tensor:
        """See ExpertsMethod.apply."""
        return self.mesh.all_reduce(self.method.apply(self, x, weights, chosen, activation))

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        return self.method.tensors(self)

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.method.load(self, key, tensor)

    def process(self) -> None:
        self.method.process(self)


class Routing(nn.Module, ABC):
    """Chooses each token's experts from the router's scores."""

    @abstractmethod
    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, experts] -> the chosen experts' weights in float32 and their numbers, each [tokens, top_k]."""


ROUTINGS: Kinds[Routing] = Kinds("routing")  # built from (build, spec)


@ROUTINGS.register(SoftmaxRoutingSpec)
class SoftmaxRouting(Routing):
    """The largest probabilities, which are the weights too."""

    def __init__(self, build: Build, spec: SoftmaxRoutingSpec) -> None:
        super().__init__()
        self.top_k, self.normalise = spec.top_k, spec.normalise

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if self.normalise else weights), chosen


@FEED_FORWARDS.register(MoESpec)
class MoE(FeedForward):
    """Experts behind a router, beside a shared expert where the spec has one."""

    def __init__(self, build: DecoderBuild, spec: MoESpec, prefix: str) -> None:
        super().__init__()
        self.activation, hidden = spec.activation, build.hidden_size
        self.router = replicated_linear(build, f"{prefix}.router", hidden, spec.num_experts, bias=False)
        self.routing = ROUTINGS.make(build, spec.routing)
        self.experts = Experts(build, f"{prefix}.experts", spec.num_experts, hidden, spec.intermediate_size)
        self.shared: GatedMLP | None = None
        if spec.shared is not None:
            self.shared = GatedMLP(build, spec.shared, f"{prefix}.shared")
            self.shared_gate = replicated_linear(build, f"{prefix}.shared_gate", hidden, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.routing(self.router(x))
        out: torch.Tensor = self.experts(x, weights, chosen, self.activation)
        if self.shared is not None:
            out = out + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return out
