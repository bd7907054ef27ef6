"""Writes a GGUF model as a bf16 checkpoint whose channels are in a random order, which computes the same.

    python benchmarks/cpu/shuffled_model.py MODEL.gguf DIR [--spread 1] [--spread-keys 2]

A file's weights were rounded in groups of neighbouring inputs. In another order no group is left together, so that
quantizing them again loses what it loses on weights that never were in such groups. For Llama's architecture.

--spread multiplies channels by random powers of two, and divides what they meet by them, which computes the same, too:
weights become heavy-tailed, as those of models with outlier channels are. --spread-keys does so to keys and queries.
The number is the standard deviation of the power.
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


def spread(
    state: dict[str, torch.Tensor], heads: int, kv_heads: int, head_dim: int, weights: float, keys: float
) -> None:
    """Multiply channels by powers of two, in place: inputs of qkv, gate and up, channels of the feed-forward network
    and of values (`weights`), and keys (`keys`)."""
    generator = torch.Generator().manual_seed(1)

    def powers(count: int, deviation: float) -> torch.Tensor:
        return torch.exp2(torch.randn(count, generator=generator).mul(deviation).round())

    for at in sorted({".".join(name.split(".")[:3]) for name in state if ".layers." in name}):
        for norm, names in (("input_layernorm", "qkv"), ("post_attention_layernorm", ("gate", "up"))):
            by = powers(len(state[f"{at}.{norm}.weight"]), weights)
            state[f"{at}.{norm}.weight"] = state[f"{at}.{norm}.weight"] / by
            for name in names:
                path = f"{at}.{'self_attn' if norm == 'input_layernorm' else 'mlp'}.{name}_proj.weight"
                state[path] = state[path] * by
        by = powers(len(state[f"{at}.mlp.up_proj.weight"]), weights)
        state[f"{at}.mlp.up_proj.weight"] = state[f"{at}.mlp.up_proj.weight"] * by[:, None]
        state[f"{at}.mlp.down_proj.weight"] = state[f"{at}.mlp.down_proj.weight"] / by
        shared = heads // kv_heads
        by = powers(kv_heads * head_dim, weights)
        each = by.view(kv_heads, -1).repeat_interleave(shared, 0).flatten()
        state[f"{at}.self_attn.v_proj.weight"] = state[f"{at}.self_attn.v_proj.weight"] * by[:, None]
        state[f"{at}.self_attn.o_proj.weight"] = state[f"{at}.self_attn.o_proj.weight"] / each
        by = powers(kv_heads * head_dim // 2, keys).view(kv_heads, -1).repeat(1, 2)  # what is rotated together
        each = by.repeat_interleave(shared, 0).flatten()
        state[f"{at}.self_attn.k_proj.weight"] = state[f"{at}.self_attn.k_proj.weight"] * by.flatten()[:, None]
        state[f"{at}.self_attn.q_proj.weight"] = state[f"{at}.self_attn.q_proj.weight"] / each[:, None]


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--spread-keys", type=float, default=0.0)
    arguments = parser.parse_args()
    where = {"pretrained_model_name_or_path": str(arguments.model.parent), "gguf_file": arguments.model.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = model.config
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (config.num_attention_heads, config.num_key_value_heads, head_dim)
    shuffle(state, config.hidden_size, config.intermediate_size, *sizes)
    spread(state, *sizes, arguments.spread, arguments.spread_keys)
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
