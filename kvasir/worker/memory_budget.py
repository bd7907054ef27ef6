"""How a device's memory is divided before there is a KV cache, and which errors mean that it ran out. Worker."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kvasir.errors import ConfigError

GIB = 1 << 30
LARGEST_GRAPH = 1024  # tokens
GRAPH_BYTES = 4 << 20  # measured on an H200: 3.2 MiB for each of 28 layers, 4 for 32
HEAD_BYTES = 8  # of a logit: as the model computes it, and in float32 for the stages


@dataclass(slots=True, frozen=True)
class Profile:
    """Bytes measured by running the largest step once."""

    peak: int  # largest amount that torch held, weights included
    largest_step: int  # the peak without the weights
    outside: int  # memory of the driver and of other processes


def kv_share(total: int, utilization: float, profile: Profile, graphs: int) -> int:
    """Bytes of the engine's share that the KV cache may take. Graphs use the part of the device outside that share;
    what they are expected to need beyond it is set aside."""
    ours = int(total * utilization)
    return ours - profile.peak - profile.outside - max(0, graphs - (total - ours))


def expected_graphs(num_graphs: int, max_rows: int, vocab_size: int, largest_step: int, num_tokens: int) -> int:
    """An estimate of the bytes that graphs will take: what each keeps of the driver's memory, and the working memory of
    the largest forward pass and the largest head, which all share. `num_tokens` is the number of tokens of the largest
    step, of which `largest_step` is the working memory."""
    forward = largest_step * min(num_tokens, LARGEST_GRAPH) // num_tokens
    head = min(max_rows, LARGEST_GRAPH) * vocab_size * HEAD_BYTES
    return num_graphs * GRAPH_BYTES + forward + head


def refuse_more_than_is_free(kv_bytes: int, setting: str, value: int, free: int | None, steps: int) -> None:
    """Raise a ConfigError if a cache of a chosen size leaves less than `steps` bytes (0 where that was not measured).
    The system grants more host memory than there is until it is written to, so it is checked here."""
    if free is None or kv_bytes + steps <= free:
        return
    what = f"{setting}={value} ({kv_bytes / GIB:.1f} GiB)"
    there = f"the {free / GIB:.1f} GiB of memory that are free beside the weights"
    if kv_bytes > free and not steps:
        raise ConfigError(f"{what} is more than {there}; lower it.")
    fits = (free - steps) * value // kv_bytes
    lower = f"lower {setting} to {fits}, or max_num_batched_tokens" if fits > 0 else "lower max_num_batched_tokens"
    raise ConfigError(f"{what} and what the largest step takes ({steps / GIB:.1f} GiB) are more than {there}; {lower}.")


# ---------------------------------------------------------------- out of memory

# Allocations outside torch's allocator fail with other messages: those of graphs (torch.AcceleratorError), of kernel
# code (Triton), of the math library's workspace and of the host. None of these errors has its own type.
_WORDS = re.compile(
    r"\b(CUDA|HIP)\b[^\n]*\bout of memory\b"
    r"|\b(CU|HIP)BLAS(LT)?_STATUS_ALLOC_FAILED\b"
    r"|\bDefaultCPUAllocator: (can't allocate|not enough) memory\b"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out, so that less of it, or a later try, may succeed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None
