"""What a decoder, or an encoder, is: its two ends, and one LayerSpec per layer. How a model family's files map to
that. No torch.

The dataclasses of attention, feed-forward networks and norms are in layers.spec; config_reader reads config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvasir.config.pooling import DenseSpec, num_labels
from kvasir.layers.spec import (
    AttentionSpec,
    EncoderAttentionSpec,
    GatedMLPSpec,
    LatentAttentionSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)

Config = Mapping[str, Any]  # config.json
FeedForwardSpec = GatedMLPSpec | MLPSpec | MoESpec
AnyAttentionSpec = AttentionSpec | LatentAttentionSpec


@dataclass(frozen=True)
class LayerSpec:
    """Attention, then feed-forward; each reads the residual and adds to it. Norms may stand before and after each."""

    attention: AnyAttentionSpec
    mlp: FeedForwardSpec
    attention_norm: NormSpec | None = None
    attention_post_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None
    mlp_post_norm: NormSpec | None = None
    residual_scale: float = 1.0  # multiplies what attention and feed-forward add to the residual

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later ones."""
        return isinstance(self.attention, EncoderAttentionSpec)

    def with_attention(self, **changes: Any) -> LayerSpec:
        """The same layer with some options of its attention changed."""
        return replace(self, attention=replace(self.attention, **changes))


@dataclass(frozen=True)
class ParallelLayerSpec(LayerSpec):
    """Attention and feed-forward read the same residual. Without an `mlp_norm` both read the attention's norm."""


@dataclass(frozen=True)
class PostNormLayerSpec(LayerSpec):
    """Each norm follows the sum with the residual, and its result is the next residual, as in the first transformers.
    Only the post norms are used."""


def pre_norm(norm: NormSpec, attention: AnyAttentionSpec, mlp: FeedForwardSpec, **options: Any) -> LayerSpec:
    """A layer with a norm before attention and one before feed-forward, as most models have it."""
    return LayerSpec(attention, mlp, attention_norm=norm, mlp_norm=norm, **options)


def output_norm(norm: NormSpec, attention: AnyAttentionSpec, mlp: FeedForwardSpec) -> LayerSpec:
    """A layer with a norm after attention and one after feed-forward, before the residual is added."""
    return LayerSpec(attention, mlp, attention_post_norm=norm, mlp_post_norm=norm)


def sandwich_norm(norm: NormSpec, attention: AnyAttentionSpec, mlp: FeedForwardSpec) -> LayerSpec:
    """A layer with norms before and after both."""
    return LayerSpec(attention, mlp, norm, norm, norm, norm)


def parallel(
    norm: NormSpec, attention: AnyAttentionSpec, mlp: FeedForwardSpec, *, one_norm: bool = True
) -> ParallelLayerSpec:
    """A layer whose attention and feed-forward read the same residual, through one norm or a norm each."""
    return ParallelLayerSpec(attention, mlp, attention_norm=norm, mlp_norm=None if one_norm else norm)


@dataclass(frozen=True)
class DecoderSpec:
    """One decoder, or an encoder: its layers then have EncoderAttentionSpecs. Sizes are those of the whole model, not
    of a rank."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    tie_embeddings: bool = False
    embedding_size: int | None = None  # where it differs from hidden_size: embeddings are projected
    embedding_scale: float = 1.0
    num_positions: int | None = None  # learned position embeddings, beside or in place of rotation
    position_offset: int = 0  # entry of position 0 among them
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    embedding_norm: NormSpec | None = None  # of the sum of all embeddings
    # Kinds of tokens, such as those of a first and a second text, each with an embedding. A token of kind k has the
    # number id + k * vocab_size.
    num_token_types: int = 0
    has_head: bool = True  # whether logits are computed

    @property
    def is_encoder(self) -> bool:
        """Whether tokens see later ones. A prompt must then be computed in one step, and nothing of it is cached."""
        return any(layer.is_bidirectional for layer in self.layers)

    def with_mlps(self, mlps: Sequence[FeedForwardSpec]) -> DecoderSpec:
        """The same decoder with other feed-forward networks, one for each layer."""
        layers = (replace(layer, mlp=mlp) for layer, mlp in zip(self.layers, mlps, strict=True))
        return replace(self, layers=tuple(layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def unsupported_by_packages(self) -> str | None:
        """Name what in its attention other packages do not compute; None if they compute all of it."""
        kinds = [layer.attention for layer in self.layers]
        if any(isinstance(attention, LatentAttentionSpec) for attention in kinds):
            return "a latent cache"
        return "attention sinks" if any(getattr(attention, "sinks", False) for attention in kinds) else None

    @property
    def head_dims(self) -> frozenset[int]:
        """The sizes of the heads that an attention backend must know."""
        return frozenset(layer.attention.head_dim for layer in self.layers)


def vary_attention(layer: LayerSpec, **options: Sequence[Any]) -> tuple[LayerSpec, ...]:
    """Copies of a layer, one for each value of an attention option: vary_attention(layer, window=(None, 4096))."""
    return tuple(
        layer.with_attention(**dict(zip(options, values, strict=True)))
        for values in zip(*options.values(), strict=True)
    )


# ---------------------------------------------------------------- tensors of checkpoints
# Checkpoints may hold tensors otherwise than the decoder: fused, grouped by head, transposed. The functions below only
# cut and reshape the tensors they are given.

# A tensor, and the layer it belongs to (None outside the layers) -> the tensors of the targets, in their order.
Split = Callable[[Any, LayerSpec | None], Sequence[Any]]


def whole(tensor: Any, layer: LayerSpec | None) -> Sequence[Any]:
    """Give all of a tensor to its one target."""
    return (tensor,)


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of the checkpoint, which `split` cuts into as many tensors as there are targets."""

    targets: tuple[str, ...]
    split: Split = whole
    transposed: bool = False  # the checkpoint has its matrices as [inputs, outputs]
    # The tensor holds an entry for each number that the targets' last star stands for, and each is cut as above: all
    # experts of a layer in one tensor. "rows": the entries' rows follow each other, without a dimension for the entry.
    stacked: Literal["no", "entries", "rows"] = "no"
    bare: bool = False  # the name is the weight's own, without ".weight"; a bias has "_bias" appended


def _attention_of(layer: LayerSpec | None) -> AttentionSpec:
    assert layer is not None and isinstance(layer.attention, AttentionSpec), "a layer has queries, keys and values"
    return layer.attention


def stacked_qkv(tensor: Any, layer: LayerSpec | None) -> Sequence[Any]:
    """All query heads, then all key heads, then all value heads."""
    attention = _attention_of(layer)
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    return tuple(tensor.split((q, kv, kv)))


def grouped_qkv(tensor: Any, layer: LayerSpec | None) -> Sequence[Any]:
    """For each key head: its query heads, the key head, its value head. With as many key heads as query heads that is
    query, key and value by turns."""
    attention = _attention_of(layer)
    shared = attention.heads // attention.kv_heads
    groups = tensor.reshape(attention.kv_heads, shared + 2, attention.head_dim, *tensor.shape[1:])
    q, k, v = groups.split((shared, 1, 1), dim=1)
    return tuple(part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v))


def halves(tensor: Any, layer: LayerSpec | None) -> Sequence[Any]:
    """Gate, then up."""
    return tuple(tensor.chunk(2))


def by_turns(tensor: Any, layer: LayerSpec | None) -> Sequence[Any]:
    """A row of the gate, then one of up, and so on."""
    if hasattr(tensor, "cut"):  # it is quantized
        return tensor.cut(slice(0, None, 2)), tensor.cut(slice(1, None, 2))
    return tensor[::2], tensor[1::2]


# These cut matrices along their outputs only, so they also cut rows that are packed.
BY_ROWS: tuple[Split, ...] = (whole, stacked_qkv, halves, by_turns)

QKV = ("layers.*.attention.qkv:q", "layers.*.attention.qkv:k", "layers.*.attention.qkv:v")
GATE_UP = ("layers.*.mlp.gate_up:gate", "layers.*.mlp.gate_up:up")
EXPERT_GATE_UP = ("layers.*.mlp.experts:gate.*", "layers.*.mlp.experts:up.*")
EXPERT_DOWN = ("layers.*.mlp.experts:down.*",)

Names = Mapping[str, str | TensorLayout]


# ---------------------------------------------------------------- a model family


def decoder_heads(config: Config, kind: str) -> tuple[DenseSpec, ...]:
    """The heads of decoders that classify: one matrix, or two in reward models."""
    size, count = config["hidden_size"], num_labels(config)
    if tokens := config.get("classifier_from_token"):
        return (DenseSpec("score", size, 1, bias=False, from_tokens=tuple(tokens)),)
    if kind == "reward":
        return DenseSpec("score.0", size, size, activation="relu"), DenseSpec("score.2", size, count)
    return (DenseSpec("score", size, count, bias=kind == "token_classify"),)


@dataclass(frozen=True)
class Architecture:
    """How the config.json and the checkpoints of a model family map to a decoder."""

    read_spec: Callable[[Config], DecoderSpec]  # its docstring describes the family in docs/models.md
    # A layer's name in the checkpoint -> its path in the decoder, with ":part" where several matrices of the checkpoint
    # fill one of the decoder, or a TensorLayout where the checkpoint's layout differs. A star stands for a number, the
    # same on both sides. A function where the names depend on config.json.
    names: Names | Callable[[Config], Names]
    # Patterns of tensors that the decoder does not use: those of old checkpoints, and what a config.json announces.
    ignored: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ("*.rotary_emb.inv_freq",)
    prefix: str = ""  # of all names; checkpoints of the bare model lack it
    pooling: str = "last"  # what a vector is made of where no file says it; see config.pooling
    # The layers of the pooler for a kind of model (classify, token_classify, reward).
    heads: Callable[[Config, str], tuple[DenseSpec, ...]] = decoder_heads

    def names_for(self, config: Config) -> Names:
        return self.names(config) if callable(self.names) else self.names

    def ignored_for(self, config: Config) -> tuple[str, ...]:
        return self.ignored(config) if callable(self.ignored) else self.ignored
