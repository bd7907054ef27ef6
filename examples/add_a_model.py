"""Teaches Kvasir a new architecture, Phi-2, in one file: how its config.json and its checkpoint map to the decoder.

usage: add_a_model.py --model microsoft/phi-2
A package does the same for everybody with an entry point: [project.entry-points."kvasir.plugins"] phi2 = "...:register"
"""

from __future__ import annotations

import argparse

from kvasir import LLM, ModelRegistry, SamplingParams
from kvasir.layers.spec import MLPSpec
from kvasir.models.config_reader import (
    head_dim_of,
    integer,
    read_activation,
    read_attention,
    read_decoder,
    read_layer_norm,
    read_rope,
)
from kvasir.models.spec import Architecture, Config, DecoderSpec, parallel

NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "layers.*.attention_norm",
    "model.layers.*.self_attn.q_proj": "layers.*.attention.qkv:q",
    "model.layers.*.self_attn.k_proj": "layers.*.attention.qkv:k",
    "model.layers.*.self_attn.v_proj": "layers.*.attention.qkv:v",
    "model.layers.*.self_attn.dense": "layers.*.attention.o",
    "model.layers.*.mlp.fc1": "layers.*.mlp.up:up",
    "model.layers.*.mlp.fc2": "layers.*.mlp.down",
    "model.final_layernorm": "norm",
    "lm_head": "head",
}


def read_spec(config: Config) -> DecoderSpec:
    """Phi-2: attention and feed-forward in parallel behind one LayerNorm, part of each head rotated."""
    norm, rope = read_layer_norm(config), read_rope(config, head_dim_of(config), share=0.5)
    attention = read_attention(config, rope=rope, qkv_bias=True, o_bias=True)
    activation = read_activation(config, default="gelu_new")
    mlp = MLPSpec(integer(config, "intermediate_size"), activation, bias=True)
    return read_decoder(config, parallel(norm, attention, mlp), norm, head_bias=True)


def register() -> None:
    ModelRegistry.register_model("PhiForCausalLM", Architecture(read_spec, NAMES))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    register()
    with LLM(parser.parse_args().model) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)
