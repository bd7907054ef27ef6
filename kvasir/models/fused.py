"""Tensors that a checkpoint keeps in another layout than ours: fused, interleaved by head, transposed. No torch: the
functions below only cut and reshape what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvasir.models.spec import DecoderSpec

Split = Callable[[Any, "DecoderSpec"], Sequence[Any]]  # a tensor -> the targets' tensors, in order


def whole(tensor: Any, spec: DecoderSpec) -> Sequence[Any]:
    return (tensor,)


@dataclass(frozen=True)
class Stored:
    """Where one tensor of the checkpoint goes: cut by `split` into as many as there are targets."""

    targets: tuple[str, ...]
    split: Split = whole
    transposed: bool = False  # matrices stand as [inputs, outputs]


def stacked_qkv(tensor: Any, spec: DecoderSpec) -> Sequence[Any]:
    """All query heads, then all key heads, then all value heads."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return tuple(tensor.split((q, kv, kv)))


def grouped_qkv(tensor: Any, spec: DecoderSpec) -> Sequence[Any]:
    """For each key head: its query heads, the key head, its value head. With as many key heads as heads it is query,
    key and value by turns."""
    shared = spec.num_heads // spec.num_kv_heads
    groups = tensor.reshape(spec.num_kv_heads, shared + 2, spec.head_dim, *tensor.shape[1:])
    q, k, v = groups.split((shared, 1, 1), dim=1)
    return tuple(part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v))


def halves(tensor: Any, spec: DecoderSpec) -> Sequence[Any]:
    """Gate, then up."""
    return tuple(tensor.chunk(2))


# These only cut matrices by their outputs, so they cut rows that are packed as well.
BY_ROWS: tuple[Split, ...] = (whole, stacked_qkv, halves)

QKV = ("layers.*.attention.qkv:q", "layers.*.attention.qkv:k", "layers.*.attention.qkv:v")
GATE_UP = ("layers.*.mlp.gate_up:gate", "layers.*.mlp.gate_up:up")
