"""Reads a config.json: checked values, the parts of a decoder that most architectures write in the same words, and
rotary embeddings in the old and new spelling of transformers. No torch.

A null counts as absent. `default` arguments hold where the file has no such entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from kvasir.errors import ModelError
from kvasir.layers.spec import (
    AttentionSpec,
    DynamicScaling,
    EncoderAttentionSpec,
    GatedMLPSpec,
    LayerNormSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MLPSpec,
    NormSpec,
    RMSNormSpec,
    RopeSpec,
    Scaling,
    YarnScaling,
)
from kvasir.models.spec import Config, DecoderSpec, LayerSpec

# Larger values mean a damaged file, and building such a model would take all memory.
_MOST = {"num_hidden_layers": 4096, "max_position_embeddings": 1 << 27, "sliding_window": 1 << 31}
_MOST_OF_OTHERS = 1 << 24
_RANGES = {"factor": (1 / 64, 4096.0)}  # of RoPE scaling, which multiplies lengths
_RANGE_OF_OTHERS = (1e-30, 1e30)  # products and quotients with these fit into a float32


def fault_of_integer(key: str, value: object, least: int = 1) -> str | None:
    """What is wrong with the value of the entry `key`, in words that follow its name; None: nothing."""
    most = _MOST.get(key, _MOST_OF_OTHERS)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        return f"must be a whole number of at least {least}, but is {_shown(value)}"
    return f"must be at most {most}, but is {_shown(value)}" if value > most else None


def fault_of_real(key: str, value: object) -> str | None:
    """What is wrong with a value that must be a positive number; see fault_of_integer."""
    least, most = _RANGES.get(key, _RANGE_OF_OTHERS)
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:  # false for NaN
        return None
    wanted = f"number from {least:g} to {most:g}" if key in _RANGES else "positive number"
    return f"must be a {wanted}, but is {_shown(value)}"


def integer(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of at least `least`. Without a default the entry is required."""
    value = _value(config, key, default)
    if fault := fault_of_integer(key, value, least):
        raise ModelError(f"config.json: {key} {fault}.")
    assert isinstance(value, int)
    return value


def choice(config: Config, key: str, known: Sequence[str], default: str | None = None) -> str:
    """Read one of several words. Without a default the entry is required."""
    value = _value(config, key, default)
    if value not in known:
        raise ModelError(f"config.json: {key} {_shown(value)} is not supported; supported are {', '.join(known)}.")
    return str(value)


def real(config: Config, key: str, default: float | None = None) -> float:
    """A positive number. Without a default the entry is required."""
    value = _value(config, key, default)
    if fault := fault_of_real(key, value):
        raise ModelError(f"config.json: {key} {fault}.")
    return float(value)


_INTEGERS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings"),
)


def check_numbers(config: Config) -> None:
    """Raise if one of the entries that nearly all models have is impossible. Settings are computed from them before an
    architecture reads them."""
    for key in _INTEGERS:
        if config.get(key) is not None:
            integer(config, key)
    for key in ("rope_parameters", "rope_scaling"):
        optional_real(mapping(config, key), "factor")
        if mapping(config, key).get("original_max_position_embeddings") is not None:
            integer(mapping(config, key), "original_max_position_embeddings")
    optional_real(config, "rms_norm_eps")


def listed(config: Config, key: str, kind: type) -> list[Any] | None:
    """A list of values of one type; None if the file has none."""
    value = config.get(key)
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(each, kind) for each in value)):
        raise ModelError(f"config.json: {key} must be a list of {kind.__name__}, but is {_shown(value)}.")
    return None if value is None else list(value)


def mapping(config: Config, key: str) -> Config:
    """A mapping; empty if the file has none."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {key} must be a mapping, but is {_shown(value)}.")
    return value


def optional_real(config: Config, key: str) -> float | None:
    """A positive number; None if the file has none."""
    return None if config.get(key) is None else real(config, key)


def flag(config: Config, key: str, default: bool = False) -> bool:
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, but is {_shown(value)}.")
    return value


def refuse_others(config: Config, known: Mapping[str, object]) -> None:
    """Raise for an option that has another value than the one that is implemented."""
    for key, value in known.items():
        if config.get(key) not in (None, value):
            raise ModelError(f"config.json: {key}={_shown(config[key])} is not supported; supported is {value!r}.")


def renamed(config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    """The entries, with those in `names` under their second name as well."""
    return {**config, **{ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}}


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {key}, which this model needs.")
    return value


def _shown(value: object) -> str:
    """A value in one line of an error message; a damaged file may hold anything."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:76]} ..."


def check_length(key: str, count: int, num_layers: int) -> None:
    """Raise unless a list in config.json with an entry per layer has as many entries as there are layers."""
    if count != num_layers:
        raise ModelError(f"config.json: {key} has {count} entries, num_hidden_layers is {num_layers}.")


# ---------------------------------------------------------------- the decoder

# transformers' names of activations -> ours (kernels.ACTIVATIONS)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
}
MLPKind = TypeVar("MLPKind", GatedMLPSpec, MLPSpec)


def read_decoder(
    config: Config, layers: LayerSpec | Sequence[LayerSpec], final_norm: NormSpec | None, **ends: Any
) -> DecoderSpec:
    """A decoder of these layers, or of num_hidden_layers equal ones. `ends`: further fields of DecoderSpec."""
    if isinstance(layers, LayerSpec):
        layers = (layers,) * integer(config, "num_hidden_layers")
    if config.get("is_causal") is False:  # GTE-Qwen2 and others: a decoder that was trained to embed
        layers = [layer if layer.is_bidirectional else both_directions(layer) for layer in layers]
    ends.setdefault("tie_embeddings", flag(config, "tie_word_embeddings"))
    return DecoderSpec(integer(config, "vocab_size"), integer(config, "hidden_size"), tuple(layers), final_norm, **ends)


def both_directions(layer: LayerSpec, share: int = 1) -> LayerSpec:
    """Return the layer with attention to later tokens too. If it has a window, tokens see 1/share of it on either
    side."""
    attention = layer.attention
    if not isinstance(attention, AttentionSpec):
        raise ModelError("config.json: is_causal=false is not supported for attention with a latent cache.")
    if (
        attention.clip is not None
        or attention.sinks
        or attention.temperature is not None
        or attention.chunk is not None
    ):
        raise ModelError("config.json: is_causal=false is not supported for this model's attention.")
    entries = {field.name: getattr(attention, field.name) for field in fields(attention)}
    reach = None if attention.window is None else attention.window // share
    return replace(layer, attention=EncoderAttentionSpec(**{**entries, "window": None}, reach=reach))


# ---------------------------------------------------------------- norms


def read_rms_norm(config: Config, default: float = 1e-6, *, plus_one: bool = False) -> RMSNormSpec:
    return RMSNormSpec(real(config, "rms_norm_eps", default), plus_one)


def read_layer_norm(config: Config, key: str = "layer_norm_eps", *, bias: bool = True) -> LayerNormSpec:
    return LayerNormSpec(real(config, key, 1e-5), bias)


# ---------------------------------------------------------------- feed-forward


def read_gated_mlp(config: Config, **options: Any) -> GatedMLPSpec:
    """`options`: further fields of GatedMLPSpec."""
    options.setdefault("activation", read_activation(config))
    return GatedMLPSpec(integer(config, "intermediate_size"), **options)


def read_activation(config: Config, key: str = "hidden_act", default: str = "silu") -> str:
    name = config.get(key) or default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelError(f"config.json: {key} {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


# ---------------------------------------------------------------- attention


def read_attention(config: Config, *, head_dim: int | None = None, **options: Any) -> AttentionSpec:
    """Attention whose sizes stand in the usual entries. `head_dim`: see head_dim_of; `options`: further fields of
    AttentionSpec. Without `rope` among them positions are rotated as config.json says."""
    heads = integer(config, "num_attention_heads")
    kv_heads, head_dim = integer(config, "num_key_value_heads", heads), head_dim_of(config, head_dim)
    if "rope" not in options:
        options["rope"] = read_rope(config, head_dim)
    return AttentionSpec(heads, kv_heads, head_dim, **options)


def head_dim_of(config: Config, default: int | None = None) -> int:
    """Read the size of a head. `default` None stands for hidden_size / num_attention_heads."""
    if config.get("head_dim") is None and default is None:
        hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        if hidden_size % num_heads:
            raise ModelError(
                f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads}), "
                f"and there is no head_dim."
            )
        default = hidden_size // num_heads
    return integer(config, "head_dim", default)


def yarn_score_scale(rope: RopeSpec, config: Config) -> float:
    """Return the factor of scores in DeepSeek's models where yarn stretches the text: the square of its growth."""
    weight = optional_real({**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}, "mscale_all_dim")
    if not isinstance(rope.scaling, YarnScaling) or weight is None:
        return 1.0
    return yarn_growth(rope.scaling.factor, weight) ** 2


def read_window(config: Config, default: int | None = None) -> int | None:
    """The window of all layers. A null means none."""
    window = config.get("sliding_window", default)
    return None if window is None else integer(config, "sliding_window", default)


def read_layer_windows(config: Config) -> tuple[int | None, ...]:
    """Windows as Qwen writes them: if at all, for layers marked in `layer_types`, or from `max_window_layers` on."""
    window = read_window(config, 4096) if flag(config, "use_sliding_window") else None
    if config.get("layer_types") is None:
        first = integer(config, "max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(integer(config, "num_hidden_layers")))
    return windows_by_type(config, window)


def windows_by_type(config: Config, window: int | None, pattern: int = 0) -> tuple[int | None, ...]:
    """A window for layers marked in `layer_types`; without such a list, for all but every `pattern`-th."""
    types, num_layers = listed(config, "layer_types", str), integer(config, "num_hidden_layers")
    if types is None:
        types = ["sliding_attention" if layer % pattern else "full_attention" for layer in range(1, num_layers + 1)]
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := sorted(set(types) - set(known)):
        raise ModelError(f"config.json: layer type {unknown[0]!r} is not supported; supported are {', '.join(known)}.")
    check_length("layer_types", len(types), num_layers)
    return tuple(known[kind] for kind in types)


# ---------------------------------------------------------------- rotary embedding


def read_rope(
    config: Config, head_dim: int, *, theta: float = 10000.0, share: float = 1.0, interleaved: bool = False
) -> RopeSpec:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as it was before. `theta` and
    `share` (of a head's dimensions that are rotated) are the architecture's defaults."""
    given = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError("config.json: rotary embeddings that differ by layer type are not supported for this model.")
    theta = real(given, "rope_theta", real(config, "rope_theta", theta))
    share = real(given, "partial_rotary_factor", real(config, "partial_rotary_factor", share))
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ModelError(
            f"config.json: rotary embeddings turn pairs of numbers, and {rotary_dim} of a head's {head_dim} "
            f"(partial_rotary_factor {share:g}) cannot be paired."
        )
    scaling = _read_scaling(given, config)
    if isinstance(scaling, LongRopeScaling):
        _check_count(scaling, rotary_dim // 2)
    return RopeSpec(rotary_dim, theta, scaling, interleaved)


def rope_entries(config: Config, kind: str) -> Config:
    """The entries of RoPE for one layer type, where rope_parameters has some for each; what stands beside them, or in
    the old spelling, is for all."""
    given = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    return {**{key: value for key, value in given.items() if not isinstance(value, Mapping)}, **mapping(given, kind)}


def _check_count(scaling: LongRopeScaling, pairs: int) -> None:
    for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
        if len(factors) != pairs:
            raise ModelError(
                f"config.json: {name} has {len(factors)} factors, but {pairs} pairs of dimensions are turned."
            )


def _read_scaling(given: Config, config: Config) -> Scaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join(["default", *_READERS])
        raise ModelError(f"config.json: RoPE scaling {kind!r:.80} is not supported; supported are {known}.")
    return _READERS[kind](given, config)


def _trained_length(given: Config, config: Config) -> int:
    key = "original_max_position_embeddings"
    lengths = [integer(entries, key, least=2) for entries in (config, given) if entries.get(key) is not None]
    return lengths[0] if lengths else integer(config, "max_position_embeddings", least=2)


def _factor(given: Config, config: Config, trained: int) -> float:
    return optional_real(given, "factor") or integer(config, "max_position_embeddings") / trained


def _llama3(given: Config, config: Config) -> Llama3Scaling:
    return Llama3Scaling(
        factor=real(given, "factor"),
        low_freq_factor=real(given, "low_freq_factor"),
        high_freq_factor=real(given, "high_freq_factor"),
        original_max_positions=_trained_length(given, config),
    )


def yarn_growth(factor: float, weight: float) -> float:
    """Return the factor by which yarn enlarges queries and keys of a text that it stretches by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(given: Config, config: Config) -> YarnScaling:
    trained = _trained_length(given, config)
    factor = _factor(given, config, trained)

    attention = optional_real(given, "attention_factor")
    if attention is None and given.get("mscale") and given.get("mscale_all_dim"):
        all_dims = yarn_growth(factor, real(given, "mscale_all_dim"))
        attention = yarn_growth(factor, real(given, "mscale")) / all_dims
    return YarnScaling(
        factor=factor,
        original_max_positions=trained,
        attention_factor=yarn_growth(factor, 1.0) if attention is None else attention,
        beta_fast=real(given, "beta_fast", 32.0),
        beta_slow=real(given, "beta_slow", 1.0),
        truncate=flag(given, "truncate", True),
    )


def _longrope(given: Config, config: Config) -> LongRopeScaling:
    trained = _trained_length(given, config)
    factor = _factor(given, config, trained)
    attention = optional_real(given, "attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return LongRopeScaling(_list(given, "short_factor"), _list(given, "long_factor"), trained, attention)


def _list(given: Config, key: str) -> tuple[float, ...]:
    values = given.get(key)
    if not isinstance(values, list) or not values:
        raise ModelError(f"config.json: {key} must be a list of numbers, but is {values!r}.")
    return tuple(real({key: value}, key) for value in values)


_READERS: dict[str, Callable[[Config, Config], Any]] = {
    "linear": lambda given, config: LinearScaling(real(given, "factor")),
    "dynamic": lambda given, config: DynamicScaling(real(given, "factor"), integer(config, "max_position_embeddings")),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in the first Phi-3 files
}
