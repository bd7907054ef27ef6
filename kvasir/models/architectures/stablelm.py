"""StableLM."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, flag
from kvasir.models.spec import Architecture, DecoderSpec, Names, parallel, pre_norm
from kvasir.models.spec_reader import (
    head_dim_of,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_layer_norm,
    read_rope,
)


def read_names(config: Config) -> Names:
    parallel = flag(config, "use_parallel_residual")  # then there is one norm
    return {name: ours for name, ours in llama.NAMES.items() if not (parallel and ours == "layers.*.mlp_norm")}


def read_spec(config: Config) -> DecoderSpec:
    """StableLM: Llama with LayerNorm and a part of each head rotated."""
    if flag(config, "qk_layernorm"):
        raise ModelError("config.json: qk_layernorm is not supported for this model; set model_impl='transformers'.")
    norm, rope = read_layer_norm(config), read_rope(config, head_dim_of(config), share=0.25)
    attention = read_attention(config, rope=rope, qkv_bias=flag(config, "use_qkv_bias"))
    arrange = parallel if flag(config, "use_parallel_residual") else pre_norm
    return read_decoder(config, arrange(norm, attention, read_gated_mlp(config)), norm)


ARCHITECTURE = Architecture(read_spec, read_names)
