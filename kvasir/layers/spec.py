"""What the layers of a decoder are: small frozen dataclasses, one for each kind of norm, attention and feed-forward. No
torch, so that any process can read a model's config.json.

Sizes are those of the whole model, not of a rank. A layer module registers itself for the dataclass that describes it
(layers.base.Kinds); a new kind of layer is one more of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvasir.errors import ModelError

# ---------------------------------------------------------------- norms


@dataclass(frozen=True)
class RMSNormSpec:
    """Divides by the root of the mean square and multiplies with a gain."""

    eps: float
    plus_one: bool = False  # the gain is one more than what the checkpoint holds


@dataclass(frozen=True)
class LayerNormSpec:
    """Subtracts the mean, divides by the standard deviation, and applies a gain and perhaps a bias."""

    eps: float
    bias: bool = True


NormSpec = RMSNormSpec | LayerNormSpec

# ---------------------------------------------------------------- rotary position embedding


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """Beyond the trained length the base grows with the position."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequencies of long wavelengths are divided by `factor`, short ones are kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Low frequencies are divided by `factor`, high ones are kept, those between are blended; cosines and sines are
    multiplied by `attention_factor`."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """Every pair of dimensions has its own factor. The long factors apply when the engine is built for more positions
    than the model was first trained on, otherwise the short ones."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` dimensions of each head. Equal specs share one table."""

    rotary_dim: int
    theta: float = 10000.0
    scaling: Scaling | None = None
    interleaved: bool = False  # a pair is two neighbouring dimensions, not one of each half


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention with grouped query heads, whose cache holds keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None  # None: positions are not rotated
    window: int | None = None  # number of last tokens that a query sees; None: all
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # of the scores
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: RMSNormSpec | None = None  # applied to queries and keys before they are rotated
    qk_norm_over: Literal["head", "projection"] = "head"  # each head by itself, or all heads as one vector

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({self.heads}) is not a multiple of "
                f"num_key_value_heads ({self.kv_heads})."
            )


# ---------------------------------------------------------------- feed-forward networks


@dataclass(frozen=True)
class GatedMLPSpec:
    """down(activation(gate(x)) * up(x))"""

    intermediate_size: int
    activation: str = "silu"  # a name in kernels.ACTIVATIONS
    bias: bool = False


@dataclass(frozen=True)
class MLPSpec:
    """down(activation(up(x)))"""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True)
class SoftmaxRoutingSpec:
    """A token goes to the `top_k` experts with the largest probabilities, which are also their weights."""

    top_k: int
    normalise: bool  # the chosen experts' weights are divided by their sum


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts: gated feed-forward networks among which a router chooses for each token."""

    num_experts: int
    intermediate_size: int  # of each expert
    routing: SoftmaxRoutingSpec
    activation: str = "silu"
    shared: GatedMLPSpec | None = None  # an expert that every token goes to, multiplied by a learned gate

    def __post_init__(self) -> None:
        if self.routing.top_k > self.num_experts:
            raise ModelError(
                f"config.json: num_experts_per_tok ({self.routing.top_k}) is more than there are experts "
                f"({self.num_experts})."
            )
