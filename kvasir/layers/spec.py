"""What the layers of a decoder are: small frozen dataclasses, one for each kind of norm, attention and feed-forward. No
torch, so that any process can read a model's config.json.

Sizes are those of the whole model, not of a rank. A layer module registers itself for the dataclass that describes it
(layers.base.Kinds); a new kind of layer is one more of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvasir.errors import ModelError

# ---------------------------------------------------------------- norms


@dataclass(frozen=True)
class RMSNormSpec:
    """Divides by the root of the mean square and multiplies with a gain."""

    eps: float
    plus_one: bool = False  # the gain is one more than what the checkpoint holds
    has_gain: bool = True  # False: nothing is multiplied, and the checkpoint holds nothing


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
class TemperatureSpec:
    """Queries are multiplied by 1 + scale * log(1 + floor((position + 1) / step)), which sharpens attention over long
    texts."""

    scale: float
    step: int


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
    clip: float | None = None  # queries, keys and values are limited to this size before they are rotated
    sinks: bool = False  # each head has a learned score that takes a share of the weights and adds no value
    temperature: TemperatureSpec | None = None  # of the queries
    chunk: int | None = None  # a query sees only the tokens of its own chunk of this many; None: all
    input_size: int | None = None  # of what queries, keys and values are computed from; None: the hidden size

    def __post_init__(self) -> None:
        if self.clip is not None and self.qk_norm is not None and self.qk_norm_over == "head":
            raise ModelError("config.json: clip_qkv together with a norm of each head is not supported.")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({self.heads}) is not a multiple of "
                f"num_key_value_heads ({self.kv_heads})."
            )


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Attention whose cache holds one short vector for each token, from which all heads' keys and values are computed,
    and a key that is rotated and shared by all heads."""

    heads: int
    latent_dim: int  # of the vector
    plain_dim: int  # of the part of a query and key that is not rotated
    value_dim: int
    rope: RopeSpec  # of the rotated part: all of it
    scale: float  # of the scores
    norm: RMSNormSpec  # of the vector, and of the queries' own
    query_dim: int | None = None  # queries too are computed from a short vector of this size; None: from the input
    bias: bool = False  # of the projections from and to the hidden size
    window: None = None

    @property
    def head_dim(self) -> int:
        """Numbers of a query that meet a cached token."""
        return self.latent_dim + self.rope.rotary_dim


@dataclass(frozen=True)
class RelativeBiasSpec:
    """A number per head that is added to a score, learned for ranges ("buckets") of the distance from query to key:
    half of the buckets are for keys that come later; near distances have one each, far ones share."""

    num_buckets: int = 32
    max_distance: int = 128


@dataclass(frozen=True)
class EncoderAttentionSpec(AttentionSpec):
    """Self-attention of an encoder: a token sees those before it and those after it, and nothing is cached. `window` is
    None; `reach` is the number of tokens that it sees on either side."""

    reach: int | None = None  # None: all
    relative_bias: RelativeBiasSpec | None = None


# ---------------------------------------------------------------- feed-forward networks


class ClampedSwiGLU(NamedTuple):
    """The gated activation (up + 1) * gate * sigmoid(alpha * gate), where the gate is at most `limit` and up lies
    between -limit and limit."""

    alpha: float
    limit: float


# What is computed from a gate and an up projection: the activation of this name in kernels.ACTIVATIONS times up, or ...
GatedActivation = str | ClampedSwiGLU


@dataclass(frozen=True)
class GatedMLPSpec:
    """down(activation(gate(x)) * up(x))"""

    intermediate_size: int
    activation: str = "silu"  # a name in kernels.ACTIVATIONS
    bias: bool = False
    down_bias: bool = False  # of `down` alone


@dataclass(frozen=True)
class MLPSpec:
    """down(activation(up(x)))"""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True)
class ExpertGroups:
    """Experts stand in `count` groups of equal size, and a token's experts come from the best `top_k` groups. A group
    is as good as its best expert, or as its best two together."""

    count: int
    top_k: int
    score: Literal["best", "best two"] = "best"


@dataclass(frozen=True)
class TopKRoutingSpec:
    """A token goes to the `top_k` experts with the best scores. A chosen expert's weight is its score."""

    top_k: int
    normalise: bool = False  # the chosen experts' weights are divided by their sum
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0  # multiplies the weights
    groups: ExpertGroups | None = None
    correction: bool = False  # experts are chosen by score plus a learned number, which is not in the weight


@dataclass(frozen=True)
class SparseMixerRoutingSpec:
    """A token goes to two experts, the second the best of the others. The weight of each is its share among the experts
    whose score is nearly as good (by less than 2 * tolerance)."""

    tolerance: float
    top_k: int = 2


RoutingSpec = TopKRoutingSpec | SparseMixerRoutingSpec


@dataclass(frozen=True)
class SharedExpertSpec:
    """An expert that every token goes to."""

    mlp: GatedMLPSpec
    gated: bool = False  # it is multiplied by the sigmoid of a learned product with the token


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts: gated feed-forward networks among which a router chooses for each token."""

    num_experts: int
    intermediate_size: int  # of each expert
    routing: RoutingSpec
    activation: GatedActivation = "silu"
    shared: SharedExpertSpec | None = None
    bias: bool = False  # of the experts
    router_bias: bool = False
    weighs_inputs: bool = False  # weights multiply what an expert gets, not what it gives

    def __post_init__(self) -> None:
        routing = self.routing
        if routing.top_k > self.num_experts:
            raise ModelError(
                f"config.json: num_experts_per_tok ({routing.top_k}) is more than there are experts "
                f"({self.num_experts})."
            )
        groups = routing.groups if isinstance(routing, TopKRoutingSpec) else None
        if groups is None:
            return
        size = self.num_experts // groups.count
        if self.num_experts % groups.count or groups.top_k > groups.count or routing.top_k > groups.top_k * size:
            raise ModelError(
                f"config.json: {routing.top_k} of {self.num_experts} experts cannot be chosen from {groups.top_k} of "
                f"{groups.count} groups (num_experts_per_tok, topk_group, n_group)."
            )
        if groups.score == "best two" and size < 2:
            raise ModelError(f"config.json: n_group ({groups.count}) leaves groups of one expert, which needs two.")
