"""What a decoder is: its two ends, and one LayerSpec per layer. How a model family's files map to that. No torch.

The dataclasses of attention, feed-forward networks and norms are in layers.spec; spec_reader reads config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.errors import ModelError
from kvasir.layers.spec import AttentionSpec, GatedMLPSpec, MLPSpec, MoESpec, NormSpec
from kvasir.models.config_reader import Config
from kvasir.models.tensor_layout import TensorLayout

FeedForwardSpec = GatedMLPSpec | MLPSpec | MoESpec
Names = Mapping[str, str | TensorLayout]


@dataclass(frozen=True)
class LayerSpec:
    """Attention, then feed-forward; each reads the residual and adds to it. Norms may stand before and after each."""

    attention: AttentionSpec
    mlp: FeedForwardSpec
    attention_norm: NormSpec | None = None
    attention_post_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None
    mlp_post_norm: NormSpec | None = None
    residual_scale: float = 1.0  # multiplies what attention and feed-forward add to the residual

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


def pre_norm(norm: NormSpec, attention: AttentionSpec, mlp: FeedForwardSpec, **options: Any) -> LayerSpec:
    """A layer with a norm before attention and one before feed-forward, as most models have it."""
    return LayerSpec(attention, mlp, attention_norm=norm, mlp_norm=norm, **options)


def output_norm(norm: NormSpec, attention: AttentionSpec, mlp: FeedForwardSpec) -> LayerSpec:
    """A layer with a norm after attention and one after feed-forward, before the residual is added."""
    return LayerSpec(attention, mlp, attention_post_norm=norm, mlp_post_norm=norm)


def sandwich_norm(norm: NormSpec, attention: AttentionSpec, mlp: FeedForwardSpec) -> LayerSpec:
    """A layer with norms before and after both."""
    return LayerSpec(attention, mlp, norm, norm, norm, norm)


def parallel(
    norm: NormSpec, attention: AttentionSpec, mlp: FeedForwardSpec, *, one_norm: bool = True
) -> ParallelLayerSpec:
    """A layer whose attention and feed-forward read the same residual, through one norm or a norm each."""
    return ParallelLayerSpec(attention, mlp, attention_norm=norm, mlp_norm=None if one_norm else norm)


@dataclass(frozen=True)
class DecoderSpec:
    """One decoder. Sizes are those of the whole model, not of a rank."""

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

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window."""
        return tuple(layer.attention.window for layer in self.layers)

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


@dataclass(frozen=True)
class Architecture:
    """How the config.json and the checkpoints of a model family map to a decoder."""

    read_spec: Callable[[Config], DecoderSpec]  # its docstring describes the family in docs/models.md
    # A layer's name in the checkpoint -> its path in the decoder, with ":part" where several matrices of the checkpoint
    # fill one of the decoder, or a TensorLayout where the checkpoint's layout differs. A star stands for a number, the
    # same on both sides. A function where the names depend on config.json.
    names: Names | Callable[[Config], Names]
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)  # tensors of old checkpoints that the decoder does not use
    prefix: str = ""  # of all names; checkpoints of the bare model lack it

    def names_for(self, config: Config) -> Names:
        return self.names(config) if callable(self.names) else self.names


def check_length(key: str, count: int, num_layers: int) -> None:
    """Raise unless a list in config.json with an entry per layer has as many entries as there are layers."""
    if count != num_layers:
        raise ModelError(f"config.json: {key} has {count} entries, num_hidden_layers is {num_layers}.")
