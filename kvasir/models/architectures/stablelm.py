"""StableLM: Llama with LayerNorm and a part of each head rotated."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, flag, real
from kvasir.models.spec import Architecture, DecoderSpec, Names, read_decoder, same_ropes


def read_names(config: Config) -> Names:
    parallel = flag(config, "use_parallel_residual")  # then there is one norm
    return {name: ours for name, ours in llama.NAMES.items() if not (parallel and ours == "layers.*.mlp_norm")}


def read_spec(config: Config) -> DecoderSpec:
    if flag(config, "qk_layernorm"):
        raise ModelError("config.json: qk_layernorm is not supported for this model; set model_impl='transformers'.")
    parallel = flag(config, "use_parallel_residual")
    return read_decoder(
        config,
        ropes=same_ropes(config, share=0.25),
        norm="layer",
        norm_eps=real(config, "layer_norm_eps", 1e-5),
        parallel=parallel,
        shared_norm=parallel,
        qkv_bias=flag(config, "use_qkv_bias"),
    )


ARCHITECTURE = Architecture(read_spec, read_names)
