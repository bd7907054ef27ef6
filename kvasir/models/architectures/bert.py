"""BERT and the encoders that are built as it is: norms after the sums, learned positions, a feed-forward network
without a gate."""

from __future__ import annotations

from kvasir.config.pooling import DenseSpec, num_labels
from kvasir.errors import ModelError
from kvasir.layers.spec import EncoderAttentionSpec, MLPSpec, RelativeBiasSpec
from kvasir.models.config_reader import (
    head_dim_of,
    integer,
    read_activation,
    read_decoder,
    read_layer_norm,
    renamed,
)
from kvasir.models.spec import Architecture, Config, DecoderSpec, PostNormLayerSpec

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
