"""Writes a GGUF model as a bf16 checkpoint whose channels are in a random order, which computes the same.

    python benchmarks/cpu/shuffled_model.py MODEL.gguf DIR

A file's weights were rounded in groups of neighbouring inputs. In another order no group is left together, so that
quantizing them again loses what it loses on weights that never were in such groups. For Llama's architecture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def shuffle(state: dict[str, torch.Tensor], hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """Reorder the residual stream, the feed-forward channels and the values of each head, in place."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randperm(hidden, generator=generator)
    for name, weight in state.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")) or name.endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
        ):
            state[name] = weight[:, stream]
        elif name.endswith(("o_proj.weight", "down_proj.weight")) or name.endswith("norm.weight"):
            state[name] = weight[stream]
    for layer in sorted({name.split(".")[2] for name in state if ".layers." in name}):
        at = f"model.layers.{layer}"
        channels = torch.randperm(inner, generator=generator)
        for name in ("gate_proj", "up_proj"):
            state[f"{at}.mlp.{name}.weight"] = state[f"{at}.mlp.{name}.weight"][channels]
        state[f"{at}.mlp.down_proj.weight"] = state[f"{at}.mlp.down_proj.weight"][:, channels]
        within = [torch.randperm(head_dim, generator=generator) for _ in range(kv_heads)]
        values = torch.cat([head * head_dim + order for head, order in enumerate(within)])
        seen = torch.cat([head * head_dim + within[head // (heads // kv_heads)] for head in range(heads)])
        state[f"{at}.self_attn.v_proj.weight"] = state[f"{at}.self_attn.v_proj.weight"][values]
        state[f"{at}.self_attn.o_proj.weight"] = state[f"{at}.self_attn.o_proj.weight"][:, seen]


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    where = {"pretrained_model_name_or_path": str(arguments.model.parent), "gguf_file": arguments.model.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = model.config
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (config.num_attention_heads, config.num_key_value_heads, head_dim)
    shuffle(state, config.hidden_size, config.intermediate_size, *sizes)
    arguments.out.mkdir(parents=True)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(tensors, arguments.out / "model.safetensors", {"format": "pt"})
    described = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    (arguments.out / "config.json").write_text(
        json.dumps({**described, "dtype": "bfloat16", "architectures": [type(model).__name__]}), encoding="utf-8"
    )
    AutoTokenizer.from_pretrained(**where).save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
