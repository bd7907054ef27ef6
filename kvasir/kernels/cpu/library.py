"""Kvasir's C++ library for the CPU (csrc/cpu): loads it, configures its threads, and declares its structures.

Without the library everything runs on plain torch. `python -m kvasir.kernels.cpu.build` builds it in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from kvasir.errors import ConfigError
from kvasir.kernels.cpu import NAME, fingerprint
from kvasir.log import get_logger

logger = get_logger(__name__)

PATH = Path(__file__).parent / NAME


@cache
def library() -> ctypes.CDLL | None:
    """The library; None if it is missing or cannot be used, which is logged once."""
    try:
        found = ctypes.CDLL(str(PATH))
        _declare(found)
    except (OSError, AttributeError) as error:
        why = "is not built" if not PATH.is_file() else f"cannot be loaded ({error})"
        logger.warning(
            "The CPU library %s: models run on plain torch, slower. With a C++ compiler, "
            "`python -m kvasir.kernels.cpu.build` builds it.",
            why,
        )
        return None
    return found


def _declare(found: ctypes.CDLL) -> None:
    """Declare what the functions return, and raise if the library was built from other sources."""
    for name in ("kv_instruction_set", "kv_instruction_sets", "kv_sources"):
        getattr(found, name).restype = ctypes.c_char_p
    found.kv_layout.restype = ctypes.c_int64
    sources = fingerprint()
    if found.kv_layout() != layout() or (sources is not None and found.kv_sources() != sources.encode()):
        raise OSError("it was built from other sources")


def loaded() -> ctypes.CDLL:
    """The library, for callers that have checked that it is usable."""
    found = library()
    assert found is not None, "the CPU library is usable"
    return found


def instruction_sets() -> list[str]:
    """The instruction sets that this CPU can run, best first."""
    names: bytes = loaded().kv_instruction_sets()
    return names.decode().split()


def instruction_set() -> str:
    name: bytes = loaded().kv_instruction_set()
    return name.decode()


def use_instruction_set(name: str) -> None:
    if not loaded().kv_use_instruction_set(name.encode()):
        raise ValueError(f"This CPU cannot run {name!r}; it can run {', '.join(instruction_sets())}.")


def configure(threads: int, cpus: Sequence[int] | None = None) -> None:
    """Set the number of computing threads and the CPUs they run on; without a list, those the process may use. The
    threads belong to the process: all engines in it use the last setting."""
    bound = (ctypes.c_int32 * threads)(*(cpus[i % len(cpus)] for i in range(threads))) if cpus else None
    granted = loaded().kv_configure(threads, bound)
    if granted < threads:
        raise ConfigError(
            f"cpu_threads={threads}: the system starts no more than {granted} threads; lower cpu_threads, or raise the "
            "limit on processes (ulimit -u, a container's pids limit) or on memory."
        )


def num_threads() -> int:
    return int(loaded().kv_threads())


# ----------------------------------------------------------------
# The structures of csrc/cpu/kvasir_cpu.h and kernels.h, field by field. `library` compares their sizes.

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
CLAMPED = 4  # of experts alone, with the numbers of RoutesStruct


class MatrixStruct(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("padded_inputs", c_int32),
        ("group", c_int32),
        ("offset", c_int32),
        ("data", c_void_p),
        ("scale", c_void_p),
        ("min", c_void_p),
        ("bias", c_void_p),
        ("order", c_void_p),
        ("factor", c_void_p),
    )


class CodesStruct(ctypes.Structure):
    _fields_ = (
        ("codes", c_void_p),
        ("stride", c_int64),
        ("scale", c_void_p),
        ("min", c_void_p),
        ("groups", c_int32),
        ("offset", c_int32),
    )


MAX_PARTS = 4


class AdaptersStruct(ctypes.Structure):
    _fields_ = (
        ("slots", c_int32),
        ("parts", c_int32),
        ("rank", c_int32),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("part_outputs", c_int32 * MAX_PARTS),
        ("shrink", c_void_p),
        ("expand", c_void_p),
        ("gain", c_void_p),
        ("shift", c_void_p),
        ("uses", c_void_p),
    )


class NormStruct(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("eps", c_float), ("gain", c_void_p), ("bias", c_void_p))


class CacheStruct(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("value_offset", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("block_size", c_int32),
        ("is_int8", c_int32),
    )


class SpansStruct(ctypes.Structure):
    _fields_ = (("stride", c_int64), ("step", c_int64))


class RotationStruct(ctypes.Structure):
    _fields_ = (("table", c_void_p), ("size", c_int32), ("interleaved", c_int32))


class GroupStruct(ctypes.Structure):
    _fields_ = (("slots", c_void_p), ("tables", c_void_p), ("table_stride", c_int64))


class StepStruct(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int32),
        ("sequences", c_int32),
        ("causal", c_int32),
        ("num_groups", c_int32),
        ("only_last", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("rows", c_void_p),
        ("query_start", c_void_p),
        ("lengths", c_void_p),
        ("groups", c_void_p),
        ("adapters", c_void_p),
    )


class RowsStruct(ctypes.Structure):
    _fields_ = (
        ("num_computed", c_void_p),
        ("next_token", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("block_size", c_int32),
    )


class LookupStruct(ctypes.Structure):
    _fields_ = (("drafts", c_int32), ("shortest", c_int32), ("longest", c_int32), ("latest", c_int32))


class DraftRowsStruct(ctypes.Structure):
    _fields_ = (
        ("drafts", c_void_p),
        ("counts", c_void_p),
        ("num_computed", c_void_p),
        ("next_token", c_void_p),
    )


class StepTokensStruct(ctypes.Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("lengths", c_void_p),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        ("attention_norm", NormStruct),
        ("attention_post_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("mlp_post_norm", NormStruct),
        ("q_norm", NormStruct),
        ("k_norm", NormStruct),
        ("qkv", MatrixStruct),
        ("o", MatrixStruct),
        ("up", MatrixStruct),
        ("down", MatrixStruct),
        ("qkv_adapters", AdaptersStruct),
        ("o_adapters", AdaptersStruct),
        ("up_adapters", AdaptersStruct),
        ("down_adapters", AdaptersStruct),
        ("rotation", RotationStruct),
        ("cache", CacheStruct),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("group", c_int32),
        ("whole_norm", c_int32),
        ("gated", c_int32),
        ("activation", c_int32),
        ("arrangement", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("residual_scale", c_float),
        ("sinks", c_void_p),
    )


class DecoderStruct(ctypes.Structure):
    _fields_ = (
        ("hidden", c_int32),
        ("num_layers", c_int32),
        ("layers", c_void_p),
        ("embedding", MatrixStruct),
        ("embedding_scale", c_float),
        ("positions", c_void_p),
        ("position_offset", c_int32),
        ("final_norm", NormStruct),
    )


class RoutesStruct(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int32),
        ("top_k", c_int32),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("alpha", c_float),
        ("limit", c_float),
    )


class SamplingStruct(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("temperature", c_void_p),
        ("min_p", c_void_p),
        ("top_p", c_void_p),
        ("top_k", c_void_p),
        ("seeds", c_void_p),
        ("next_token", c_void_p),
    )


def layout() -> int:
    """The value of kv_layout in a library that was built from the same structures."""
    size = ctypes.sizeof
    return size(LayerStruct) << 40 | size(DecoderStruct) << 20 | size(StepStruct) << 10 | size(MatrixStruct)
