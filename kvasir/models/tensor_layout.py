"""How checkpoints lay out tensors that the decoder keeps otherwise: fused, grouped by head, transposed. No torch: the
functions only cut and reshape the tensors they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvasir.models.spec import LayerSpec

# A tensor, and the layer it belongs to (None outside the layers) -> the tensors of the targets, in their order.
Split = Callable[[Any, "LayerSpec | None"], Sequence[Any]]


def whole(tensor: Any, layer: LayerSpec | None) -> Sequence[Any]:
    """One target gets all of it."""
    return (tensor,)


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of the checkpoint, which `split` cuts into as many tensors as there are targets."""

    targets: tuple[str, ...]
    split: Split = whole
    transposed: bool = False  # the checkpoint has its matrices as [inputs, outputs]


def stacked_qkv(tensor: Any, layer: LayerSpec | None) -> Sequence[Any]:
    """All query heads, then all key heads, then all value heads."""
    assert layer is not None, "queries, keys and values belong to a layer"
    attention = layer.attention
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    return tuple(tensor.split((q, kv, kv)))


def grouped_qkv(tensor: Any, layer: LayerSpec | None) -> Sequence[Any]:
    """For each key head: its query heads, the key head, its value head. With as many key heads as query heads that is
    query, key and value by turns."""
    assert layer is not None, "queries, keys and values belong to a layer"
    attention = layer.attention
    shared = attention.heads // attention.kv_heads
    groups = tensor.reshape(attention.kv_heads, shared + 2, attention.head_dim, *tensor.shape[1:])
    q, k, v = groups.split((shared, 1, 1), dim=1)
    return tuple(part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v))


def halves(tensor: Any, layer: LayerSpec | None) -> Sequence[Any]:
    """Gate, then up."""
    return tuple(tensor.chunk(2))


# These cut matrices along their outputs only, so they also cut rows that are packed.
BY_ROWS: tuple[Split, ...] = (whole, stacked_qkv, halves)

QKV = ("layers.*.attention.qkv:q", "layers.*.attention.qkv:k", "layers.*.attention.qkv:v")
GATE_UP = ("layers.*.mlp.gate_up:gate", "layers.*.mlp.gate_up:up")
