"""A checkpoint of safetensors files, one or several with an index, and its scales for an 8-bit cache. Worker process.

Files are mapped: a tensor's bytes are read when it is copied, so that no tensor is in memory twice.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvasir.errors import ModelError
from kvasir.layers.attention import AttentionLayer
from kvasir.log import get_logger

logger = get_logger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's file, its name in that file, and its shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


class Safetensors:
    """All tensors of a directory, by name. If no name begins with `prefix`, it is put before all of them."""

    described_by = "config.json"

    def __init__(self, directory: Path, prefix: str = "") -> None:
        self.directory = directory
        self.entries: dict[str, TensorEntry] = {}
        for file in _find_files(directory):
            self.entries.update(_read_header(file))
        if not any(name.startswith(prefix) for name in self.entries):
            self.entries = {prefix + name: entry for name, entry in self.entries.items()}

    def read(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors, file by file. Each is a view of its file that is valid until the next one is read."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.entries[name].file, []).append(name)
        for file, here in by_file.items():
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


def _read_header(file: Path) -> dict[str, TensorEntry]:
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


# ---------------------------------------------------------------- scales of the KV cache
# A checkpoint may have a scale for a layer's keys and one for its values, by which they are divided before they are
# stored as 8-bit floats. The names are those that vLLM reads.

KV_SCALES = ("*.k_scale", "*.v_scale")
_NAME = re.compile(r"\.(\d+)\.[a-z_]*attn(?:\.attn|\.[kv]_proj|\.qkv_proj)?\.([kv]_scale)$")


def load_kv_scales(checkpoint: Safetensors, attentions: Sequence[AttentionLayer]) -> None:
    """Set each layer's scales. Layers without any in the checkpoint keep 1."""
    found = {name: match for name in checkpoint.entries if (match := _NAME.search(name))}
    for name, tensor in checkpoint.read(found):
        layer, which = int(found[name][1]), found[name][2]
        value = float(tensor) if tensor.numel() == 1 else math.nan
        if not (math.isfinite(value) and value > 0 and layer < len(attentions)):
            raise ModelError(
                f"{name} in {checkpoint.entries[name].file.name} should be one positive number, the scale of a layer's "
                f"cache; it is {tensor.flatten()[:4].tolist()}. Leave kv_cache_dtype at auto to do without it."
            )
        setattr(attentions[layer], which, value)
    logger.info("8-bit KV cache: %d scales from the checkpoint, 1.0 for the rest", len(found))
