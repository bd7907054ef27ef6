"""Checkpoints of safetensors files, one or several with an index, plain or with quantized weights. Worker process.

Files are mapped: a tensor's bytes are read when it is copied, so that no tensor is in memory twice. Where weights are
quantized, each matrix is one entry, read as Coded. An 8-bit cache's scales are read here, too.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import pickle
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvasir.errors import ModelError
from kvasir.layers.attention import AttentionLayer
from kvasir.log import get_logger
from kvasir.models.spec import DecoderSpec, Names
from kvasir.quantization.coded import Coded
from kvasir.quantization.formats.base import Scheme, WeightFormat

logger = get_logger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ROWS = 4096  # of a matrix that are compared at a time


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's file, its name in that file, and its shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


class Safetensors:
    """All tensors of a directory, by name. If no name begins with `prefix`, it is put before all of them. `small`: they
    may be in one file of torch's format."""

    described_by = "config.json"

    def __init__(self, directory: Path, prefix: str = "", small: bool = False) -> None:
        self.directory = directory
        self.made: dict[str, torch.Tensor] = {}  # tensors that are computed from others
        self.entries: dict[str, TensorEntry] = {}
        for file in _find_beside(directory) if small else _find_files(directory):
            self.entries.update(_read_header(file))
        if not any(name.startswith(prefix) for name in self.entries):
            self.entries = {prefix + name: entry for name, entry in self.entries.items()}

    def make(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that was computed from others."""
        self.made[name] = tensor
        self.entries[name] = TensorEntry(self.directory, name, tuple(tensor.shape))

    def use_for(self, name: str, other: str) -> None:
        """Give a tensor a second name."""
        self.entries[other] = self.entries[name]

    def holds_same(self, name: str, other: str) -> bool:
        """Whether two tensors are equal."""
        first, second = self.entries[name], self.entries[other]
        if first.shape != second.shape:
            return False
        with safe_open(first.file, "pt", "cpu") as one, safe_open(second.file, "pt", "cpu") as two:
            left, right = one.get_slice(first.name), two.get_slice(second.name)
            starts = range(0, first.shape[0], _ROWS)
            return all(torch.equal(left[at : at + _ROWS], right[at : at + _ROWS]) for at in starts)

    def add_beside(self, name: str) -> None:
        """Add the tensors of a directory or file beside the checkpoint, named after it: `directory/tensor` and
        `file.tensor`."""
        place = self.directory / name
        files, mark = (_find_beside(place), "/") if place.is_dir() else ([place], ".")
        for file in files:
            self.entries.update((f"{name}{mark}{own}", entry) for own, entry in _read_header(file).items())

    def read(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors, file by file. Each is a view of its file that is valid until the next one is read."""
        by_file: dict[Path, list[str]] = {}
        yield from ((name, self.made[name]) for name in names if name in self.made)
        for name in names:
            if name in self.made:
                continue
            by_file.setdefault(self.entries[name].file, []).append(name)
        for file, here in by_file.items():
            if file.suffix != ".safetensors":
                held = _read_torch(file)
                yield from ((name, held[self.entries[name].name]) for name in here)
                continue
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in here:
                    tensor = opened.get_tensor(self.entries[name].name)
                    yield name, tensor
                    _release(tensor)


def _release(tensor: torch.Tensor) -> None:
    """Unmap the pages of the file that were read for a tensor: mapped pages count as this process's memory, and in the
    end the whole file would."""
    ask = getattr(_libc(), "madvise", None)
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if ask is not None and size > 0:
        ask(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


@cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _find_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ModelError(f"The model directory {directory} does not exist.")
    if (directory / _INDEX).is_file():
        return _read_index(directory)
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    # Mistral ships all weights a second time, under other names, as consolidated*.
    found = sorted(file for file in directory.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if found:
        return found
    if any(directory.glob("*.bin")):
        raise ModelError(f"{directory} has weights as .bin files only; Kvasir reads safetensors, so convert them.")
    raise ModelError(f"{directory} has no weights: there is no .safetensors file.")


def _read_index(directory: Path) -> list[Path]:
    index = directory / _INDEX
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is not a readable index of safetensors files ({error!r}).") from error
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        raise ModelError(
            f"{directory} lacks {len(missing)} of the {len(files)} files named in {_INDEX} ({some(missing)}); "
            f"download them again."
        )
    return [directory / name for name in files]


def _find_beside(directory: Path) -> list[Path]:
    """Find the files of a small module, such as those of sentence-transformers and heads that draft."""
    if not (directory / _SINGLE).is_file():
        for name in ("pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt"):
            if (directory / name).is_file():
                return [directory / name]
    return _find_files(directory)


def _read_torch(file: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a small file in torch's format; no code is read from it."""
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again.") from error
    if not isinstance(held, dict) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise ModelError(f"{file} should hold tensors by name.")
    return held


def _read_header(file: Path) -> dict[str, TensorEntry]:
    if file.suffix != ".safetensors":
        return {name: TensorEntry(file, name, tuple(tensor.shape)) for name, tensor in _read_torch(file).items()}
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            names = opened.keys()
            return {name: TensorEntry(file, name, tuple(opened.get_slice(name).get_shape())) for name in names}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is truncated or is no safetensors file ({error}); download it again.") from error


def some(names: Collection[str]) -> str:
    """The first three names, and the number of the others."""
    shown = list(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def is_finite(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a tensor has neither NaN nor infinity, in its own dtype and in this one. It reads the tensor once."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    extremes = torch.stack(torch.aminmax(tensor if tensor.itemsize > 1 else tensor.float()))  # a NaN is in both
    return bool(extremes.to(dtype).isfinite().all())


def settle_head(spec: DecoderSpec, checkpoint: Safetensors, names: Names) -> DecoderSpec:
    """The decoder with the head that the checkpoint has, where config.json says that the embedding is the head. If the
    checkpoint has another one, that is used, as transformers does."""
    if not (spec.has_head and spec.tie_embeddings):
        return spec
    theirs = {ours: f"{name}.weight" for name, ours in names.items() if isinstance(ours, str)}
    head, embedding = theirs["head"], theirs["embedding"]
    if head in checkpoint.entries and embedding not in checkpoint.entries:
        checkpoint.use_for(head, embedding)
    has_both = head in checkpoint.entries and embedding in checkpoint.entries
    if has_both and not checkpoint.holds_same(head, embedding):
        logger.warning(
            "%s differs from %s, though tie_word_embeddings in config.json says that they are one; it is used as it is",
            head,
            embedding,
        )
        return replace(spec, tie_embeddings=False)
    if spec.head_bias:  # a tied head has none, so the matrix is loaded twice
        checkpoint.use_for(embedding, head)
        return replace(spec, tie_embeddings=False)
    return spec


# ---------------------------------------------------------------- experts under other names
# Tools that quantize a mixture store its experts one by one, under the names that they have in transformers 5, also
# where the model's own checkpoint has other names or all experts in one tensor.

_BY_EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def names_of_experts(names: Names, entries: Collection[str]) -> Names:
    """Return the names of an architecture as a checkpoint with these tensors has them: experts one by one, beside the
    architecture's own ones or in `mlp.experts`."""
    ours = {theirs: (own,) if isinstance(own, str) else own.targets for theirs, own in names.items()}
    stored = [theirs for theirs, targets in ours.items() if all(".mlp.experts:" in target for target in targets)]
    for theirs in stored[:1]:
        within = (theirs.rpartition(".experts") if ".experts" in theirs else theirs.rpartition("."))[0]
        for place in (within, f"{within.rpartition('.')[0]}.mlp"):
            pattern = re.compile(re.escape(f"{place}.experts.*.gate_proj.").replace(r"\*", r"\d+"))
            if not any(map(pattern.match, entries)):
                continue
            prefix = ours[theirs][0].split(":")[0]
            others = {name: own for name, own in names.items() if name not in stored}
            moved = {re.sub(rf"^{re.escape(within)}\.", f"{place}.", name): own for name, own in others.items()}
            return {**moved, **{f"{place}.experts.*.{end}": f"{prefix}:{part}.*" for end, part in _BY_EXPERT.items()}}
    return names


# ---------------------------------------------------------------- scales of the KV cache
# A checkpoint may have a scale for a layer's keys and one for its values, by which they are divided before they are
# stored as 8-bit floats. The names are those that vLLM reads. Old ones are `kv_scale`, for both, and the output's scale
# of the projection.

KV_SCALES = ("*.[qkv]_scale", "*.[qkv]_zero_point", "*.kv_scale", "*.[kv]_proj.output_scale")
_NAME = re.compile(
    r"\.(\d+)\.[a-z_]*attn(?:(?:\.attn|\.[kv]_proj|\.qkv_proj)?\.(k_scale|v_scale|kv_scale)|\.([kv])_proj\.output_scale)$"
)


def load_kv_scales(checkpoint: Safetensors, attentions: Sequence[AttentionLayer]) -> None:
    """Set each layer's scales. Layers without any in the checkpoint keep 1."""
    found = {name: match for name in checkpoint.entries if (match := _NAME.search(name))}
    by_head: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in checkpoint.read(found):
        layer, which = int(found[name][1]), found[name][2] or f"{found[name][3]}_scale"
        values = tensor.flatten().float()
        heads = attentions[layer].all_kv_heads if layer < len(attentions) else 0
        if not (len(values) in (1, heads) and bool(values.isfinite().all()) and bool((values > 0).all())):
            raise ModelError(
                f"{name} in {checkpoint.entries[name].file.name} should be one positive number or one for each of "
                f"{heads} heads, the scale of a layer's cache; it is {values[:4].tolist()}. Leave kv_cache_dtype at "
                f"auto to do without it."
            )
        for own in ("k_scale", "v_scale") if which == "kv_scale" else (which,):
            if len(values) == 1:
                setattr(attentions[layer], own, float(values))
            else:
                by_head.setdefault(layer, {})[own] = values.clone()
    for layer, scales in by_head.items():
        attentions[layer].scale_heads(scales.get("k_scale"), scales.get("v_scale"))
    logger.info(
        "8-bit KV cache: %d scales from the checkpoint, 1.0 for the rest%s",
        len(found),
        f"; those of {len(by_head)} layers are by head" if by_head else "",
    )


class QuantizedSafetensors:
    """The tensors of a checkpoint under the names that unquantized weights would have. Codes are made on `device`."""

    described_by = "config.json"

    def __init__(self, inner: Safetensors, form: WeightFormat, device: torch.device) -> None:
        self.inner, self.form, self.directory, self._device = inner, form, inner.directory, device
        self._matrices: dict[str, tuple[str, Scheme, dict[str, TensorEntry]]] = {}  # by the matrix's name
        self.entries = dict(inner.entries)
        for module in self._modules():
            self._add(module)

    def _modules(self) -> list[str]:
        """The modules that have a tensor which only quantized matrices have."""
        found: dict[str, None] = {}
        for name in self.inner.entries:
            for mark in self.form.marks:
                if name.endswith(ending := self.form.joint + mark):
                    found[name.removesuffix(ending)] = None
        return list(found)

    def _add(self, module: str) -> None:
        scheme, name, joint = self.form.scheme(module), module + self.form.matrix, self.form.joint
        if scheme is None:
            raise ModelError(
                f"{module} has quantized weights, but the quantization config says that it is not quantized; the "
                f"config belongs to another checkpoint. Download both again."
            )
        parts = {part: self.inner.entries.get(module + joint + part) for part in (*scheme.needs, *scheme.may_have)}
        if missing := [module + joint + part for part in scheme.needs if parts[part] is None]:
            raise ModelError(
                f"The weights in {self.directory} are damaged: {some(missing)} is missing; download them again."
            )
        there = {part: entry for part, entry in parts.items() if entry is not None}
        shapes = {part: entry.shape for part, entry in there.items()}
        for part in (*scheme.needs, *scheme.may_have, *scheme.unused):
            self.entries.pop(module + joint + part, None)
        shape = scheme.shape(module, shapes, lambda part: _one(there[part]))
        self._matrices[name] = (module, scheme, there)
        self.entries[name] = TensorEntry(next(iter(there.values())).file, name, tuple(shape))

    def is_empty_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, which some tools give to every matrix that they quantize."""
        module = name.removesuffix(".bias")
        if module == name or module + self.form.matrix not in self._matrices:
            return False
        return not bool(_one(self.inner.entries[name]).any())

    def read(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor | Coded]]:
        """These tensors; each is valid until the next one is read, unless it is Coded."""
        yield from self.inner.read([name for name in names if name not in self._matrices])
        with ExitStack() as stack:
            opened: dict[Path, Callable[[str], torch.Tensor]] = {}
            for name in names:
                if name not in self._matrices:
                    continue
                module, scheme, parts = self._matrices[name]
                tensors = {}
                for part, entry in parts.items():
                    if entry.file not in opened:
                        file = stack.enter_context(safe_open(entry.file, framework="pt", device="cpu"))
                        opened[entry.file] = file.get_tensor
                    tensors[part] = opened[entry.file](entry.name).to(self._device)
                yield name, scheme.decode(module, tensors)


def _one(entry: TensorEntry) -> torch.Tensor:
    with safe_open(entry.file, framework="pt", device="cpu") as opened:
        return opened.get_tensor(entry.name).clone()
