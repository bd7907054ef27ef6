"""A checkpoint on disk: safetensors files, one or several with an index. Worker process; knows no model.

Files are mapped, not read: a tensor's bytes are fetched when it is copied, so nothing is held twice.
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
from kvasir.layers.attention import Attention
from kvasir.log import get_logger

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, its name there, and its shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


class Safetensors:
    """All tensors of a directory, by name. Every name gets `prefix` where none has it."""

    described_by = "config.json"

    def __init__(self, directory: Path, prefix: str = "") -> None:
        self.directory = directory
        self.entries: dict[str, Entry] = {}
        for file in _find_files(directory):
            self.entries.update(_read_header(file))
        if not any(name.startswith(prefix) for name in self.entries):
            self.entries = {prefix + name: entry for name, entry in self.entries.items()}

    def read(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors one after the other, file by file. Each is a view of its file."""
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
    """Let go of the file's pages that were read for a tensor, which nobody reads again: while they are mapped they
    count as this process's memory, and at the end all of the file would."""
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


def _read_header(file: Path) -> dict[str, Entry]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            names = opened.keys()
            return {name: Entry(file, name, tuple(opened.get_slice(name).get_shape())) for name in names}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is truncated or is no safetensors file ({error}); download it again.") from error


def some(names: Collection[str]) -> str:
    """The first few names, and how many more there are."""
    shown = list(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ----------------------------------------------------------------
# Scales for a cache of 8-bit floats that a checkpoint brings, under the names that vLLM reads: one number a layer for
# keys and one for values, by which they are divided before they are stored. Worker process.

logger = get_logger(__name__)

KV_SCALES = ("*.k_scale", "*.v_scale")
_NAME = re.compile(r"\.(\d+)\.[a-z_]*attn(?:\.attn|\.[kv]_proj|\.qkv_proj)?\.([kv]_scale)$")


def load_kv_scales(checkpoint: Safetensors, attentions: Sequence[Attention]) -> None:
    """Give each layer its scales; a layer without any keeps 1."""
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
