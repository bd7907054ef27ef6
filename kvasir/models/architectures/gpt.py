"""GPT-2, GPT-J, GPT-NeoX, OPT and Falcon: LayerNorm and a feed-forward network without a gate, often in parallel with
attention."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.layers.spec import LayerNormSpec, MLPSpec, RopeSpec
from kvasir.models.config_reader import (
    flag,
    head_dim_of,
    integer,
    read_activation,
    read_attention,
    read_decoder,
    read_layer_norm,
    read_rope,
    renamed,
)
from kvasir.models.spec import (
    QKV,
    Architecture,
    Config,
    DecoderSpec,
    LayerSpec,
    Names,
    PostNormLayerSpec,
    TensorLayout,
    grouped_qkv,
    parallel,
    pre_norm,
    stacked_qkv,
)

GPT2_NAMES: dict[str, str | TensorLayout] = {
    "transformer.wte": "embedding",
    "transformer.wpe": "positions",
    "transformer.h.*.ln_1": "layers.*.attention_norm",
    "transformer.h.*.attn.c_attn": TensorLayout(QKV, stacked_qkv, transposed=True),
    "transformer.h.*.attn.c_proj": TensorLayout(("layers.*.attention.o",), transposed=True),
    "transformer.h.*.ln_2": "layers.*.mlp_norm",
    "transformer.h.*.mlp.c_fc": TensorLayout(("layers.*.mlp.up:up",), transposed=True),
    "transformer.h.*.mlp.c_proj": TensorLayout(("layers.*.mlp.down",), transposed=True),
    "transformer.ln_f": "norm",
    "lm_head": "head",
}
GPT_ENTRIES = {  # names in config.json -> the usual ones
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


def read_gpt2(config: Config) -> DecoderSpec:
    """GPT-2: learned positions, LayerNorm, and matrices that are transposed in the checkpoint."""
    if flag(config, "scale_attn_by_inverse_layer_idx"):
        raise ModelError("config.json: scale_attn_by_inverse_layer_idx is not supported.")
    config = {**renamed(config, GPT_ENTRIES), "num_key_value_heads": None}
    inner = integer(config, "n_inner", 4 * integer(config, "hidden_size"))
    mlp = MLPSpec(inner, read_activation(config, "activation_function", "gelu_new"), bias=True)
    scale = None if flag(config, "scale_attn_weights", True) else 1.0
    attention = read_attention(config, rope=None, scale=scale, qkv_bias=True, o_bias=True)
    norm = read_layer_norm(config, "layer_norm_epsilon")
    return read_decoder(
        config,
        pre_norm(norm, attention, mlp),
        norm,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        num_positions=integer(config, "max_position_embeddings"),
    )


GPTJ_NAMES = {
    "transformer.wte": "embedding",
    "transformer.h.*.ln_1": "layers.*.attention_norm",
    "transformer.h.*.attn.q_proj": "layers.*.attention.qkv:q",
    "transformer.h.*.attn.k_proj": "layers.*.attention.qkv:k",
    "transformer.h.*.attn.v_proj": "layers.*.attention.qkv:v",
    "transformer.h.*.attn.out_proj": "layers.*.attention.o",
    "transformer.h.*.mlp.fc_in": "layers.*.mlp.up:up",
    "transformer.h.*.mlp.fc_out": "layers.*.mlp.down",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}


def read_gptj(config: Config) -> DecoderSpec:
    """GPT-J: attention and feed-forward in parallel behind one norm, interleaved rotation, a bias on the logits."""
    config = {**renamed(config, GPT_ENTRIES), "num_key_value_heads": None}
    inner = integer(config, "n_inner", 4 * integer(config, "hidden_size"))
    mlp = MLPSpec(inner, read_activation(config, "activation_function", "gelu_new"), bias=True)
    norm, rope = (
        read_layer_norm(config, "layer_norm_epsilon"),
        RopeSpec(integer(config, "rotary_dim", 64), interleaved=True),
    )
    return read_decoder(config, parallel(norm, read_attention(config, rope=rope), mlp), norm, head_bias=True)


GPT_NEOX_NAMES: dict[str, str | TensorLayout] = {
    "gpt_neox.embed_in": "embedding",
    "gpt_neox.layers.*.input_layernorm": "layers.*.attention_norm",
    "gpt_neox.layers.*.attention.query_key_value": TensorLayout(QKV, grouped_qkv),
    "gpt_neox.layers.*.attention.dense": "layers.*.attention.o",
    "gpt_neox.layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "gpt_neox.layers.*.mlp.dense_h_to_4h": "layers.*.mlp.up:up",
    "gpt_neox.layers.*.mlp.dense_4h_to_h": "layers.*.mlp.down",
    "gpt_neox.final_layer_norm": "norm",
    "embed_out": "head",
}
GPT_NEOX_IGNORED = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")


def read_gpt_neox(config: Config) -> DecoderSpec:
    """GPT-NeoX and Pythia: attention and feed-forward in parallel, part of each head rotated, fused heads."""
    config = {**config, "num_key_value_heads": None}
    named = renamed(config, {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"})
    bias, norm = flag(config, "attention_bias", True), read_layer_norm(config)
    rope = read_rope(named, head_dim_of(config), share=0.25)
    attention = read_attention(config, rope=rope, qkv_bias=bias, o_bias=bias)
    mlp = MLPSpec(integer(config, "intermediate_size"), read_activation(config, default="gelu"), bias=True)
    if flag(config, "use_parallel_residual", True):
        return read_decoder(config, parallel(norm, attention, mlp, one_norm=False), norm)
    return read_decoder(config, pre_norm(norm, attention, mlp), norm)


_OPT_NAMES = {
    "model.decoder.embed_tokens": "embedding",
    "model.decoder.embed_positions": "positions",
    "model.decoder.project_in": "project_in",
    "model.decoder.project_out": "project_out",
    "model.decoder.layers.*.self_attn.q_proj": "layers.*.attention.qkv:q",
    "model.decoder.layers.*.self_attn.k_proj": "layers.*.attention.qkv:k",
    "model.decoder.layers.*.self_attn.v_proj": "layers.*.attention.qkv:v",
    "model.decoder.layers.*.self_attn.out_proj": "layers.*.attention.o",
    "model.decoder.layers.*.fc1": "layers.*.mlp.up:up",
    "model.decoder.layers.*.fc2": "layers.*.mlp.down",
    "model.decoder.final_layer_norm": "norm",
    "lm_head": "head",
}


def opt_names(config: Config) -> dict[str, str]:
    kind = "norm" if flag(config, "do_layer_norm_before", True) else "post_norm"
    return {
        **_OPT_NAMES,
        "model.decoder.layers.*.self_attn_layer_norm": f"layers.*.attention_{kind}",
        "model.decoder.layers.*.final_layer_norm": f"layers.*.mlp_{kind}",
    }


def read_opt(config: Config) -> DecoderSpec:
    """OPT: learned positions that begin at the third entry, LayerNorm, and one size whose norms follow the sums."""
    if not flag(config, "layer_norm_elementwise_affine", True):
        raise ModelError("config.json: layer_norm_elementwise_affine=false is not supported; norms must have gains.")
    config = {**renamed(config, {"ffn_dim": "intermediate_size"}), "num_key_value_heads": None}
    bias, before = flag(config, "enable_bias", True), flag(config, "do_layer_norm_before", True)
    norm, attention = LayerNormSpec(1e-5), read_attention(config, rope=None, qkv_bias=bias, o_bias=bias)
    activation = read_activation(config, "activation_function", "relu")
    mlp = MLPSpec(integer(config, "intermediate_size"), activation, bias)
    layer: LayerSpec = pre_norm(norm, attention, mlp)
    if not before:
        layer = PostNormLayerSpec(attention, mlp, attention_post_norm=norm, mlp_post_norm=norm)
    return read_decoder(
        config,
        layer,
        norm if before and not flag(config, "_remove_final_layer_norm") else None,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        embedding_size=integer(config, "word_embed_proj_dim", integer(config, "hidden_size")),
        num_positions=integer(config, "max_position_embeddings"),
        position_offset=2,
    )


_FALCON_NAMES: dict[str, str | TensorLayout] = {
    "transformer.word_embeddings": "embedding",
    "transformer.h.*.self_attention.query_key_value": TensorLayout(QKV, grouped_qkv),
    "transformer.h.*.self_attention.dense": "layers.*.attention.o",
    "transformer.h.*.mlp.dense_h_to_4h": "layers.*.mlp.up:up",
    "transformer.h.*.mlp.dense_4h_to_h": "layers.*.mlp.down",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}


def _falcon_two_norms(config: Config) -> bool:
    new = flag(config, "new_decoder_architecture")
    return integer(config, "num_ln_in_parallel_attn", 2 if new else 1) == 2


def falcon_names(config: Config) -> Names:
    if _falcon_two_norms(config):
        norms = {"ln_attn": "attention_norm", "ln_mlp": "mlp_norm"}
    else:
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    return _FALCON_NAMES | {f"transformer.h.*.{theirs}": f"layers.*.{ours}" for theirs, ours in norms.items()}


def read_falcon(config: Config) -> DecoderSpec:
    """Falcon: attention and feed-forward in parallel; one key head in the first models, several in later ones."""
    if flag(config, "alibi"):
        raise ModelError("config.json: alibi is not supported; models that rotate positions are.")
    new, bias = flag(config, "new_decoder_architecture"), flag(config, "bias")
    old_names = {"n_head": "num_attention_heads", "n_head_kv": "num_kv_heads", "n_layer": "num_hidden_layers"}
    config = renamed(config, old_names)
    grouped = new or not flag(config, "multi_query", True)
    heads = integer(config, "num_attention_heads")
    config["num_key_value_heads"] = integer(config, "num_kv_heads", heads) if grouped else 1
    inner = integer(config, "ffn_hidden_size", 4 * integer(config, "hidden_size"))
    mlp = MLPSpec(inner, read_activation(config, "activation", "gelu"), bias)
    norm, attention = read_layer_norm(config, "layer_norm_epsilon"), read_attention(config, qkv_bias=bias, o_bias=bias)
    tied = flag(config, "tie_word_embeddings", True)
    if new or flag(config, "parallel_attn", True):
        layer = parallel(norm, attention, mlp, one_norm=not _falcon_two_norms(config))
        return read_decoder(config, layer, norm, tie_embeddings=tied)
    return read_decoder(config, pre_norm(norm, attention, mlp), norm, tie_embeddings=tied)


GPT2 = Architecture(read_gpt2, GPT2_NAMES, ignored=("*.attn.bias", "*.attn.masked_bias"), prefix="transformer.")
GPTJ = Architecture(read_gptj, GPTJ_NAMES, ignored=("*.attn.bias", "*.attn.masked_bias"))
GPT_NEOX = Architecture(read_gpt_neox, GPT_NEOX_NAMES, GPT_NEOX_IGNORED)
OPT = Architecture(read_opt, opt_names, prefix="model.")
FALCON = Architecture(read_falcon, falcon_names)
