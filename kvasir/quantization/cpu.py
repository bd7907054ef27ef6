"""Weights in the CPU library's layouts: bfloat16, 8 or 4 bits quantized while they are loaded, or a GGUF file's own
numbers. Each tensor goes from its file straight to its packed place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any, ClassVar

import torch

from kvasir.kernels.cpu.packed import (
    BF16,
    GGUF,
    INT4,
    INT6,
    INT8,
    Arena,
    Arrangement,
    Format,
    Layout,
    PackedMatrix,
    PackedStack,
    multiply_experts,
)
from kvasir.kernels.reference import LEVELS
from kvasir.log import get_logger, warn_once
from kvasir.quantization.base import (
    ExpertsLayer,
    ExpertsMethod,
    GatedActivation,
    LinearLayer,
    LinearMethod,
    PackedParameter,
    TensorKey,
    UnquantizedExperts,
    UnquantizedLinear,
    create_biases,
    parameter,
    part_of,
)
from kvasir.quantization.coded import QUANTIZERS, Coded
from kvasir.quantization.coded_linear import Quantizer, own_share
from kvasir.quantization.gguf import FileMatrix, PackedRows, expanded

logger = get_logger(__name__)
EXPANDED = (
    "Some quantized matrices are expanded to bf16: they are fused with others that are not quantized or that take "
    "their inputs in another order, the split over workers cuts through a group, groups are no multiples of 16, or "
    "they are of GGUF's IQ or TQ types."
)
ROUNDED = (
    "The CPU library keeps the checkpoint's 8-bit floats, or 4-bit floats with levels of their own, as 8-bit integers: "
    "the smallest values of a group are rounded, by at most a 128th of its largest."
)
PLAIN = UnquantizedLinear()  # keeps the biases
KEPT = "kept"  # in place of `quantization`: the checkpoint's own numbers, of a GGUF file or of safetensors
# By `quantization`. Of a quantized checkpoint only the tensors that are not quantized there get this format.
FORMATS = {None: BF16, "int8": INT8, "int4": INT4, KEPT: BF16, "fp8": BF16, "fp8_block": BF16}
# Layers that are never quantized: small ones that choose a token's experts and weigh the shared one.
ROUTING = (".router", ".shared_gate")


@dataclass(frozen=True)
class CpuLinear:
    """`weight` is the memory of the packed matrix, which `matrix` describes once everything is loaded."""

    format: Format = BF16

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = packed_parameter((self._layout(layer).num_bytes,), device)
        layer.bias = parameter((layer.shape.num_own_outputs,), dtype, device) if layer.shape.bias else None

    def tensors(self, layer: LinearLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        return PLAIN.tensors(layer)

    def load(self, layer: LinearLayer, key: TensorKey, tensor: Any) -> None:
        if key[0] == "bias":
            PLAIN.load(layer, key, tensor)
            return
        part, rows = layer.shape.place(key[1])
        self._matrix(layer).fill(expanded(tensor)[part.own, layer.shape.own_inputs], rows.start)

    def process(self, layer: LinearLayer) -> None:
        layer.__dict__["matrix"] = self._matrix(layer)

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        return matrix_of(layer).linear(x)

    def apply_activated(self, layer: LinearLayer, x: torch.Tensor, activation: str) -> torch.Tensor:
        return matrix_of(layer).linear(x, activation)

    def apply_parts(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        return self.apply(layer, x)

    def fuses_one_row(self, layer: LinearLayer) -> bool:
        return False

    def apply_fused(self, layer: LinearLayer, x: torch.Tensor, **how: Any) -> torch.Tensor:
        raise AssertionError("the CPU library fuses whole steps")

    def dense(self, layer: LinearLayer) -> torch.Tensor:
        return matrix_of(layer).rows(torch.arange(layer.shape.num_own_outputs))

    def _layout(self, layer: LinearLayer) -> Layout:
        return Layout(self.format, layer.shape.num_own_outputs, layer.shape.num_own_inputs)

    def _matrix(self, layer: LinearLayer) -> PackedMatrix:
        bias = None if layer.bias is None else layer.bias.data
        return PackedMatrix(self._layout(layer), layer.weight.data, bias)


@dataclass(frozen=True)
class KeptCpuLinear(CpuLinear):
    """A quantized checkpoint's own numbers, in the library's order. The types of a layer's parts are known once they
    are loaded, so its memory is taken when the last one is. The whole layer is expanded to `format` where a part is not
    quantized, parts want their inputs in different orders, or a rank's share of the inputs cuts through a group."""

    arena: Arena = field(default_factory=Arena)
    quantize: Quantizer | None = None  # what is not quantized in the checkpoint

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = packed_parameter((0,), device)
        layer.bias = parameter((layer.shape.num_own_outputs,), dtype, device) if layer.shape.bias else None

    def load(self, layer: LinearLayer, key: TensorKey, tensor: Any) -> None:
        if key[0] == "bias":
            PLAIN.load(layer, key, tensor)
            return
        parts: dict[str | None, FileMatrix | torch.Tensor] = layer.__dict__.setdefault("parts", {})
        if isinstance(tensor, torch.Tensor) and self.quantize is not None:
            tensor = self.quantize(tensor)
        parts[key[1]] = own_share(layer, key[1], tensor)
        if _is_quantized(tensor):
            layer.__dict__["was_quantized"] = True
        if len(parts) == len(layer.shape.parts) and any(isinstance(part, Coded) for part in parts.values()):
            self._pack(layer)  # now, because codes are not views of the file and take memory

    def process(self, layer: LinearLayer) -> None:
        if "parts" in layer.__dict__:
            self._pack(layer)
        if "matrix" not in layer.__dict__:  # nothing is loaded: random weights
            self._take(layer, self.format, None)

    def _pack(self, layer: LinearLayer) -> None:
        parts: dict[str | None, FileMatrix | torch.Tensor] = layer.__dict__.pop("parts")
        sources = {name: _source(part) for name, part in parts.items()}
        kept = _joined(list(sources.values()))
        if kept is None and layer.__dict__.pop("was_quantized", False):
            warn_once(logger, EXPANDED)
        form, arrangement = kept or (self.format, None)
        matrix = self._take(layer, form, arrangement)
        for name, source in sources.items():
            _, rows = layer.shape.place(name)
            if kept is None:
                matrix.fill(expanded(parts[name]), rows.start)
            else:
                assert source is not None, "all parts are kept"
                source.fill(matrix, rows.start)

    def _take(self, layer: LinearLayer, form: Format, arrangement: Arrangement | None) -> PackedMatrix:
        layout = Layout(form, layer.shape.num_own_outputs, layer.shape.num_own_inputs)
        layer.weight = PackedParameter(self.arena.take(layout.num_bytes))
        bias = None if layer.bias is None else layer.bias.data
        matrix = PackedMatrix(layout, layer.weight.data, bias, arrangement)
        layer.__dict__["matrix"] = matrix
        return matrix


@dataclass(frozen=True)
class LibrarySource:
    """A quantized matrix in the terms of the library: a format that holds its numbers, and what fills it."""

    format: Format
    fill: Callable[[PackedMatrix, int], None]
    order: torch.Tensor | None = None
    column: torch.Tensor | None = None


def _is_quantized(part: FileMatrix | torch.Tensor) -> bool:
    return isinstance(part, Coded) or (isinstance(part, PackedRows) and not part.is_plain)


def _source(part: FileMatrix | torch.Tensor) -> LibrarySource | None:
    """Return the part's numbers in the library's terms; None if it is not quantized, or the library has no format for
    it."""
    if isinstance(part, torch.Tensor):
        return None
    if isinstance(part, Coded):
        return _coded_source(part)
    if part.kind not in GGUF:
        coded = part.coded()
        return None if coded is None else _coded_source(coded)
    rows = part
    return LibrarySource(GGUF[rows.kind][1], lambda matrix, first: matrix.fill_gguf(rows.data, rows.kind, first))


def _joined(sources: Sequence[LibrarySource | None]) -> tuple[Format, Arrangement] | None:
    """Return a format that holds the numbers of all parts, and their common arrangement; None if there is none."""
    found = [source for source in sources if source is not None]
    if len(found) < len(sources):
        return None
    first = found[0]
    for name in ("order", "column"):
        ours = getattr(first, name)
        for theirs in (getattr(source, name) for source in found[1:]):
            if (ours is None) != (theirs is None) or (ours is not None and not torch.equal(ours, theirs)):
                return None
    order = None if first.order is None else first.order.to(torch.int32).contiguous()
    factor = None if first.column is None else first.column.float().contiguous()
    return reduce(Format.joined, (source.format for source in found)), Arrangement(order, factor)


def _coded_source(coded: Coded) -> LibrarySource | None:
    inputs, coding = coded.shape[1], coded.coding
    by_row = coded.scale.shape[1] == 1
    group = 32 if by_row or coding.group % 32 == 0 else 16 if coding.group % 16 == 0 else None
    if group is None:
        return None
    numbers, scale, minimum = coded.numbers(), coded.full_scale(), coded.minimum
    has_min = minimum is not None
    if coding.kind in ("u4", "u6"):
        offset = coding.offset
        form = Format("q4" if coding.kind == "u4" else "q6", group, 0 if has_min else offset, has_min)
    elif coding.kind == "i8":
        numbers, offset, form = numbers ^ 128, 128, Format("q8", group, 128, has_min)
    elif coding.kind == "e2m1":  # twice the levels are whole numbers up to 12
        numbers, offset, form = (coded.levels() * 2 + 32).to(torch.uint8), 32, Format("q6", group, 32)
        scale = scale / 2
    elif coding.kind == "e4m3":
        if inputs % 32:
            return None
        warn_once(logger, ROUNDED)
        group, offset, form = 32, 128, INT8
        numbers, scale = _as_integers(coded.levels(), scale)
    else:
        warn_once(logger, ROUNDED)
        steps = _steps(coding.kind)
        numbers, offset, form = (
            (torch.round(coded.levels() * steps) + 128).to(torch.uint8),
            128,
            Format("q8", group, 128),
        )
        scale = scale / steps
    lowest = None if minimum is None else minimum.float()
    return LibrarySource(
        form,
        lambda matrix, first: matrix.fill_codes(numbers, offset, scale, lowest, first),
        coded.order,
        coded.column,
    )


@cache
def _steps(kind: str) -> int:
    """How many steps of one are nearest to the levels of a 4-bit float."""
    levels = torch.tensor(LEVELS[kind]).double()
    return min(range(64, 128), key=lambda steps: float((torch.round(levels * steps) / steps - levels).square().sum()))


def _as_integers(levels: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit floats as 8-bit integers around 128 with a scale for each 32. Every value from an eighth of a group's
    largest power of two on is kept exactly; the error of smaller ones is at most a 128th of that power."""
    outputs, inputs = levels.shape
    groups = levels.view(outputs, -1, 32)
    most = groups.abs().amax(2, keepdim=True)
    unit = torch.exp2(torch.floor(torch.log2(most.clamp_min(2.0**-9))) - 6)
    numbers = (torch.round(groups / unit) + 128).to(torch.uint8).view(outputs, inputs)
    return numbers, unit[:, :, 0] * scale.repeat_interleave(inputs // 32 // scale.shape[1], 1)


def packed_parameter(shape: tuple[int, ...], device: torch.device) -> PackedParameter:
    return PackedParameter(torch.empty(shape, dtype=torch.uint8, device=device))


def matrix_of(layer: LinearLayer) -> PackedMatrix:
    matrix: PackedMatrix = layer.__dict__["matrix"]
    return matrix


class CpuMethods:
    """The methods of a model that the library runs."""

    keeps_coded = False  # Vocabulary says how the library keeps embedding and head

    def __init__(self, quantization: str | None, num_layers: int | None = None) -> None:
        form = FORMATS[quantization]
        if quantization in (KEPT, "fp8", "fp8_block"):  # 8-bit floats are kept as those of a checkpoint are
            quantize = None if quantization == KEPT else QUANTIZERS[quantization]
            self._linear: LinearMethod = KeptCpuLinear(form, quantize=quantize)
            self._experts: ExpertsMethod = KeptCpuExperts(form, quantize)
        else:
            self._linear, self._experts = CpuLinear(form), CpuExperts(form)
        # Errors of values are not averaged out as those of other matrices are; qkv is a tenth of a layer. The first and
        # the last layer lose as much as half of all layers between them.
        self._sensitive: LinearMethod = CpuLinear(INT6) if quantization == "int4" else self._linear
        ends = {0} if num_layers is None else {0, num_layers - 1}
        self._sensitive_layers = tuple(f"layers.{number}." for number in ends)

    def linear(self, prefix: str) -> LinearMethod:
        if prefix.endswith(ROUTING):
            return CpuLinear(BF16)
        sensitive = prefix.endswith(".qkv") or prefix.startswith(self._sensitive_layers)
        return self._sensitive if sensitive else self._linear

    def experts(self, prefix: str) -> ExpertsMethod:
        return self._experts


# ---------------------------------------------------------------- experts

PLAIN_EXPERTS = UnquantizedExperts()  # knows the checkpoint's tensors


@dataclass(frozen=True)
class CpuExperts:
    """`gate_up` and `down` are the memory of packed matrices, [experts, bytes], which `stacks` describe once everything
    is loaded."""

    format: Format = BF16

    def create(self, layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
        create_biases(layer, dtype, device)
        for name, layout in self._layouts(layer).items():
            shape = PackedStack.memory_shape(layout, layer.shape.num_own_experts)
            setattr(layer, name, packed_parameter(shape, device))

    def tensors(self, layer: ExpertsLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        return PLAIN_EXPERTS.tensors(layer)

    def load(self, layer: ExpertsLayer, key: TensorKey, tensor: torch.Tensor) -> None:
        part = part_of(layer.shape, key)
        if key[0] == "bias":
            PLAIN_EXPERTS.load(layer, key, tensor)
        if key[0] == "bias" or part.expert is None:
            return
        stack = PackedStack(self._layouts(layer)[part.stack], getattr(layer, part.stack).data)
        stack.matrix(part.expert).fill(tensor[part.own], part.first)

    def process(self, layer: ExpertsLayer) -> None:
        layer.__dict__["stacks"] = {
            name: PackedStack(layout, getattr(layer, name).data, _biases(layer, name))
            for name, layout in self._layouts(layer).items()
        }

    def apply(
        self,
        layer: ExpertsLayer,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        activation: GatedActivation,
    ) -> torch.Tensor:
        stacks: dict[str, PackedStack] = layer.__dict__["stacks"]
        if layer.shape.own_experts is not None:  # the library knows no experts of other ranks; their weight is 0
            chosen = chosen.clamp(max=layer.shape.num_own_experts - 1)
        return multiply_experts(stacks["gate_up"], stacks["down"], x, weights, chosen, activation)

    def dense(self, layer: ExpertsLayer, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        stacks: dict[str, PackedStack] = layer.__dict__["stacks"]
        gate_up, down = (stacks[name].matrix(expert) for name in ("gate_up", "down"))
        inner, hidden = layer.shape.num_own, layer.shape.hidden_size
        return gate_up.rows(torch.arange(2 * inner)), down.rows(torch.arange(hidden))

    def _layouts(self, layer: ExpertsLayer) -> dict[str, Layout]:
        inner, hidden = layer.shape.num_own, layer.shape.hidden_size
        return {"gate_up": Layout(self.format, 2 * inner, hidden), "down": Layout(self.format, hidden, inner)}


def _biases(layer: ExpertsLayer, stack: str) -> torch.Tensor | None:
    found: torch.nn.Parameter | None = getattr(layer, f"{stack}_bias")
    return None if found is None else found.data


@dataclass(frozen=True)
class KeptCpuExperts(CpuExperts):
    """A quantized checkpoint's own numbers. All experts of a layer have one format, known once all are loaded."""

    quantize: Quantizer | None = None
    takes_packed_rows: ClassVar[bool] = True

    def create(self, layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
        create_biases(layer, dtype, device)
        for name in ("gate_up", "down"):
            setattr(layer, name, packed_parameter((0, 0), device))

    def load(self, layer: ExpertsLayer, key: TensorKey, tensor: Any) -> None:
        part = part_of(layer.shape, key)
        if key[0] == "bias":
            PLAIN_EXPERTS.load(layer, key, tensor)
        if key[0] == "bias" or part.expert is None:
            return
        parts: dict[TensorKey, FileMatrix | torch.Tensor] = layer.__dict__.setdefault("parts", {})
        if isinstance(tensor, torch.Tensor) and self.quantize is not None:
            tensor = self.quantize(tensor)
        if isinstance(tensor, torch.Tensor):
            parts[key] = tensor[part.own]
        else:
            rows, columns = part.own
            cut = tensor.cut(rows)
            whole = slice(0, cut.shape[1]) if columns == slice(None) else columns
            parts[key] = cut.cut_columns(whole) or cut.expand()[:, columns]
        if len(parts) == 3 * layer.shape.num_own_experts:
            self._pack(layer)

    def process(self, layer: ExpertsLayer) -> None:
        assert "stacks" in layer.__dict__, "all experts are loaded"

    def _pack(self, layer: ExpertsLayer) -> None:
        parts: dict[TensorKey, FileMatrix | torch.Tensor] = layer.__dict__.pop("parts")
        layer.__dict__["stacks"] = stacks = {}
        for name, layout in self._layouts(layer).items():
            own = {key: part for key, part in parts.items() if part_of(layer.shape, key).stack == name}
            sources = {key: _source(part) for key, part in own.items()}
            kept = _joined(list(sources.values()))
            if kept is not None and (kept[1].order is not None or kept[1].factor is not None):
                kept = None  # a stack has no order of inputs
            if kept is None and any(_is_quantized(part) for part in own.values()):
                warn_once(logger, EXPANDED)
            layout = replace(layout, format=kept[0] if kept else self.format)
            memory = torch.empty(PackedStack.memory_shape(layout, layer.shape.num_own_experts), dtype=torch.uint8)
            setattr(layer, name, PackedParameter(memory))
            stack = stacks[name] = PackedStack(layout, memory, _biases(layer, name))
            for key, source in sources.items():
                place = part_of(layer.shape, key)
                assert place.expert is not None, "only this rank's experts are loaded"
                if kept is not None and source is not None:
                    source.fill(stack.matrix(place.expert), place.first)
                else:
                    stack.matrix(place.expert).fill(expanded(own[key]), place.first)


# ---------------------------------------------------------------- embedding and head


@dataclass(frozen=True)
class Vocabulary:
    """How the library keeps embedding and head."""

    head: Format  # also of an embedding that the head shares
    as_in_file: bool = False  # a quantized checkpoint's matrices keep their numbers instead, also in the embedding

    def with_head(self, quantization: str | None) -> Vocabulary:
        """By the setting `head_quantization`."""
        return self if quantization is None else replace(self, head=_HEADS[quantization])

    def keeps(self, matrix: FileMatrix) -> bool:
        return self.as_in_file and _source(matrix) is not None


_HEADS = {"none": BF16, "int8": INT8, "int4": INT6}
# By `quantization`. The head keeps more bits than the layers, because errors there change tokens directly.
VOCABULARIES = {
    None: Vocabulary(BF16),
    "int8": Vocabulary(INT8),
    "int4": Vocabulary(INT6),
    "fp8": Vocabulary(BF16),
    "fp8_block": Vocabulary(BF16),
    KEPT: Vocabulary(BF16, as_in_file=True),
}


def pack_as_in_file(matrix: FileMatrix, bias: torch.Tensor | None) -> PackedMatrix:
    source = _source(matrix)
    joined = _joined([source])
    assert source is not None and joined is not None, "the library keeps the matrix"
    form, arrangement = joined
    layout = Layout(form, *matrix.shape)
    packed = PackedMatrix(layout, Arena().take(layout.num_bytes), bias, arrangement)
    source.fill(packed, 0)
    return packed
