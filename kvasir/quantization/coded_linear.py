"""Layers whose weights stay coded on a GPU, or are expanded while they are loaded where nothing multiplies codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvasir import kernels
from kvasir.log import get_logger, warn_once
from kvasir.quantization.base import (
    ExpertsLayer,
    ExpertsMethod,
    GatedActivation,
    LinearLayer,
    LinearMethod,
    TensorKey,
    UnquantizedExperts,
    UnquantizedLinear,
    create_biases,
    parameter,
    part_of,
)
from kvasir.quantization.coded import Coded, stacked
from kvasir.quantization.gguf import FileMatrix, expanded

logger = get_logger(__name__)
PLAIN = UnquantizedLinear()  # keeps the biases
Quantizer = Callable[[torch.Tensor], Coded]
EXPANDED = (
    "Some quantized matrices are expanded to the model's dtype: they are of GGUF's IQ or TQ types, the split over "
    "workers cuts through a group, or experts differ in their codings."
)


def on_device(matrix: FileMatrix, device: torch.device) -> Coded | None:
    """A matrix in the form that kernels.coded_linear reads; None: its type has no codes."""
    coded = matrix if isinstance(matrix, Coded) else matrix.coded()
    return None if coded is None else coded.to(device).packed().centered().narrowed(rounds=True)


def own_share(layer: LinearLayer, name: str | None, tensor: FileMatrix | torch.Tensor) -> FileMatrix | torch.Tensor:
    """Return this rank's share of a part, quantized if it can be cut so."""
    part, _ = layer.shape.place(name)
    columns = layer.shape.own_inputs
    if isinstance(tensor, torch.Tensor):
        return tensor[part.own, columns]
    rows = tensor.cut(part.own)
    return rows.cut_columns(columns) or rows.expand()[:, columns]


@dataclass(frozen=True)
class CodedLinear:
    """The layer's `coded` are its parts: one matrix of codes where all parts are coded alike, else one for each. A part
    that is not quantized stays a plain matrix, unless `quantize` codes it."""

    quantize: Quantizer | None = None

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = parameter((0,), dtype, device)
        layer.bias = parameter((layer.shape.num_own_outputs,), dtype, device) if layer.shape.bias else None

    def tensors(self, layer: LinearLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        return PLAIN.tensors(layer)

    def load(self, layer: LinearLayer, key: TensorKey, tensor: Any) -> None:
        if key[0] == "bias":
            PLAIN.load(layer, key, tensor)
            return
        share, weight = own_share(layer, key[1], tensor), layer.weight
        if isinstance(share, torch.Tensor) and self.quantize is not None:
            share = self.quantize(share.to(weight.device))
        placed: Coded | torch.Tensor | None = None
        if not isinstance(share, torch.Tensor):
            placed = on_device(share, weight.device)
        if placed is None:
            if not isinstance(tensor, torch.Tensor):
                warn_once(logger, EXPANDED)
            placed = expanded(share).to(weight.device, weight.dtype).contiguous()
        parts: dict[str | None, Coded | torch.Tensor] = layer.__dict__.setdefault("parts", {})
        parts[key[1]] = placed
        if len(parts) == len(layer.shape.parts):
            self._join(layer)

    def _join(self, layer: LinearLayer) -> None:
        """Make one matrix of the parts, in the order of the outputs, as far as they are alike."""
        parts: dict[str | None, Coded | torch.Tensor] = layer.__dict__.pop("parts")
        found = [parts[part.name] for part in layer.shape.parts]
        coded = [part for part in found if isinstance(part, Coded)]
        whole = stacked(coded) if len(coded) == len(found) else None
        if not coded:
            whole_plain = torch.cat([part for part in found if isinstance(part, torch.Tensor)])
            layer.__dict__["coded"] = (whole_plain,)
            return
        layer.__dict__["coded"] = (whole,) if whole is not None else tuple(found)

    def process(self, layer: LinearLayer) -> None:
        assert "coded" in layer.__dict__, "all parts are loaded"

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        parts: tuple[Coded | torch.Tensor, ...] = layer.__dict__["coded"]
        if len(parts) == 1:
            return _multiply(x, parts[0], layer.bias)
        y = torch.cat([_multiply(x, part, None) for part in parts], dim=-1)
        return y if layer.bias is None else y + layer.bias

    def dense(self, layer: LinearLayer) -> torch.Tensor:
        parts: tuple[Coded | torch.Tensor, ...] = layer.__dict__["coded"]
        return torch.cat(
            [part if isinstance(part, torch.Tensor) else part.expand(layer.weight.dtype) for part in parts]
        )

    def apply_activated(self, layer: LinearLayer, x: torch.Tensor, activation: str) -> torch.Tensor:
        return kernels.ACTIVATIONS[activation](self.apply(layer, x))

    def apply_parts(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        first, *others = layer.__dict__["coded"]
        if others:
            return self.apply(layer, x)
        return (
            kernels.linear_parts(x, first) if isinstance(first, torch.Tensor) else kernels.coded_linear_parts(x, first)
        )

    def fuses_one_row(self, layer: LinearLayer) -> bool:
        first, *others = layer.__dict__["coded"]
        return not others and (kernels.is_fit if isinstance(first, torch.Tensor) else kernels.is_coded_fit)(first)

    def apply_fused(self, layer: LinearLayer, x: torch.Tensor, **how: Any) -> torch.Tensor:
        (matrix,) = layer.__dict__["coded"]
        product = kernels.fused_linear if isinstance(matrix, torch.Tensor) else kernels.fused_coded_linear
        return product(x, matrix, layer.bias, **how)


def _multiply(x: torch.Tensor, matrix: Coded | torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(matrix, torch.Tensor):
        return kernels.linear(x, matrix, bias)
    return kernels.coded_linear(x, matrix, bias)


class CodedExperts(UnquantizedExperts):
    """The matrices of all experts as codes, stacked: `stacks` has one Coded of [experts * outputs, inputs] for gate_up
    and one for down. Experts whose codings differ are expanded."""

    takes_packed_rows = True

    def __init__(self, quantize: Quantizer | None = None) -> None:
        self._quantize = quantize

    def create(self, layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.gate_up, layer.down = parameter((0,), dtype, device), parameter((0,), dtype, device)
        create_biases(layer, dtype, device)

    def load(self, layer: ExpertsLayer, key: TensorKey, tensor: Any) -> None:
        part, weight = part_of(layer.shape, key), layer.gate_up
        if key[0] == "bias":
            super().load(layer, key, tensor)
        if key[0] == "bias" or part.expert is None:
            return
        rows, columns = part.own
        share: Any = tensor[part.own] if isinstance(tensor, torch.Tensor) else tensor.cut(rows)
        if not isinstance(share, torch.Tensor):
            whole = slice(0, share.shape[1]) if columns == slice(None) else columns
            share = share.cut_columns(whole) or share.expand()[:, columns]
        if isinstance(share, torch.Tensor) and self._quantize is not None:
            share = self._quantize(share.to(weight.device))
        placed = None if isinstance(share, torch.Tensor) else on_device(share, weight.device)
        parts: dict[tuple[str, int, int], Coded | torch.Tensor] = layer.__dict__.setdefault("parts", {})
        place = (part.stack, part.expert, part.first)
        parts[place] = expanded(share).to(weight.device, weight.dtype) if placed is None else placed
        if len(parts) == 3 * layer.shape.num_own_experts:
            self._join(layer)

    def _join(self, layer: ExpertsLayer) -> None:
        parts: dict[tuple[str, int, int], Coded | torch.Tensor] = layer.__dict__.pop("parts")
        stacks: dict[str, Coded] = {}
        of_name = {
            name: [part for place, part in sorted(parts.items(), key=lambda item: item[0]) if place[0] == name]
            for name in ("gate_up", "down")
        }
        for name, found in of_name.items():
            coded = [part for part in found if isinstance(part, Coded)]
            whole = stacked(coded) if len(coded) == len(found) else None
            if whole is not None and kernels.is_coded_fit(whole):
                stacks[name] = whole
        layer.__dict__["stacks"] = stacks if len(stacks) == 2 else {}
        if len(stacks) < 2:
            if any(isinstance(part, Coded) for part in parts.values()):
                warn_once(logger, EXPANDED)
            for name, found in of_name.items():
                plain = [part.expand(layer.gate_up.dtype) if isinstance(part, Coded) else part for part in found]
                values = torch.cat(plain).view(layer.shape.num_own_experts, -1, plain[0].shape[1])
                setattr(layer, name, torch.nn.Parameter(values, requires_grad=False))

    def process(self, layer: ExpertsLayer) -> None:
        assert "stacks" in layer.__dict__, "all experts are loaded"

    def apply(
        self,
        layer: ExpertsLayer,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        activation: GatedActivation,
    ) -> torch.Tensor:
        stacks: dict[str, Coded] = layer.__dict__["stacks"]
        if not stacks:
            return super().apply(layer, x, weights, chosen, activation)
        (tokens, top_k), count = chosen.shape, layer.shape.num_own_experts
        order = torch.argsort(chosen.reshape(-1), stable=True)
        numbers = chosen.reshape(-1)[order]
        # Expert e's rows begin at the first number that is at least e; the last rows may be nobody's.
        starts = torch.searchsorted(numbers, torch.arange(count + 1, device=x.device), out_int32=True)
        own = numbers.clamp(max=count - 1)
        both = self._product(layer, "gate_up", x[order // top_k], starts, own)
        sorted_y = self._product(layer, "down", kernels.gated_activation(both, activation), starts, own)
        if layer.shape.own_experts is not None:
            sorted_y = torch.where((numbers < count)[:, None], sorted_y, 0)
        y = torch.empty_like(sorted_y)
        y[order] = sorted_y
        # Summed in float32 and in the router's order, so that the rest of the batch changes nothing.
        return (y.view(tokens, top_k, -1) * weights[:, :, None]).sum(1).to(x.dtype)

    def dense(self, layer: ExpertsLayer, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        stacks: dict[str, Coded] = layer.__dict__["stacks"]
        if not stacks:
            return super().dense(layer, expert)
        count = layer.shape.num_own_experts
        gate_up, down = (stacks[name].chunk(count)[expert].expand(layer.gate_up.dtype) for name in ("gate_up", "down"))
        return gate_up, down

    def _product(
        self, layer: ExpertsLayer, name: str, x: torch.Tensor, starts: torch.Tensor, own: torch.Tensor
    ) -> torch.Tensor:
        bias: torch.Tensor | None = getattr(layer, f"{name}_bias")
        y = kernels.grouped_coded_linear(x, layer.__dict__["stacks"][name], starts)
        return y if bias is None else y + bias[own]


@dataclass(frozen=True)
class CodedMethods:
    """The methods of a model that keeps a checkpoint's codes, or whose matrices are coded while they are loaded."""

    quantize: Quantizer | None = None
    keeps_coded: ClassVar[bool] = True

    def linear(self, prefix: str) -> LinearMethod:
        routes = prefix.endswith((".router", ".shared_gate"))
        return CodedLinear(None if routes else self.quantize)

    def experts(self, prefix: str) -> ExpertsMethod:
        return CodedExperts(self.quantize)


# ---------------------------------------------------------------- expanded


class ExpandedLinear(UnquantizedLinear):
    """Expands what it loads."""

    def load(self, layer: LinearLayer, key: TensorKey, tensor: Any) -> None:
        super().load(layer, key, expanded(tensor))


class ExpandedMethods:
    """The methods of a quantized checkpoint on a device that multiplies no codes."""

    keeps_coded = False

    def linear(self, prefix: str) -> LinearMethod:
        return ExpandedLinear()

    def experts(self, prefix: str) -> ExpertsMethod:
        return UnquantizedExperts()  # the loader expands for it
