"""A decoder as a list of options, and how to read them from config.json. No torch: settings are checked anywhere.

Every architecture is one DecoderSpec; what a new one needs is a new field here and its use in transformer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelError
from kvasir.layers.rope import LinearScaling, Llama3Scaling, RopeSpec

Config = Mapping[str, Any]  # config.json

# transformers' names of activations -> ours (kernels.ACTIVATIONS)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


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
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer: how many last tokens it sees, None: all
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({self.num_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})."
            )
        if len(self.windows) != self.num_layers:
            raise ModelError(
                f"config.json: layer_types has {len(self.windows)} entries, num_hidden_layers is {self.num_layers}."
            )


@dataclass(frozen=True)
class Architecture:
    """How a family's config.json and checkpoint map to ours."""

    read_spec: Callable[[Config], DecoderSpec]
    # A layer's name in the checkpoint -> its path in the decoder, with the part it fills after a colon where several
    # matrices are fused. A star stands for a number, the same on both sides.
    names: Mapping[str, str]
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)  # tensors that old checkpoints carry and nobody needs


def read_decoder(config: Config, *, head_dim: int | None = None, **options: Any) -> DecoderSpec:
    """The options that config.json gives in the same words for every Llama-like model; the caller adds the rest.

    `head_dim` is what the architecture takes where the file is silent; None: hidden_size / num_attention_heads.
    """
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    num_layers = integer(config, "num_hidden_layers")
    head_dim = integer(config, "head_dim", head_dim or hidden_size // num_heads)
    options.setdefault("windows", (None,) * num_layers)
    return DecoderSpec(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=real(config, "rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim),
        activation=read_activation(config),
        tie_embeddings=flag(config, "tie_word_embeddings"),
        **options,
    )


def read_activation(config: Config) -> str:
    name = config.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: hidden_act {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def read_rope(config: Config, head_dim: int) -> RopeSpec:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as it was before."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError("config.json: rotary embeddings that differ by layer type are not supported for this model.")
    theta = real(given, "rope_theta", real(config, "rope_theta", 10000.0))
    share = real(given, "partial_rotary_factor", real(config, "partial_rotary_factor", 1.0))
    return RopeSpec(int(head_dim * share), theta, _read_scaling(given, config))


def _read_scaling(given: Config, config: Config) -> LinearScaling | Llama3Scaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(real(given, "factor"))
    if kind == "llama3":
        trained = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        return Llama3Scaling(
            factor=real(given, "factor"),
            low_freq_factor=real(given, "low_freq_factor"),
            high_freq_factor=real(given, "high_freq_factor"),
            original_max_positions=trained or integer(config, "max_position_embeddings"),
        )
    raise ModelError(f"config.json: RoPE scaling {kind!r} is not supported; supported are default, linear, llama3.")


def read_layer_windows(config: Config) -> tuple[int | None, ...]:
    """Qwen's way: a window for layers marked in `layer_types`, or else from `max_window_layers` on, if at all."""
    num_layers = integer(config, "num_hidden_layers")
    window = integer(config, "sliding_window", 4096) if flag(config, "use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        first = integer(config, "max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := sorted(set(types) - set(known)):
        raise ModelError(f"config.json: layer type {unknown[0]!r} is not supported; supported are {', '.join(known)}.")
    return tuple(known[kind] for kind in types)


# ---------------------------------------------------------------- single values; null counts as absent


def integer(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of at least `least`. Without a default the file must have it."""
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"config.json: {key} must be a whole number of at least {least}, but is {value!r}.")
    return value


def real(config: Config, key: str, default: float | None = None) -> float:
    """A positive number. Without a default the file must have it."""
    value = _value(config, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {key} must be a positive number, but is {value!r}.")
    return float(value)


def flag(config: Config, key: str, default: bool = False) -> bool:
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, but is {value!r}.")
    return value


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {key}, which this model needs.")
    return value
