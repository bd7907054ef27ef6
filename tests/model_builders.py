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
from kvasir.config import DeviceConfig, EngineConfig, LoadConfig, ModelConfig
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
}


def make_hf_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """transformers' model of one of TINY, every parameter random: fresh ones have biases of zero and gains of one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = TINY[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options, **changes}))
    for value in model.parameters():
        value.data.normal_(1.0 if value.dim() == 1 else 0.0, 0.15)
    return model.eval()


def save(hf_model: Any, path: Path, **options: Any) -> Path:
    hf_model.save_pretrained(path, **options)
    return path


def make_config(checkpoint: Path, /, **changes: Any) -> EngineConfig:
    """Settled settings for a checkpoint, without the work of resolving: float32 on the CPU."""
    path, hf = str(checkpoint), json.loads((checkpoint / "config.json").read_text())
    model = {"dtype": "float32", "max_model_len": 128, "seed": 0, "path": path, "hf": hf}
    load = {"load_format": "safetensors", "use_tqdm_on_load": False}
    for key, value in changes.items():
        (load if key in load else model)[key] = value
    return EngineConfig(
        model=ModelConfig(model=path, vocab_size=hf["vocab_size"], **model),
        load=LoadConfig(**load),
        device=DeviceConfig(device="cpu", attention_backend="torch"),
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

    def __init__(self, model: Transformer, num_blocks: int = 128, block_size: int = 4, device: str = "cpu") -> None:
        self.model, self.block_size, self.device = model, block_size, torch.device(device)
        dtype = next(model.norm.parameters()).dtype
        shape = (num_blocks, model.spec.num_layers, *model.page_shape(block_size))
        pool = torch.randn(shape, device=device).mul_(50.0).to(dtype)
        model.bind_kv([pool[:, layer] for layer in range(model.spec.num_layers)])
        self.free = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.sequences: dict[str, Held] = {}

    def step(self, work: dict[str, Sequence[int]], slack: int = 0) -> dict[str, torch.Tensor]:
        """Compute these tokens in one step; their logits. `slack`: by how much decodes' bounds exceed the truth."""
        work = dict(sorted(work.items(), key=lambda item: len(item[1]) > 1))
        before = {name: self._extend(name, len(tokens)) for name, tokens in work.items()}
        query_lens = np.array([len(tokens) for tokens in work.values()], np.int32)
        positions = np.concatenate([before[name] + np.arange(len(tokens)) for name, tokens in work.items()])
        batch = self._batch(list(work), query_lens, positions, slack)
        ids = torch.tensor(np.concatenate(list(work.values())), dtype=torch.int64, device=self.device)
        where = torch.from_numpy(positions).to(self.device)
        with torch.inference_mode(), never_waiting(self.device):
            logits = self.model.logits(self.model(ids, where, batch))
        return dict(zip(work, logits.cpu().split(query_lens.tolist()), strict=True))

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
