"""BERT and other encoders. Some are built as it is: norms after the sums, learned positions, a feed-forward network
without a gate. ModernBERT, NomicBERT, GTE and Jina v3 rotate positions; T5 adds a bias by distance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvasir.config.pooling import DenseSpec, num_labels
from kvasir.errors import ModelError
from kvasir.layers.spec import (
    EncoderAttentionSpec,
    GatedMLPSpec,
    LayerNormSpec,
    MLPSpec,
    RelativeBiasSpec,
    RMSNormSpec,
    RopeSpec,
)
from kvasir.models.config_reader import (
    flag,
    head_dim_of,
    integer,
    mapping,
    read_activation,
    read_decoder,
    read_layer_norm,
    read_rope,
    real,
    refuse_others,
    renamed,
    rope_entries,
    windows_by_type,
)
from kvasir.models.spec import (
    GATE_UP,
    QKV,
    Architecture,
    Config,
    DecoderSpec,
    Names,
    PostNormLayerSpec,
    TensorLayout,
    halves,
    pre_norm,
    stacked_qkv,
)

LAYER_NAMES = {
    "encoder.layer.*.attention.self.query": "layers.*.attention.qkv:q",
    "encoder.layer.*.attention.self.key": "layers.*.attention.qkv:k",
    "encoder.layer.*.attention.self.value": "layers.*.attention.qkv:v",
    "encoder.layer.*.attention.output.dense": "layers.*.attention.o",
    "encoder.layer.*.attention.output.LayerNorm": "layers.*.attention_post_norm",
    "encoder.layer.*.intermediate.dense": "layers.*.mlp.up:up",
    "encoder.layer.*.output.dense": "layers.*.mlp.down",
    "encoder.layer.*.output.LayerNorm": "layers.*.mlp_post_norm",
}
END_NAMES = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "embedding_norm",
}
NAMES: dict[str, str | TensorLayout] = {
    "model.embeddings.tok_embeddings": "embedding",
    "model.embeddings.norm": "embedding_norm",
    "model.layers.*.attn_norm": "layers.*.attention_norm",
    "model.layers.*.attn.Wqkv": TensorLayout(QKV, stacked_qkv),
    "model.layers.*.attn.Wo": "layers.*.attention.o",
    "model.layers.*.mlp_norm": "layers.*.mlp_norm",
    "model.layers.*.mlp.Wi": TensorLayout(GATE_UP, halves),
    "model.layers.*.mlp.Wo": "layers.*.mlp.down",
    "model.final_norm": "norm",
}


def prefixed(prefix: str, names: dict[str, str]) -> dict[str, str]:
    return {prefix + theirs: ours for theirs, ours in names.items()}


def _read_encoder(
    config: Config, *, offset: int = 0, token_types: bool = True, bias: RelativeBiasSpec | None = None
) -> DecoderSpec:
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError("config.json: position_embedding_type must be 'absolute'; others are not supported.")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ModelError("config.json: is_decoder and add_cross_attention are not supported for this model.")
    heads, norm = integer(config, "num_attention_heads"), read_layer_norm({"layer_norm_eps": 1e-12, **config})
    attention = EncoderAttentionSpec(heads, heads, head_dim_of(config), qkv_bias=True, o_bias=True, relative_bias=bias)
    mlp = MLPSpec(integer(config, "intermediate_size"), read_activation(config, default="gelu"), bias=True)
    return read_decoder(
        config,
        PostNormLayerSpec(attention, mlp, attention_post_norm=norm, mlp_post_norm=norm),
        None,
        tie_embeddings=False,
        has_head=False,
        num_positions=integer(config, "max_position_embeddings") - offset,
        position_offset=offset,
        embedding_norm=norm,
        num_token_types=integer(config, "type_vocab_size", 2) if token_types else 0,
    )


def read_bert(config: Config) -> DecoderSpec:
    """BERT, and with it most small embedding models and rerankers: MiniLM, BGE, E5, GTE."""
    return _read_encoder(config)


def read_roberta(config: Config) -> DecoderSpec:
    """RoBERTa and XLM-RoBERTa (bge-m3, multilingual E5): BERT with positions that begin after the padding token's."""
    return _read_encoder(config, offset=integer(config, "pad_token_id", 1, least=0) + 1)


def read_distilbert(config: Config) -> DecoderSpec:
    """DistilBERT: BERT under other names, without kinds of tokens."""
    names = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
        "activation": "hidden_act",
    }
    return _read_encoder(renamed(config, names), token_types=False)


def read_mpnet(config: Config) -> DecoderSpec:
    """MPNet: BERT whose scores have a bias by distance, which all layers share."""
    bias = RelativeBiasSpec(integer(config, "relative_attention_num_buckets", 32))
    return _read_encoder(
        {**config, "layer_norm_eps": config.get("layer_norm_eps", 1e-12)}, offset=2, token_types=False, bias=bias
    )


def bert_heads(config: Config, kind: str) -> tuple[DenseSpec, ...]:
    size, last = (
        integer(config, "hidden_size"),
        DenseSpec("classifier", integer(config, "hidden_size"), num_labels(config)),
    )
    if kind == "token_classify":
        return (last,)
    return DenseSpec("bert.pooler.dense", size, size, activation="tanh"), last


def roberta_heads(config: Config, kind: str) -> tuple[DenseSpec, ...]:
    size, count = integer(config, "hidden_size"), num_labels(config)
    if kind == "token_classify":
        return (DenseSpec("classifier", size, count),)
    first = DenseSpec("classifier.dense", size, size, activation="tanh")
    return first, DenseSpec("classifier.out_proj", size, count)


def distilbert_heads(config: Config, kind: str) -> tuple[DenseSpec, ...]:
    size = integer(config, "dim", config.get("hidden_size"))
    last = DenseSpec("classifier", size, num_labels(config))
    return (last,) if kind == "token_classify" else (DenseSpec("pre_classifier", size, size, activation="relu"), last)


DISTILBERT_NAMES = {
    "distilbert.embeddings.word_embeddings": "embedding",
    "distilbert.embeddings.position_embeddings": "positions",
    "distilbert.embeddings.LayerNorm": "embedding_norm",
    "distilbert.transformer.layer.*.attention.q_lin": "layers.*.attention.qkv:q",
    "distilbert.transformer.layer.*.attention.k_lin": "layers.*.attention.qkv:k",
    "distilbert.transformer.layer.*.attention.v_lin": "layers.*.attention.qkv:v",
    "distilbert.transformer.layer.*.attention.out_lin": "layers.*.attention.o",
    "distilbert.transformer.layer.*.sa_layer_norm": "layers.*.attention_post_norm",
    "distilbert.transformer.layer.*.ffn.lin1": "layers.*.mlp.up:up",
    "distilbert.transformer.layer.*.ffn.lin2": "layers.*.mlp.down",
    "distilbert.transformer.layer.*.output_layer_norm": "layers.*.mlp_post_norm",
}
MPNET_NAMES = {
    **prefixed("mpnet.", {name: ours for name, ours in END_NAMES.items() if ours != "token_types"}),
    "mpnet.encoder.relative_attention_bias": "biases.*",
    "mpnet.encoder.layer.*.attention.attn.q": "layers.*.attention.qkv:q",
    "mpnet.encoder.layer.*.attention.attn.k": "layers.*.attention.qkv:k",
    "mpnet.encoder.layer.*.attention.attn.v": "layers.*.attention.qkv:v",
    "mpnet.encoder.layer.*.attention.attn.o": "layers.*.attention.o",
    "mpnet.encoder.layer.*.attention.LayerNorm": "layers.*.attention_post_norm",
    "mpnet.encoder.layer.*.intermediate.dense": "layers.*.mlp.up:up",
    "mpnet.encoder.layer.*.output.dense": "layers.*.mlp.down",
    "mpnet.encoder.layer.*.output.LayerNorm": "layers.*.mlp_post_norm",
}
BERT = Architecture(
    read_bert, prefixed("bert.", END_NAMES | LAYER_NAMES), prefix="bert.", pooling="cls", heads=bert_heads
)
ROBERTA = Architecture(
    read_roberta, prefixed("roberta.", END_NAMES | LAYER_NAMES), prefix="roberta.", pooling="cls", heads=roberta_heads
)
DISTILBERT = Architecture(
    read_distilbert, DISTILBERT_NAMES, prefix="distilbert.", pooling="cls", heads=distilbert_heads
)
MPNET = Architecture(read_mpnet, MPNET_NAMES, prefix="mpnet.", pooling="cls", heads=roberta_heads)


def read_modernbert(config: Config) -> DecoderSpec:
    """ModernBERT: norms before, rotated positions, and layers that see near tokens only between those that see all."""
    heads, head_dim, bias = integer(config, "num_attention_heads"), head_dim_of(config), flag(config, "attention_bias")
    norm = LayerNormSpec(real(config, "norm_eps", 1e-5), flag(config, "norm_bias"))
    far, near = _ropes(config, head_dim)
    attention = EncoderAttentionSpec(heads, heads, head_dim, qkv_bias=bias, o_bias=bias)
    activation = read_activation(config, "hidden_activation", "gelu")
    mlp = GatedMLPSpec(integer(config, "intermediate_size"), activation, flag(config, "mlp_bias"))
    layer = pre_norm(norm, attention, mlp)
    every = integer(config, "global_attn_every_n_layers", 3)
    count, reach = integer(config, "num_hidden_layers"), integer(config, "local_attention", 128) // 2
    types = config.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(count)]
    reaches = windows_by_type({**config, "layer_types": types}, reach)
    layers = [layer.with_attention(reach=each, rope=far if each is None else near) for each in reaches]
    layers[0] = replace(layers[0], attention_norm=None)  # the embeddings' norm comes just before
    return read_decoder(config, layers, norm, tie_embeddings=False, has_head=False, embedding_norm=norm)


def _ropes(config: Config, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The rotations of layers that see all tokens and of the others: two entries in new files, two thetas in old."""
    ropes = []
    for kind, key, theta in (
        ("full_attention", "global_rope_theta", 160000.0),
        ("sliding_attention", "local_rope_theta", 10000.0),
    ):
        own = mapping(mapping(config, "rope_parameters"), kind)
        entries = {**rope_entries(config, kind), "rope_theta": own.get("rope_theta") or real(config, key, theta)}
        ropes.append(read_rope({**config, "rope_scaling": None, "rope_parameters": entries}, head_dim))
    return ropes[0], ropes[1]


def modernbert_heads(config: Config, kind: str) -> tuple[DenseSpec, ...]:
    size = integer(config, "hidden_size")
    first = DenseSpec(
        "head.dense",
        size,
        size,
        flag(config, "classifier_bias"),
        read_activation(config, "classifier_activation", "gelu"),
        norm="head.norm",
        norm_eps=real(config, "norm_eps", 1e-5),
        norm_bias=flag(config, "norm_bias"),
    )
    return first, DenseSpec("classifier", size, num_labels(config))


# ---------------------------------------------------------------- BERT with rotated positions

# Layers, and a part of a layer, as their first checkpoints name them.
_NORMS = {
    "encoder.layers.*.norm1": "layers.*.attention_post_norm",
    "encoder.layers.*.norm2": "layers.*.mlp_post_norm",
}
_ENDS = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "embedding_norm",
}
NOMIC_NAMES: dict[str, str | TensorLayout] = {
    **_ENDS,
    **_NORMS,
    "encoder.layers.*.attn.Wqkv": TensorLayout(QKV, stacked_qkv),
    "encoder.layers.*.attn.out_proj": "layers.*.attention.o",
    "encoder.layers.*.mlp.fc11": "layers.*.mlp.gate_up:up",
    "encoder.layers.*.mlp.fc12": "layers.*.mlp.gate_up:gate",
    "encoder.layers.*.mlp.fc2": "layers.*.mlp.down",
}
JINA_NAMES: dict[str, str | TensorLayout] = {
    **_ENDS,
    **_NORMS,
    "encoder.layers.*.mixer.Wqkv": TensorLayout(QKV, stacked_qkv),
    "encoder.layers.*.mixer.out_proj": "layers.*.attention.o",
    "encoder.layers.*.mlp.fc1": "layers.*.mlp.up:up",
    "encoder.layers.*.mlp.fc2": "layers.*.mlp.down",
}
GTE_NAMES: dict[str, str | TensorLayout] = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "embedding_norm",
    "encoder.layer.*.attention.qkv_proj": TensorLayout(QKV, stacked_qkv),
    "encoder.layer.*.attention.o_proj": "layers.*.attention.o",
    "encoder.layer.*.attn_ln": "layers.*.attention_post_norm",
    "encoder.layer.*.mlp.up_gate_proj": TensorLayout(GATE_UP[::-1], halves),
    "encoder.layer.*.mlp.down_proj": "layers.*.mlp.down",
    "encoder.layer.*.mlp_ln": "layers.*.mlp_post_norm",
}


def _read_rotary(config: Config, mlp: MLPSpec | GatedMLPSpec, theta: float, bias: bool) -> DecoderSpec:
    heads, head_dim = integer(config, "num_attention_heads"), head_dim_of(config)
    norm, rope = read_layer_norm({"layer_norm_eps": 1e-12, **config}), read_rope(config, head_dim, theta=theta)
    attention = EncoderAttentionSpec(heads, heads, head_dim, rope=rope, qkv_bias=bias, o_bias=bias)
    return read_decoder(
        config,
        PostNormLayerSpec(attention, mlp, attention_post_norm=norm, mlp_post_norm=norm),
        None,
        tie_embeddings=False,
        has_head=False,
        embedding_norm=norm,
        num_token_types=integer(config, "type_vocab_size", 2, least=0),
    )


_NOMIC_KEYS = {  # of the first checkpoints, whose code came with them
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
_NOMIC_OTHERS: dict[str, object] = {  # options of that code -> the one value that its models have
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "use_rms_norm": False,
}


def read_nomic_bert(config: Config) -> DecoderSpec:
    """NomicBERT: BERT with rotated positions, a gated feed-forward network and no biases."""
    if config.get("n_embd") is not None:
        refuse_others(config, _NOMIC_OTHERS)
        config = renamed(config, _NOMIC_KEYS)
    mlp = GatedMLPSpec(integer(config, "intermediate_size"), read_activation(config))
    return _read_rotary(config, mlp, 1000.0, bias=False)


def read_gte(config: Config) -> DecoderSpec:
    """GTE v1.5 and its multilingual successors: BERT with rotated positions and a gated feed-forward network."""
    mlp = GatedMLPSpec(integer(config, "intermediate_size"), read_activation(config, default="gelu"), down_bias=True)
    return _read_rotary(config, mlp, 160000.0, bias=True)


_NEW_OTHERS: dict[str, object] = {
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
}


def read_new(config: Config) -> DecoderSpec:
    """GTE v1.5 and its multilingual successors in their first files, whose rotation may be stretched by NTK."""
    refuse_others(config, _NEW_OTHERS)
    rope = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    if "ntk" in (rope.get("rope_type"), rope.get("type")):
        if rope.get("mixed_b") is not None:
            raise ModelError("config.json: mixed_b of the NTK scaling is not supported.")
        factor, theta = real(rope, "factor"), real(rope, "rope_theta", real(config, "rope_theta", 10000.0))
        linear = {"rope_type": "linear", "factor": factor ** (2 / head_dim_of(config)), "rope_theta": theta * factor}
        config = {**config, "rope_scaling": None, "rope_parameters": linear}
    return read_gte(config)


def read_jina(config: Config) -> DecoderSpec:
    """Jina v3: XLM-RoBERTa with rotated positions. Its adapters are not applied."""
    mlp = MLPSpec(integer(config, "intermediate_size"), read_activation(config, default="gelu"), bias=True)
    return _read_rotary({"layer_norm_eps": 1e-5, **config}, mlp, 20000.0, bias=True)


def pooler_heads(prefix: str) -> Callable[[Config, str], tuple[DenseSpec, ...]]:
    """BERT's heads under another prefix."""

    def heads(config: Config, kind: str) -> tuple[DenseSpec, ...]:
        size = integer(config, "hidden_size")
        last = DenseSpec("classifier", size, num_labels(config))
        if kind == "token_classify":
            return (last,)
        return DenseSpec(f"{prefix}pooler.dense", size, size, activation="tanh"), last

    return heads


def _prefixed(prefix: str, names: dict[str, str | TensorLayout]) -> dict[str, str | TensorLayout]:
    return {prefix + theirs: ours for theirs, ours in names.items()}


MODERNBERT = Architecture(read_modernbert, NAMES, prefix="model.", pooling="cls", heads=modernbert_heads)
NOMIC_BERT = Architecture(
    read_nomic_bert,
    _prefixed("nomic_bert.", NOMIC_NAMES),
    prefix="nomic_bert.",
    pooling="mean",
    heads=pooler_heads("nomic_bert."),
)
GTE = Architecture(read_gte, _prefixed("gte.", GTE_NAMES), prefix="gte.", pooling="cls", heads=pooler_heads("gte."))
NEW = Architecture(read_new, _prefixed("new.", GTE_NAMES), prefix="new.", pooling="cls", heads=pooler_heads("new."))
JINA = Architecture(
    read_jina, _prefixed("roberta.", JINA_NAMES), prefix="roberta.", pooling="mean", heads=roberta_heads
)


# ---------------------------------------------------------------- T5

_T5_ATTENTION = "encoder.block.*.layer.0.SelfAttention"
_T5_MLP = "encoder.block.*.layer.1.DenseReluDense"
_T5_NAMES = {
    "shared": "embedding",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "biases.*",
    "encoder.block.*.layer.0.layer_norm": "layers.*.attention_norm",
    f"{_T5_ATTENTION}.q": "layers.*.attention.qkv:q",
    f"{_T5_ATTENTION}.k": "layers.*.attention.qkv:k",
    f"{_T5_ATTENTION}.v": "layers.*.attention.qkv:v",
    f"{_T5_ATTENTION}.o": "layers.*.attention.o",
    "encoder.block.*.layer.1.layer_norm": "layers.*.mlp_norm",
    f"{_T5_MLP}.wo": "layers.*.mlp.down",
    "encoder.final_layer_norm": "norm",
}


def _t5_feed_forward(config: Config) -> tuple[bool, str]:
    """Read whether the feed-forward network has a gate, and its activation."""
    kind = config.get("feed_forward_proj") or "relu"
    if not isinstance(kind, str):
        raise ModelError(f"config.json: feed_forward_proj must be a text, but is {kind!r}.")
    gated, _, name = kind.rpartition("-")
    name = "gelu_new" if kind == "gated-gelu" else name  # as transformers reads it
    return gated == "gated", read_activation({"activation": name}, "activation")


def _t5_names(config: Config) -> Names:
    if _t5_feed_forward(config)[0]:
        return {
            **_T5_NAMES,
            f"{_T5_MLP}.wi_0": "layers.*.mlp.gate_up:gate",
            f"{_T5_MLP}.wi_1": "layers.*.mlp.gate_up:up",
        }
    return {**_T5_NAMES, f"{_T5_MLP}.wi": "layers.*.mlp.up:up"}


def read_t5(config: Config) -> DecoderSpec:
    """T5's encoder (sentence-T5, GTR): RMS norms before, scores that are not scaled, with a bias by distance."""
    names = {"d_model": "hidden_size", "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
    config = renamed(config, names)
    heads, inner = integer(config, "num_attention_heads"), integer(config, "d_ff")
    buckets = integer(config, "relative_attention_num_buckets", 32)
    bias = RelativeBiasSpec(buckets, integer(config, "relative_attention_max_distance", 128))
    attention = EncoderAttentionSpec(heads, heads, integer(config, "d_kv"), scale=1.0, relative_bias=bias)
    norm = RMSNormSpec(real(config, "layer_norm_epsilon", 1e-6))
    gated, activation = _t5_feed_forward(config)
    mlp = GatedMLPSpec(inner, activation) if gated else MLPSpec(inner, activation)
    return read_decoder(config, pre_norm(norm, attention, mlp), norm, tie_embeddings=False, has_head=False)


# All names but the embedding's begin with the prefix, so none is put before them.
T5 = Architecture(read_t5, _t5_names, ignored=("encoder.embed_tokens.weight",), prefix="encoder.", pooling="mean")
