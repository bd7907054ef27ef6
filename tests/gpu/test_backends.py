"""FlashAttention and FlashInfer for real, where they are installed: a step equals plain torch's, and none waits. Plain
torch itself is compared with what it says on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import LLM, SamplingParams, platforms
from kvasir.attention.base import AttentionBackend, AttentionBatch
from kvasir.attention.flash_attn import FlashAttention
from kvasir.attention.flashinfer import FlashInferAttention
from kvasir.attention.torch import TorchAttention
from kvasir.errors import ConfigError
from kvasir.platforms import attention_packages
from kvasir.platforms.attention_packages import PACKAGES, Package
from tests.model_builders import make_hf_model, never_waiting, save

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def make(package: Package) -> AttentionBackend:
    capability = platforms.select("cuda").compute_capability
    if capability is None or capability[0] not in package.majors:
        pytest.skip(f"{package.title} does not run on this device")
    if not attention_packages.is_installed(package):
        pytest.skip(f"{package.title} is not installed ({package.install})")
    return FlashInferAttention(DEVICE) if package.module == "flashinfer" else FlashAttention(package)


def make_step(rng: np.random.Generator, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Any:
    """A random mixed step over a cache of scattered blocks."""
    decodes, chunks = int(rng.integers(0, 40)), int(rng.integers(0, 5))
    decodes += not decodes + chunks
    query_lens = np.concatenate([np.ones(decodes), rng.integers(2, 400, chunks)]).astype(np.int32)
    lengths = query_lens + rng.integers(0, 1500, len(query_lens)).astype(np.int32)
    need = -(-lengths // block_size)
    blocks = rng.permutation(int(need.sum()) + 1)
    tables, at = np.zeros((len(need) + 3, int(need.max())), np.int32), 0
    rows = rng.permutation(len(tables))[: len(need)]
    for row, count in zip(rows, need, strict=True):
        tables[row, :count] = blocks[at : at + count]
        at += count
    cache = torch.randn(len(blocks), 2, block_size, kv_heads, dim, device=DEVICE).to(dtype)
    batch = AttentionBatch(
        slots=torch.zeros(int(query_lens.sum()), dtype=torch.int64, device=DEVICE),  # nothing is stored here
        query_start=torch.from_numpy(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)).to(DEVICE),
        seq_lens=torch.from_numpy(lengths).to(DEVICE),
        tables=torch.from_numpy(tables).to(DEVICE),
        rows=torch.from_numpy(rows.astype(np.int64)).to(DEVICE),
        num_decodes=decodes,
        query_lens=query_lens,
        seq_bounds=lengths,
        block_size=block_size,
    )
    return cache, batch


@pytest.mark.parametrize(
    "package", [p for some in PACKAGES.values() for p in some], ids=lambda p: f"{p.title} {p.majors}"
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 64), (14, 2, 64), (32, 8, 128), (8, 1, 256)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (128, None), (1, None), (None, 30.0), (200, 20.0)])
def test_random_steps_equal_torch(
    package: Package,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
) -> None:
    backend, rng = make(package), np.random.default_rng(heads + dim)
    torch.manual_seed(0)
    block_size = package.block_size or int(rng.choice([16, 64]))
    options: dict[str, Any] = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    for step in range(4):
        cache, batch = make_step(rng, block_size, kv_heads, dim, dtype)
        query = torch.randn(len(batch.slots), heads, dim, device=DEVICE).to(dtype)
        if not step:
            got = backend.forward(query, cache, batch, **options)  # may compile
            batch.step_cache.clear()
        with never_waiting(DEVICE):
            got = backend.forward(query, cache, batch, **options)
        batch.step_cache.clear()
        wanted = TorchAttention().forward(query.float(), cache.float(), batch, **options)
        torch.testing.assert_close(got.float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 40])
def test_torch_says_the_same_on_the_cpu(dim: int, window: int | None) -> None:
    """Chunks of 32 n + 1 queries: of these torch's own kernels get the last one wrong where heads share keys."""
    torch.manual_seed(dim)
    heads, kv_heads, block_size = 8, 2, 16
    for queries in (2, 32, 33, 64, 65, 97, 129):
        length = queries + 249
        blocks = -(-length // block_size)
        cache = torch.randn(blocks, 2, block_size, kv_heads, dim)
        query = torch.randn(queries, heads, dim)
        said = []
        for device in ("cpu", "cuda"):
            batch = AttentionBatch(
                slots=torch.zeros(queries, dtype=torch.int64, device=device),
                query_start=torch.tensor([0, queries], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
                tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
                rows=torch.zeros(1, dtype=torch.int64, device=device),
                num_decodes=0,
                query_lens=np.array([queries], np.int32),
                seq_bounds=np.array([length], np.int32),
                block_size=block_size,
            )
            args = query.to(device), cache.to(device), batch
            said.append(TorchAttention().forward(*args, scale=dim**-0.5, window=window).cpu())
        worst = (said[1] - said[0]).abs().amax((1, 2))
        assert float(worst.max()) < 2e-3, f"of {queries} queries, number {int(worst.argmax())}"


@pytest.mark.parametrize("backend", PACKAGES)
@pytest.mark.parametrize("name", ["qwen3", "mistral_window", "gemma2"])
def test_an_engine_says_nearly_what_it_says_with_torch(backend: str, name: str, tmp_path: Path) -> None:
    """In 16 bits a near-tie may fall either way: so many first tokens must be the same, not all."""
    try:
        attention_packages.require(backend, platforms.select("cuda"))
    except ConfigError as error:
        pytest.skip(str(error))
    path = save(make_hf_model(name, hidden_size=256, num_attention_heads=4, head_dim=64), tmp_path)
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(2, 96, int(n)).tolist()} for n in rng.integers(1, 100, 32)]
    said = []
    for way in ("torch", backend):
        with LLM(
            str(path), dtype="bfloat16", attention_backend=way, max_model_len=128, kv_cache_memory_bytes=256 << 20,
            skip_tokenizer_init=True, use_tqdm_on_load=False,
        ) as llm:  # fmt: skip
            outputs = llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False
            )
            said.append([output.outputs[0].token_ids[0] for output in outputs])
    same = sum(ours == theirs for ours, theirs in zip(*said, strict=True))
    assert same >= 28, f"only {same} of 32 first tokens agree"
