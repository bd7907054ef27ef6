"""GGUF files for tests, written by the gguf package from transformers' models and real tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias", "mlp.experts.down_proj": "ffn_down_exps.weight",
    "self_attn.sinks": "attn_sinks.weight", "mlp.router.": "ffn_gate_inp.", "mlp.gate.e_score": "exp_probs_b.e_score",
    "exp_probs_b.e_score_correction_bias": "exp_probs_b.bias", "mlp.shared_experts.": "mlp.shared_expert.",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "block_sparse_moe.router": "ffn_gate_inp", "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "shared_mlp.output_linear": "ffn_down_shexp", "ffn.router.layer": "ffn_gate_inp",
    "transformer.wte": "token_embd", "transformer.norm_f": "output_norm", "norm_attn_norm.norm_1": "attn_norm",
    "norm_attn_norm.norm_2": "attn_output_norm", "norm_attn_norm.attn.Wqkv": "attn_qkv",
    "norm_attn_norm.attn.out_proj": "attn_output", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.gate.": "ffn_gate_inp.",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def gguf_name(name: str, around: bool) -> str:
    after = "post_attention_norm" if around else "ffn_norm"
    name = re.sub(r"(?:model\.layers|transformer\.blocks)\.(\d+)\.", r"blk.\1.", name)
    for theirs, ours in {**NAMES, "post_attention_layernorm": after}.items():
        name = name.replace(theirs, ours)
    return name


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of Llama's queries and keys: the halves of a head by turns."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def random_blocks(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Random packed rows with small scales, for types that the package can only expand."""
    if kind in IQ:
        return random_iq_blocks(shape, kind, rng)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scales = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
    for at in scales[kind]:
        rows[:, :, at : at + 2] = np.array([0.0001 if kind is Kind.Q6_K else 0.0004], np.float16).view(np.uint8)
    return rows.reshape(shape[0], -1)


# Where the scale of a block is, and how large it makes values of a tenth.
IQ = {
    Kind.IQ2_XXS: (0, 0.002), Kind.IQ2_XS: (0, 0.002), Kind.IQ2_S: (0, 0.002), Kind.IQ3_XXS: (0, 0.001),
    Kind.IQ3_S: (0, 0.001), Kind.IQ4_NL: (0, 0.002), Kind.IQ4_XS: (0, 0.0001), Kind.IQ1_S: (0, 0.02),
    Kind.IQ1_M: (None, 0.02), Kind.TQ1_0: (52, 0.1), Kind.TQ2_0: (64, 0.1),
}  # fmt: skip


def random_iq_blocks(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
    at, scale = IQ[kind]
    half = int(np.array([scale], np.float16).view(np.uint16)[0])
    if at is None:  # a nibble at the end of each of the last four words
        for number in range(4):
            last = 48 + 2 * number + 1
            blocks[:, last] = (blocks[:, last] & 15) | (half >> 4 * number & 15) << 4
    else:
        blocks[:, at : at + 2] = half & 255, half >> 8
    return blocks.reshape(*shape[:-1], -1)


def write_model(
    path: Path,
    model: Any,
    arch: str,
    kind: Kind = Kind.F32,
    change: Callable[..., None] | None = None,
    tensors_in_a_file: int = 0,
) -> None:
    """The model's file, or several; its own weights become what the file says once it is expanded again."""
    config, rng = model.config, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_in_a_file)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if change is not None:
        change(writer)
    for name, value in _tensors(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        around = arch in ("gemma2", "gemma3", "glm4moe", "gpt-oss")
        _add_tensor(writer, gguf_name(name, around), value, config, arch, kind, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors, with gate and up of experts apart."""
    for name, value in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and "gpt_oss" in model.config.model_type:
            value = value.transpose(1, 2)  # inputs first; gate and up by turns
            if name.endswith("down_proj"):
                yield name, value
            for part, own in (("gate", value[:, ::2]), ("up", value[:, 1::2])) if "gate_up" in name else ():
                yield name.replace("mlp.experts.gate_up_proj", f"ffn_{part}_exps.weight"), own
        elif name.endswith("shared_mlp.input_linear.weight"):
            for part, own in zip(("gate", "up"), value.chunk(2), strict=True):
                yield f"{name.rsplit('.', 3)[0]}.ffn_{part}_shexp.weight", own
        elif name.endswith(("mlp.w1", "mlp.v1", "mlp.w2")):
            part = {"w1": "gate", "v1": "up", "w2": "down"}[name[-2:]]
            stack = value.view(model.config.ffn_config.moe_num_experts, -1, value.shape[1])
            yield f"{name.rsplit('.', 4)[0]}.ffn_{part}_exps.weight", stack.transpose(1, 2) if part == "down" else stack
        elif name.endswith("experts.gate_up_proj_bias"):
            for part, own in (("gate", value[:, ::2]), ("up", value[:, 1::2])):
                yield name.replace("mlp.experts.gate_up_proj_bias", f"ffn_{part}_exps.bias"), own
        elif name.endswith("kv_b_proj.weight") and model.written_as == "deepseek_v3":
            config = model.config
            heads = value.view(config.num_attention_heads, -1, value.shape[1])
            keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
            yield name.replace("self_attn.kv_b_proj", "attn_k_b"), keys.transpose(1, 2)
            yield name.replace("self_attn.kv_b_proj", "attn_v_b"), values
        elif name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            yield f"{name.rsplit('.', 3)[0]}.ffn_gate_exps.weight", gate
            yield f"{name.rsplit('.', 3)[0]}.ffn_up_exps.weight", up
        elif name.endswith("shared_expert_gate.weight"):
            yield name, value[0]
        else:
            yield name, value


def _add_tensor(writer: Any, name: str, value: torch.Tensor, config: Any, arch: str, kind: Kind, rng: Any) -> None:
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    count = next((heads[part] for part in heads if part in name and arch in ("llama", "granitemoe")), None)
    stored = value if count is None else permuted(value, count)
    if arch.startswith("gemma") and "norm" in name:
        stored = stored + 1.0
    if value.dim() == 1 or kind is Kind.F32:
        writer.add_tensor(name, stored.float().contiguous().numpy())
        return
    packable = kind not in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, *IQ)
    data = gguf.quantize(stored.numpy(), kind) if packable else random_blocks(tuple(value.shape), kind, rng)
    writer.add_tensor(name, data, raw_dtype=kind)
    back = torch.from_numpy(np.array(gguf.dequantize(data, kind), np.float32)).view(value.shape)
    if count is not None:
        back = back.view(count, -1, 2, *back.shape[1:]).swapaxes(1, 2).reshape(back.shape)
    value.copy_(back)


def write_tokenizer(path: Path, directory: Path, pre: str, add_bos: bool) -> None:
    """A file with the vocabulary of a real tokenizer.json and no tensors."""
    found = json.loads((directory / "tokenizer.json").read_text())
    added = {token["id"]: token for token in found["added_tokens"]}
    vocab = {number: token for token, number in found["model"]["vocab"].items()}
    size = max([*vocab, *added]) + 1
    tokens = [added[i]["content"] if i in added else vocab.get(i, f"[PAD{i}]") for i in range(size)]
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 if i in vocab else 5 for i in range(size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in found["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(add_bos)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    bos = config.get("bos_token")
    bos = bos["content"] if isinstance(bos, dict) else bos
    if bos is not None:
        writer.add_bos_token_id(tokens.index(bos))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
