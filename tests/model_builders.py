"""Tiny models for tests: transformers' own, saved as checkpoints, and ours run over scattered cache blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir.attention.base import AttentionBatch
from kvasir.config.engine import DeviceConfig, EngineConfig, LoadConfig, ModelConfig
from kvasir.models.transformer import Transformer

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

TRAINED_ON_32 = {"original_max_position_embeddings": 32}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "num_hidden_layers": 4, "attn_implementation": "eager"}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
GRANITE = {
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    "tie_word_embeddings": True,
}
DEEPSEEK = {
    **{"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 12, "num_experts_per_tok": 3},
    **{"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.6},
    "num_key_value_heads": 4,
}
DEEPSEEK_YARN = {
    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 0.9, "mscale_all_dim": 0.6},
    **TRAINED_ON_32,
}
MOE = {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 3}

# What transformers is asked to build: model type, and what differs from SIZES.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_biases_llama3": (
        "llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama_linear_gelu_one_head": (
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            "hidden_act": "gelu",
            "num_key_value_heads": 1,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12, "num_key_value_heads": 4}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_upper_windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3_biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "llama_yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, **TRAINED_ON_32}},
    ),
    "gemma": ("gemma", {"head_dim": 16, "hidden_act": "gelu"}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "sliding_window": 6}),
    "gemma3": (
        "gemma3_text",
        {
            **{**GEMMA, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "attn_logit_softcapping": 3.0,  # without effect
        },
    ),
    "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": 9}),
    "phi3_longrope_partial": (
        "phi3",
        {
            "pad_token_id": 0,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [2.0, 6.0, 16.0],
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2_unscaled_untied": (
        "gpt2",
        {**GPT2, "scale_attn_weights": False, "tie_word_embeddings": False, "n_inner": 40},
    ),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 4}),
    "gptj_tied": ("gptj", {**GPT2, "rotary_dim": 4, "tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt_norms_last": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "falcon": ("falcon", {}),
    "falcon_groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_one_norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon_sequential": ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "olmo2": ("olmo2", {"num_key_value_heads": 4, "pad_token_id": 0}),
    "granite": ("granite", GRANITE),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "smollm3_windows": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5, "pad_token_id": 0},
    ),
    "cohere": ("cohere", {"logit_scale": 0.5, "attention_bias": True}),
    "cohere2": ("cohere2", {"logit_scale": 0.5, "sliding_window": 5, "sliding_window_pattern": 3}),
    "stablelm": (
        "stablelm",
        {
            "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True}),
    "internlm2": ("llama", {}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen2_moe_windows": (
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen3_moe": ("qwen3_moe", {**MOE, "head_dim": 12, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3_moe_windows": ("qwen3_moe", {**MOE, "use_sliding_window": True, "sliding_window": 9}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0, "clip_qkv": 0.8}),
    "phimoe": ("phimoe", {"num_local_experts": 5, "router_jitter_noise": 0.4, "lm_head_bias": True}),
    "granitemoe": ("granitemoe", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "granitemoeshared": (
        "granitemoeshared",
        {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 20},
    ),
    "dbrx": (
        "dbrx",
        {
            **{"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 3},
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek_v2_lite": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "n_group": None, "topk_group": None}),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK, "rope_parameters": DEEPSEEK_YARN, "attention_bias": True}),
    "deepseek_v3_halves": ("deepseek_v3", {**DEEPSEEK, "rope_interleave": False, "n_group": 1, "topk_group": 1}),
    "glm4_moe": (
        "glm4_moe",
        {
            **{"n_routed_experts": 8, "moe_intermediate_size": 12, "num_experts_per_tok": 3, "n_group": 2},
            **{"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.7, "topk_group": 1},
        },
    ),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 8, "rotary_dim": 4}),
    "llama4": (
        "llama4_text",
        {
            **{"num_local_experts": 4, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "head_dim": 8},
            **{"num_hidden_layers": 4, "floor_scale": 8, "attn_scale": 0.4, "no_rope_layer_interval": 3},
        },
    ),
    "llama4_two_experts": (
        "llama4_text",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": False, "attention_bias": True},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 6},
            **{"num_hidden_layers": 4, "attn_implementation": "eager", "swiglu_limit": 0.6},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False},
                **TRAINED_ON_32,
            },
        },
    ),
}

# Norms before and after, of both kinds; parallel blocks; windows; soft caps; learned, halved and interleaved positions;
# biases; experts. Tests that take long have these among the fast ones, and the other architectures among the long ones.
REPRESENTATIVE = (
    *("llama", "qwen3", "gemma2", "gpt2", "falcon", "olmo2", "cohere2", "mixtral"),
    *("deepseek_v3", "gpt_oss"),  # a latent cache, groups of experts; sinks, biases of experts
)


def make_hf_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """transformers' model of one of TINY, every parameter random: fresh ones have biases of zero and gains of one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = TINY[name]
    torch.manual_seed(seed)
    options = {**SIZES, **options, **changes}
    # Scaled-dot-product attention knows no soft cap: transformers' is only right when it is written out.
    attention = options.pop("attn_implementation", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options), attn_implementation=attention)
    for value in model.parameters():
        value.data.normal_(1.0 if value.dim() == 1 else 0.0, 0.15)
    for path, value in model.named_buffers():  # it starts at zero, and would change no choice
        if path.endswith("e_score_correction_bias"):
            value.data.normal_(0.0, 0.15)
    model.written_as = name
    return model.eval()


def save(hf_model: Any, path: Path, **options: Any) -> Path:
    hf_model.save_pretrained(path, **options)
    if hf_model.written_as == "internlm2":
        _rewrite_as_internlm2(path)
    return path


def _rewrite_as_internlm2(path: Path) -> None:
    """transformers has no code of its own for InternLM2: it is a Llama whose checkpoint is laid out differently."""
    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    renames = {
        "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "lm_head": "output",
    }  # fmt: skip
    theirs, ours = load_file(path / "model.safetensors"), {}
    for name, tensor in theirs.items():
        if "q_proj" in name:
            groups = []
            k, v = (theirs[name.replace("q_proj", other)].chunk(kv_heads) for other in ("k_proj", "v_proj"))
            for index, queries in enumerate(tensor.chunk(kv_heads)):
                assert len(queries) == heads // kv_heads * len(k[index])
                groups += [queries, k[index], v[index]]
            ours[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups)
        elif "k_proj" not in name and "v_proj" not in name:
            for old, new in renames.items():
                name = name.replace(old, new)
            ours[name] = tensor
    save_file(ours, path / "model.safetensors")
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    (path / "config.json").write_text(json.dumps(config))


def make_config(checkpoint: Path, /, backend: str = "torch", **changes: Any) -> EngineConfig:
    """Settled settings for a checkpoint, without the work of resolving: float32 on the CPU."""
    path, hf = str(checkpoint), json.loads((checkpoint / "config.json").read_text())
    model = {"dtype": "float32", "max_model_len": 128, "seed": 0, "path": path, "hf": hf}
    load = {"load_format": "safetensors", "use_tqdm_on_load": False, "packed_weights_dir": None}
    for key, value in changes.items():
        (load if key in load else model)[key] = value
    return EngineConfig(
        model=ModelConfig(model=path, vocab_size=hf["vocab_size"], **model),
        load=LoadConfig(**load),
        device=DeviceConfig(device="cpu", attention_backend=backend, cpu_threads=1),
    )


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """On a GPU, an error for anything that makes the host wait for it."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@dataclass
class Held:
    """What the cache holds of one sequence."""

    length: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedModel:
    """Runs steps over a paged cache whose blocks are scattered, strided, and full of other sequences' leavings."""

    def __init__(
        self,
        model: Any,  # of ours, in whatever form it runs
        num_blocks: int = 128,
        block_size: int = 4,
        device: str = "cpu",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.block_size, self.device = model, block_size, torch.device(device)
        decoder: Transformer = getattr(model, "model", model)
        dtype = kv_dtype or decoder.embedding.weight.dtype
        num_layers = len(decoder.spec.layers)
        shape = (num_blocks, num_layers, *model.page_shape(block_size, dtype))
        pool = torch.randn(shape, device=device).mul_(50.0).to(dtype)
        model.bind_kv([pool[:, layer] for layer in range(num_layers)])
        self.free = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.sequences: dict[str, Held] = {}

    def step(self, work: dict[str, Sequence[int]], slack: int = 0, last: bool = False) -> dict[str, torch.Tensor]:
        """Compute these tokens in one step; their logits, or those of each sequence's last. `slack`: by how much
        decodes' bounds exceed the truth."""
        work = dict(sorted(work.items(), key=lambda item: len(item[1]) > 1))
        before = {name: self._extend(name, len(tokens)) for name, tokens in work.items()}
        query_lens = np.array([len(tokens) for tokens in work.values()], np.int32)
        positions = np.concatenate([before[name] + np.arange(len(tokens)) for name, tokens in work.items()])
        batch = self._batch(list(work), query_lens, positions, slack)
        ids = torch.tensor(np.concatenate(list(work.values())), dtype=torch.int64, device=self.device)
        where = torch.from_numpy(positions).to(self.device)
        with torch.inference_mode(), never_waiting(self.device):
            hidden = self.model(ids, where, batch, batch.last_tokens() if last else None)
            logits = self.model.logits(hidden)
        return dict(zip(work, logits.cpu().split(1 if last else query_lens.tolist()), strict=True))

    def _extend(self, name: str, tokens: int) -> int:
        sequence = self.sequences.setdefault(name, Held())
        before, sequence.length = sequence.length, sequence.length + tokens
        while len(sequence.blocks) * self.block_size < sequence.length:
            sequence.blocks.append(self.free.pop())
        return before

    def _batch(self, names: list[str], query_lens: Any, positions: Any, slack: int) -> AttentionBatch:
        sequences = [self.sequences[name] for name in names]
        lengths = np.array([sequence.length for sequence in sequences], np.int32)
        bounds = lengths + np.where(query_lens == 1, slack, 0).astype(np.int32)
        tables = np.zeros((len(names), -(-int(bounds.max()) // self.block_size)), np.int32)
        for row, sequence in enumerate(sequences):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        rows = np.repeat(np.arange(len(names)), query_lens)
        slots = tables[rows, positions // self.block_size].astype(np.int64) * self.block_size
        start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        return AttentionBatch(
            slots=torch.from_numpy(slots + positions % self.block_size).to(self.device),
            query_start=torch.from_numpy(start).to(self.device),
            seq_lens=torch.from_numpy(lengths).to(self.device),
            tables=torch.from_numpy(tables).to(self.device),
            rows=torch.arange(len(names), device=self.device),
            num_decodes=int((query_lens == 1).sum()),
            query_lens=query_lens,
            seq_bounds=bounds,
            block_size=self.block_size,
        )
