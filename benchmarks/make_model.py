"""Writes a random checkpoint of a well-known shape, which Kvasir and transformers both load, to measure speed with.

    python benchmarks/make_model.py qwen2.5-0.5b /tmp/qwen2.5-0.5b

It writes only config.json and model.safetensors: prompts are token ids. The same name and seed give the same weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

STD = 0.02  # of every matrix and bias, as a model before its training has it

SHAPES: dict[str, dict[str, Any]] = {
    # Qwen2.5-0.5B, with a context that a small machine has room for
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 4096, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": True, "use_sliding_window": False, "bos_token_id": 151643, "eos_token_id": 151643,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "use_sliding_window": False,
        "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False,
        "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
        "bos_token_id": 128000, "eos_token_id": 128001,
    },
    # For tests: everything small, every part there
    "tiny": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "use_sliding_window": False, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a Llama-like checkpoint, by transformers' names."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, outputs in {"q": queries, "k": keys, "v": keys}.items():
            yield f"{layer}.self_attn.{name}_proj.weight", (outputs, hidden)
            if config["model_type"] == "qwen2":
                yield f"{layer}.self_attn.{name}_proj.bias", (outputs,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        if config["model_type"] == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (head_dim,)
        yield f"{layer}.mlp.gate_proj.weight", (wide, hidden)
        yield f"{layer}.mlp.up_proj.weight", (wide, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, wide)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def write_model(name: str, directory: Path, seed: int = 0) -> int:
    """Write the checkpoint in bfloat16 and return how many parameters it has."""
    config = {**SHAPES[name], "torch_dtype": "bfloat16"}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for tensor, shape in tensor_shapes(config):
        if tensor.endswith("norm.weight"):
            tensors[tensor] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[tensor] = torch.empty(shape).normal_(0.0, STD, generator=generator).bfloat16()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return sum(tensor.numel() for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count = write_model(arguments.shape, arguments.directory, arguments.seed)
    print(f"{arguments.directory}: {arguments.shape}, {count / 1e6:.0f} M parameters, bfloat16")


if __name__ == "__main__":
    main()
