"""A decoder as a list of options, and how to read them from config.json. No torch: settings are checked anywhere.

Every architecture is one DecoderSpec; what a new one needs is a new field here and its use in transformer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.errors import ModelError
from kvasir.layers.rope import RopeSpec
from kvasir.models.config_reader import Config, flag, integer, listed, real
from kvasir.models.fused import Stored
from kvasir.models.rope import read_rope

# transformers' names of activations -> ours (kernels.ACTIVATIONS)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


Names = Mapping[str, str | Stored]


@dataclass(frozen=True)
class MoESpec:
    """A layer's experts in place of its feed-forward network."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool  # the chosen experts' weights sum to one
    layers: tuple[bool, ...]  # which layers have experts
    shared_size: int | None = None  # of an expert that every token goes to, behind a gate

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ModelError(
                f"config.json: num_experts_per_tok ({self.top_k}) is more than there are experts ({self.num_experts})."
            )


@dataclass(frozen=True)
class DecoderSpec:
    """The options of one decoder. Sizes are those of the whole model, not of a rank."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ropes: tuple[RopeSpec | None, ...]  # per layer; None: positions are not rotated
    windows: tuple[int | None, ...]  # per layer: how many last tokens it sees, None: all
    # norms
    norm_eps: float
    norm: Literal["rms", "rms+1", "layer", "layer, no bias"] = "rms"  # rms+1: the checkpoint has the gain less one
    # Where they stand: before attention and feed-forward, after them, both, or over the sum with the residual.
    norm_place: Literal["before", "after", "around", "sum"] = "before"
    parallel: bool = False  # attention and feed-forward read the same residual
    shared_norm: bool = False  # ... through one norm
    final_norm: bool = True
    # attention
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None  # each head for itself, or all of a projection as one
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    # feed-forward
    activation: str = "silu"
    gated: bool = True
    mlp_bias: bool = False
    moe: MoESpec | None = None
    # both ends
    tie_embeddings: bool = False
    embedding_size: int | None = None  # where it is not hidden_size and is projected
    embedding_scale: float = 1.0
    num_positions: int | None = None  # learned embeddings of positions, beside or in place of rotation
    position_offset: int = 0  # position 0 is that entry
    residual_scale: float = 1.0  # of what each part adds to the residual
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({self.num_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})."
            )
        for per_layer, name in ((self.windows, "layer_types"), (self.ropes, "no_rope_layers")):
            if len(per_layer) != self.num_layers:
                raise ModelError(
                    f"config.json: {name} has {len(per_layer)} entries, num_hidden_layers is {self.num_layers}."
                )


@dataclass(frozen=True)
class Architecture:
    """How a family's config.json and checkpoint map to ours."""

    read_spec: Callable[[Config], DecoderSpec]
    # A layer's name in the checkpoint -> its path in the decoder, with the part it fills after a colon where several
    # matrices are fused, or a Stored where the checkpoint's layout is another. A star stands for a number, the same on
    # both sides.
    names: Names | Callable[[Config], Names]  # a function where they differ by configuration
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)  # tensors that old checkpoints carry and nobody needs
    prefix: str = ""  # what every name may also lack: checkpoints of the bare model have no such prefix

    def names_for(self, config: Config) -> Names:
        return self.names(config) if callable(self.names) else self.names


def read_decoder(config: Config, *, head_dim: int | None = None, **options: Any) -> DecoderSpec:
    """The options that config.json gives in the same words for every Llama-like model; the caller adds the rest.

    `head_dim`: see head_dim_of.
    """
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    num_layers = integer(config, "num_hidden_layers")
    head_dim = head_dim_of(config, head_dim)
    options.setdefault("windows", (None,) * num_layers)
    if "ropes" not in options:
        options["ropes"] = (read_rope(config, head_dim),) * num_layers
    options.setdefault("norm_eps", None)
    if options["norm_eps"] is None:
        options["norm_eps"] = real(config, "rms_norm_eps", 1e-6)
    options.setdefault("activation", read_activation(config))
    options.setdefault("tie_embeddings", flag(config, "tie_word_embeddings"))
    return DecoderSpec(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        **options,
    )


def read_activation(config: Config, key: str = "hidden_act", default: str = "silu") -> str:
    name = config.get(key) or default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelError(f"config.json: {key} {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def head_dim_of(config: Config, default: int | None = None) -> int:
    """`default` is what the architecture takes where the file is silent; None: hidden_size / num_attention_heads."""
    if config.get("head_dim") is None and default is None:
        hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        if hidden_size % num_heads:
            raise ModelError(
                f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads}), "
                f"and there is no head_dim."
            )
        default = hidden_size // num_heads
    return integer(config, "head_dim", default)


def same_ropes(config: Config, **options: Any) -> tuple[RopeSpec | None, ...]:
    """One rotation for all layers. `options`: see read_rope."""
    return (read_rope(config, head_dim_of(config), **options),) * integer(config, "num_hidden_layers")


def read_layer_windows(config: Config) -> tuple[int | None, ...]:
    """Qwen's way: a window for layers marked in `layer_types`, or else from `max_window_layers` on, if at all."""
    window = integer(config, "sliding_window", 4096) if flag(config, "use_sliding_window") else None
    if config.get("layer_types") is None:
        first = integer(config, "max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(integer(config, "num_hidden_layers")))
    return windows_by_type(config, window)


def windows_by_type(config: Config, window: int | None, pattern: int = 0) -> tuple[int | None, ...]:
    """A window for layers marked in `layer_types`; without such a list, for all but every `pattern`-th."""
    types = listed(config, "layer_types", str)
    if types is None:
        layers = range(1, integer(config, "num_hidden_layers") + 1)
        types = ["sliding_attention" if layer % pattern else "full_attention" for layer in layers]
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := sorted(set(types) - set(known)):
        raise ModelError(f"config.json: layer type {unknown[0]!r} is not supported; supported are {', '.join(known)}.")
    return tuple(known[kind] for kind in types)


def one_window(config: Config, default: int | None = None) -> tuple[int | None, ...]:
    """The same window on every layer. A null means none; `default` is for files that do not speak of it."""
    window = config.get("sliding_window", default)
    window = None if window is None else integer(config, "sliding_window", default)
    return (window,) * integer(config, "num_hidden_layers")
