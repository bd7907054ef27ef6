"""Reads a GGUF file's header: metadata and the places of tensors, also of a model split into several files. Any
process; no torch, no numpy.

Reading the header of a file with 50,000 tokens takes some hundredths of a second; tensors are not touched.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvasir.errors import ModelError

# Number in the file -> name, values per block, bytes per block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LARGEST_ALIGNMENT = 1 << 30
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's place in its file. `shape` begins with the outermost dimension, as in torch."""

    file: Path
    kind: str  # a name of TENSOR_TYPES
    shape: tuple[int, ...]
    offset: int  # from the file's beginning
    row_bytes: int  # of the innermost dimension

    @property
    def num_rows(self) -> int:
        rows = 1
        for length in self.shape[:-1]:
            rows *= length
        return rows


@dataclass
class GGUFFile:
    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, GGUFTensor] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """An entry of the model's own section, such as "context_length"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def floats(self, name: str) -> list[float]:
        """The values of a small tensor of float32, such as RoPE factors."""
        if name not in self.tensors:
            raise ModelError(f"{self.path} lacks the tensor {name}.")
        tensor = self.tensors[name]
        if tensor.kind != "F32" or len(tensor.shape) != 1:
            raise ModelError(f"{self.path}: {name} is {tensor.kind} {list(tensor.shape)}, but should be a row of F32.")
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            return list(struct.unpack(f"<{tensor.shape[-1]}f", file.read(tensor.row_bytes)))


def read_gguf(path: str | Path) -> GGUFFile:
    """The file's header, which is read once and cached. The first of several files has those of the others, too."""
    path = Path(path)
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    return _read_all(path, changed)


@lru_cache(maxsize=4)
def _read_all(path: Path, changed: int) -> GGUFFile:
    found = _read(path)
    count = found.metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise ModelError(f"{path} is damaged: split.count is {count!r:.80}; download it again.")
    return _with_others(found, count) if count > 1 else found


def _with_others(first: GGUFFile, count: int) -> GGUFFile:
    """The model of which a file is a part, as llama.cpp splits and names them."""
    name = _PART.fullmatch(first.path.name)
    if name is None or int(name[3]) != count:
        raise ModelError(
            f"{first.path} is one of {count} files of a model, so its name should end in -00001-of-{count:05}.gguf, "
            f"and the others should be named alike; give them their names back."
        )
    paths = [first.path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, count + 1)]
    if first.path != paths[0]:
        raise ModelError(f"{first.path} is a part of a model in {count} files; name the first one, {paths[0].name}.")
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ModelError(
            f"{first.path.parent} lacks {len(missing)} of the {count} files of this model "
            f"({', '.join(missing[:3])}); download them, too."
        )
    whole = GGUFFile(first.path, first.metadata)
    for number, path in enumerate(paths):
        part = _read(path) if number else first
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != count:
            raise ModelError(f"{path} is not part {number + 1} of {count} of a model; download it again.")
        whole.tensors.update(part.tensors)
    wanted = first.metadata.get("split.tensors.count", len(whole.tensors))
    if wanted != len(whole.tensors):
        raise ModelError(
            f"The {count} files of {first.path} have {len(whole.tensors)} tensors, but should have {wanted!r:.20}; "
            f"download them again."
        )
    return whole


def _read(path: Path) -> GGUFFile:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not begin with GGUF.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).read(path)
            except (struct.error, OverflowError, MemoryError, RecursionError, IndexError, KeyError) as error:
                raise ModelError(
                    f"{path} is truncated or damaged: its header ends early; download it again."
                ) from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4

    def read(self, path: Path) -> GGUFFile:
        found = GGUFFile(path)
        (version,) = self.numbers("I", 1)
        if version not in (2, 3):
            raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 can be read.")
        num_tensors, num_entries = self.numbers("Q", 2)
        for _ in range(num_entries):
            key = self.string()
            (kind,) = self.numbers("I", 1)
            found.metadata[key] = self.value(kind)
        infos = [self.tensor_info() for _ in range(num_tensors)]
        alignment = found.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _LARGEST_ALIGNMENT:
            raise ModelError(f"{path} is damaged: general.alignment is {alignment!r}; download it again."[:300])
        start = -(-self.at // alignment) * alignment
        for name, shape, number, offset in infos:
            found.tensors[name] = self.place(path, name, shape, number, start + offset)
        return found

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (num_dimensions,) = self.numbers("I", 1)
        shape = self.numbers("Q", num_dimensions)[::-1]
        (number,) = self.numbers("I", 1)
        (offset,) = self.numbers("Q", 1)
        return name, shape, number, offset

    def place(self, path: Path, name: str, shape: tuple[int, ...], number: int, offset: int) -> GGUFTensor:
        if number not in TENSOR_TYPES:
            known = ", ".join(kind for kind, _, _ in TENSOR_TYPES.values())
            raise ModelError(f"{path}: {name} is of tensor type {number}, which cannot be read; known are {known}.")
        kind, block, size = TENSOR_TYPES[number]
        if not shape or shape[-1] % block:
            raise ModelError(f"{path}: {name} is {list(shape)}, which cannot be {kind}.")
        tensor = GGUFTensor(path, kind, shape, offset, shape[-1] // block * size)
        if offset + tensor.num_rows * tensor.row_bytes > len(self.data):
            raise ModelError(f"{path} is truncated: it ends before the end of {name}; download it again.")
        return tensor

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return values

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        begin, self.at = self.at + 8, self.at + 8 + length
        if self.at > len(self.data):
            raise IndexError("past the end")
        return self.data[begin : self.at].decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            (inner,) = self.numbers("I", 1)
            (count,) = self.numbers("Q", 1)
            if inner in (_STRING, _ARRAY):
                return [self.value(inner) for _ in range(count)]
            return list(self.numbers(_NUMBERS[inner], count))
        return self.numbers(_NUMBERS[kind], 1)[0]
