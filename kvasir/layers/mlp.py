"""Feed-forward networks: with a gate, without one, and as a mixture of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from kvasir import kernels
from kvasir.kernels import reference
from kvasir.kernels.layout import TokenSlots
from kvasir.layers.adapters import ExpertsChange, ExpertsSlots
from kvasir.layers.base import Build, DecoderBuild, Kinds, WeightLayer
from kvasir.layers.linear import Linear, column_linear, replicated_linear, row_linear
from kvasir.layers.norm import Norm
from kvasir.layers.spec import (
    GatedActivation,
    GatedMLPSpec,
    MLPSpec,
    MoESpec,
    SparseMixerRoutingSpec,
    TopKRoutingSpec,
)
from kvasir.quantization.base import ExpertsShape, TensorKey, UnquantizedExperts, UnquantizedLinear, parameter


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
        self.down = row_linear(build, f"{prefix}.down", inner, hidden, bias=bias or spec.down_bias)
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
        options = norm.fused_options
        assert options is not None, "the norm can be fused"
        return self.down.fused(self.gate_up.fused(stream, **options, gated=True), add=stream)


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
        y: torch.Tensor = self.down(self.up.activated(x, self.activation))
        return y

    def leave_parts(self) -> None:
        self.down.leaves_parts = True


# ---------------------------------------------------------------- mixture of experts


class Experts(WeightLayer):
    """The matrices of all experts, kept by any method; each rank has its share of every expert's inner dimension, or
    some experts whole. Every rank has all tokens, and outputs are summed over ranks."""

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        build: Build,
        prefix: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: GatedActivation = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.mesh, self.activation, self.leaves_parts = build.mesh, activation, False
        self.is_apart = build.mesh.whole_experts and build.mesh.size > 1  # whether other ranks have other experts
        own, kept = slice(0, intermediate_size), None
        if self.is_apart:
            kept = build.mesh.shard(num_experts, "the number of experts")
        else:
            own = build.mesh.shard(intermediate_size, "moe_intermediate_size")
        self.shape = ExpertsShape(num_experts, hidden_size, intermediate_size, own, bias, kept)
        self.slots = None if build.adapters is None else ExpertsSlots(build.adapters)
        self.method = build.methods.experts(prefix)
        self.method.create(self, build.dtype, build.device)

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, slots: TokenSlots | None = None
    ) -> torch.Tensor:
        """See ExpertsMethod.apply; `chosen` are numbers of the model's experts. `slots`: the adapter of each line of x,
        if some adapters of this step change experts."""
        if self.shape.own_experts is not None:
            chosen, count = chosen - self.shape.own_experts.start, self.shape.num_own_experts
            here = (chosen >= 0) & (chosen < count)
            weights, chosen = torch.where(here, weights, 0.0), torch.where(here, chosen, count)
        if slots is None:
            return self.mesh.all_reduce(self.method.apply(self, x, weights, chosen, self.activation))
        return self.mesh.all_reduce(self._adapted(x, weights, chosen, slots))

    def _adapted(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, slots: TokenSlots) -> torch.Tensor:
        """Compute `forward` with adapters. Lines whose adapter changes experts are computed again, expert by expert,
        because the change of gate and up goes through the activation."""
        assert self.slots is not None, "a model that takes adapters has slots"
        y = self.method.apply(self, x, weights, chosen, self.activation)
        if self.leaves_parts and y.dim() == 3:  # by torch: no kernel is compiled while requests wait
            y = y.float().sum(0).to(x.dtype)
        for change, lines in self.slots.changed(slots):
            y[lines] = self._changed(change, x[lines], weights[lines], chosen[lines]).to(y.dtype)
        return y

    def _changed(
        self, change: ExpertsChange, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts' outputs, [lines, hidden] float32, for lines that have one adapter."""
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(chosen).tolist():
            if expert >= self.shape.num_own_experts:
                continue  # of another rank
            lines, places = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = self.method.dense(self, expert)
            both = _with_factors(x[lines], gate_up, self.gate_up_bias, change.gate_up, expert)
            inner = reference.gated_activation(both, self.activation)  # by torch, too
            own = _with_factors(inner, down, self.down_bias, change.down, expert)
            y.index_add_(0, lines, own.float() * weights[lines, places, None])
        return y

    @property
    def fuses_one_row(self) -> bool:
        """Whether `fused` computes this layer for one row."""
        return self.mesh.size == 1 and type(self.method) is UnquantizedExperts

    def fused(
        self, stream: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, norm: Norm, shared: GatedMLP | None
    ) -> torch.Tensor:
        """Return stream plus the outputs of the experts, and of the shared one, for norm(stream), of one row."""
        options = norm.fused_options
        assert options is not None, "the norm can be fused"
        matrices = None if shared is None else (shared.gate_up.weight, shared.down.weight)
        return kernels.fused_experts(
            stream, weights, chosen, self.gate_up, self.down, self.activation, self.gate_up_bias, self.down_bias,
            shared=matrices, **options,
        )  # fmt: skip

    def can_join(self, shared: GatedMLP) -> bool:
        """Whether `fused` takes this shared expert: its size must be a multiple of the others'."""
        plain = all(isinstance(part.method, UnquantizedLinear) for part in (shared.gate_up, shared.down))
        bare = shared.gate_up.bias is None and shared.down.bias is None
        multiple = shared.down.shape.inputs % self.shape.inner_size == 0
        return plain and bare and multiple and shared.activation == self.activation

    @property
    def takes_packed_rows(self) -> bool:  # type: ignore[override]
        return getattr(self.method, "takes_packed_rows", False)

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        return self.method.tensors(self)

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.method.load(self, key, tensor)

    def process(self) -> None:
        if self.mesh.rank > 0 and self.down_bias is not None and not self.is_apart:
            self.down_bias.data.zero_()  # so that the sum over ranks contains it once
        self.method.process(self)


def _with_factors(
    x: torch.Tensor,
    weight: torch.Tensor,  # [outputs, inputs]
    biases: torch.Tensor | None,  # [experts, outputs]
    factors: tuple[torch.Tensor, torch.Tensor] | None,  # see ExpertsChange
    expert: int,
) -> torch.Tensor:
    y = nn.functional.linear(x, weight.to(x.dtype), None if biases is None else biases[expert])
    return y if factors is None else y + x @ factors[0][expert].T @ factors[1][expert].T


class Routing(WeightLayer, ABC):
    """Chooses each token's experts from the router's scores."""

    @abstractmethod
    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, experts] -> the chosen experts' weights in float32 and their numbers, each [tokens, top_k]."""


ROUTINGS: Kinds[Routing] = Kinds("routing")  # built from (build, spec, num_experts)


@ROUTINGS.register(TopKRoutingSpec)
class TopKRouting(Routing):
    """See kernels.route."""

    def __init__(self, build: Build, spec: TopKRoutingSpec, num_experts: int) -> None:
        super().__init__()
        self.spec = spec
        self.correction: nn.Parameter | None = None
        if spec.correction:  # float32, because it decides between scores that differ little
            self.correction = parameter((num_experts,), torch.float32, build.device)

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spec, groups = self.spec, self.spec.groups
        return kernels.route(
            scores,
            spec.top_k,
            spec.scoring,
            self.correction,
            1 if groups is None else groups.count,
            1 if groups is None else groups.top_k,
            groups is not None and groups.score == "best two",
            spec.normalise,
            spec.scale,
        )


@ROUTINGS.register(SparseMixerRoutingSpec)
class SparseMixerRouting(Routing):
    """Phi's choice of two experts."""

    def __init__(self, build: Build, spec: SparseMixerRoutingSpec, num_experts: int) -> None:
        super().__init__()
        self.tolerance = spec.tolerance

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scores.float()
        left, weights, chosen = scores, [], []
        for _ in range(2):
            best, expert = left.max(dim=-1, keepdim=True)
            far = (best - scores) / scores.abs().clamp(min=best) > 2 * self.tolerance
            shares = torch.softmax(left.masked_fill(far, -torch.inf), dim=-1)
            weights.append(shares.gather(-1, expert))
            chosen.append(expert)
            left = left.scatter(-1, expert, -torch.inf)
        return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


class ExpertTally:
    """Counts the tokens of a layer by ranges of `width` neighbouring experts."""

    def __init__(self, counts: torch.Tensor, width: int) -> None:
        self._counts, self._width = counts, width  # counts [ranges] int64

    def add(self, chosen: torch.Tensor) -> None:
        ranges = chosen.reshape(-1).long() // self._width
        self._counts.index_add_(0, ranges, torch.ones_like(ranges))


@FEED_FORWARDS.register(MoESpec)
class MoE(FeedForward):
    """Experts behind a router, beside a shared expert where the spec has one."""

    def __init__(self, build: DecoderBuild, spec: MoESpec, prefix: str) -> None:
        super().__init__()
        hidden, count = build.hidden_size, spec.num_experts
        self.router = replicated_linear(build, f"{prefix}.router", hidden, count, bias=spec.router_bias)
        self.routing = ROUTINGS.make(build, spec.routing, count)
        self.experts = Experts(
            build,
            f"{prefix}.experts",
            count,
            hidden,
            spec.intermediate_size,
            activation=spec.activation,
            bias=spec.bias,
        )
        self.weighs_inputs = spec.weighs_inputs
        self.tally: ExpertTally | None = None  # None: nobody counts
        # Whether nothing is done with the experts' sum before it is added to the residual.
        self.sums_last = build.mesh.size == 1 and spec.shared is None and not spec.weighs_inputs
        self.shared: GatedMLP | None = None
        self.shared_gate: Linear | None = None
        if spec.shared is not None:
            self.shared = GatedMLP(build, spec.shared.mlp, f"{prefix}.shared")
            if spec.shared.gated:
                self.shared_gate = replicated_linear(build, f"{prefix}.shared_gate", hidden, 1, bias=False)

    def route_evenly(self) -> None:
        """Give a router of random weights rows of equal length. Then no expert is better than others on average, and a
        step reads as many experts as with trained weights, which spread tokens."""
        weight = self.router.weight.data
        if weight.is_floating_point():  # the CPU library has packed it otherwise
            weight.mul_(0.02 * weight.shape[1] ** 0.5 / weight.float().norm(dim=1, keepdim=True).to(weight.dtype))

    def _routed(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self.routing(scores)
        if self.tally is not None:
            self.tally.add(chosen)
        return weights, chosen

    def leave_parts(self) -> None:
        self.experts.leaves_parts = self.sums_last

    @property
    def fuses_one_row(self) -> bool:
        if self.weighs_inputs or self.shared_gate is not None or not self.router.fuses_one_row:
            return False
        return self.experts.fuses_one_row and (self.shared is None or self.experts.can_join(self.shared))

    def one_row(self, stream: torch.Tensor, norm: Norm) -> torch.Tensor:
        options = norm.fused_options
        assert options is not None, "the norm can be fused"
        weights, chosen = self._routed(self.router.fused(stream, **options))
        return self.experts.fused(stream, weights, chosen, norm, self.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._routed(self.router(x))
        slots = None
        if self.experts.slots is not None and self.experts.slots.step.wide:
            slots = self.experts.slots.step.of(x)
        out: torch.Tensor
        if self.weighs_inputs:
            pairs = (x[:, None] * weights[:, :, None].to(x.dtype)).flatten(0, 1)
            ones = torch.ones_like(weights).view(-1, 1)
            if slots is not None:
                slots = TokenSlots(slots.slots.repeat_interleave(chosen.shape[1]), slots.num_slots)
            out = self.experts(pairs, ones, chosen.reshape(-1, 1), slots).view(*chosen.shape, -1).sum(1)
        else:
            out = self.experts(x, weights, chosen, slots)
        if self.shared is None:
            return out
        always = self.shared(x)
        return out + (always if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * always)
