"""FlashAttention and FlashInfer behind our interface, against fakes that keep their signatures, checks and meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.attention import flashinfer
from kvasir.attention.base import AttentionBackend, AttentionBatch, select
from kvasir.attention.flashinfer import FlashInferAttention
from kvasir.attention.torch import TorchAttention
from kvasir.models.fallback import TransformersModel
from kvasir.models.transformer import Transformer
from tests.attention_fakes import Calls, allow_float32, install, pretend, uses
from tests.engine_builders import generate, tokens
from tests.model_builders import make_hf_model, save
from tests.pairwise import each_once

CPU = torch.device("cpu")
# By title: the backend, the capability on which that package is taken, and a block size it has.
WAYS: dict[str, tuple[str, tuple[int, int], int]] = {
    "FlashAttention 2": ("flash_attn", (8, 0), 256),
    "FlashAttention 3": ("flash_attn", (9, 0), 16),
    "FlashAttention 4": ("flash_attn", (10, 0), 16),
    "FlashInfer": ("flashinfer", (9, 0), 16),
}
MIXED = [(9, 1), (0, 1), (311, 1), (15, 1), (16, 1), (0, 7), (0, 2), (25, 30), (250, 12), (1, 2)]  # context, queries


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)


def make(title: str, monkeypatch: pytest.MonkeyPatch) -> tuple[AttentionBackend, Calls, int]:
    backend, capability, block_size = WAYS[title]
    calls = install(monkeypatch, title)
    pretend(monkeypatch, capability)
    return select(backend, CPU), calls, block_size


def make_step(work: list[tuple[int, int]], block_size: int, kv_heads: int, head_dim: int) -> tuple[Any, AttentionBatch]:
    """A cache of scattered blocks, one layer of two, and a step over it; its rows are not in the tables' order."""
    torch.manual_seed(0)
    query_lens = np.array([queries for _, queries in work], np.int32)
    lengths = np.array([sum(one) for one in work], np.int32)
    width, count = -(-int(lengths.max()) // block_size), len(work)
    blocks = torch.randperm(count * width + 1)
    cache = torch.randn(len(blocks), 2, 2, block_size, kv_heads, head_dim, dtype=torch.bfloat16)[:, 1]
    rows = torch.randperm(count + 2)[:count]
    tables = torch.zeros(count + 2, width + 1, dtype=torch.int32)
    tables[rows, :width] = blocks[: count * width].view(count, width).int()
    batch = AttentionBatch(
        slots=torch.zeros(int(query_lens.sum()), dtype=torch.int64),  # nothing is stored here
        query_start=torch.from_numpy(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)),
        seq_lens=torch.from_numpy(lengths),
        tables=tables,
        rows=rows,
        num_decodes=int((query_lens == 1).sum()),
        query_lens=query_lens,
        seq_bounds=lengths,
        block_size=block_size,
    )
    return cache, batch


def check(backend: AttentionBackend, cache: torch.Tensor, batch: AttentionBatch, heads: int, **options: Any) -> None:
    query = torch.randn(int(batch.query_lens.sum()), heads, cache.shape[-1], dtype=torch.bfloat16)
    options = {"scale": 0.11, "window": None, "softcap": None, **options}
    got = backend.forward(query, cache, batch, **options)
    batch = AttentionBatch(**{name: getattr(batch, name) for name in batch.__slots__ if name != "step_cache"})
    wanted = TorchAttention().forward(query.float(), cache.float(), batch, **options)
    assert got.dtype == torch.bfloat16 and got.is_contiguous()
    torch.testing.assert_close(got.float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("title", WAYS)
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (40, None), (1000, None), (33, 0.7)])
def test_a_mixed_step_equals_torch(
    title: str, heads: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, calls, block_size = make(title, monkeypatch)
    cache, batch = make_step(MIXED, block_size, 2, 64)
    for _ in range(2):  # a second layer finds what the first one cached
        check(backend, cache, batch, heads, window=window, softcap=softcap)
    assert not backend.capturable
    assert all(uses(calls, cache)), "the cache was copied"


@pytest.mark.parametrize("title", WAYS)
@pytest.mark.parametrize("work", [[(0, 1)], [(6, 1), (300, 1)], [(0, 9)], [(4, 4), (11, 2)]], ids=str)
def test_only_decodes_or_only_chunks(title: str, work: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, block_size = make(title, monkeypatch)
    check(backend, *make_step(work, block_size, 1, 128), 4)


@pytest.mark.parametrize("title", WAYS)
def test_last_tokens_alone(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, block_size = make(title, monkeypatch)
    cache, batch = make_step(MIXED, block_size, 2, 64)
    check(backend, cache, batch, 4)
    check(backend, cache, batch.last_tokens().batch, 4)


# ---------------------------------------------------------------- FlashInfer's plans


def test_layers_alike_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, calls, block_size = make("FlashInfer", monkeypatch)
    cache, batch = make_step(MIXED, block_size, 2, 64)
    for window in (None, 16, None, 16, None, 16):  # as in Gemma: layers that see all, and layers with a window
        check(backend, cache, batch, 4, window=window)
    assert len(calls.plans) == 4  # decodes and chunks of either kind


def test_a_wrapper_is_lent_to_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of layers with like options have other blocks: neither may plan in the other's wrapper."""
    backend, calls, block_size = make("FlashInfer", monkeypatch)
    steps = [make_step(work, block_size, 2, 64) for work in (MIXED, MIXED[1:])]
    for _ in range(2):
        for cache, batch in steps:
            check(backend, cache, batch, 4)
    assert (calls.wrappers, len(calls.plans)) == (4, 4)
    del steps, cache, batch
    check(backend, *make_step(MIXED, block_size, 2, 64), 4)
    assert (calls.wrappers, len(calls.plans)) == (4, 6)


class Event:
    """What was launched before it was recorded, done when a test says so."""

    done = True

    def record(self, stream: object) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_a_plan_that_the_device_has_not_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host plans ahead of the device, and a wrapper's host buffer is copied in the device's own time."""
    events: list[Event] = []

    def event() -> Event:
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    calls = install(monkeypatch, "FlashInfer")
    backend = FlashInferAttention(CPU)
    monkeypatch.setattr(backend._decoders, "_make", lambda make=backend._decoders._make: on_a_gpu(make()))
    decodes = [(20, 1), (3, 1)]
    check(backend, *make_step(decodes, 16, 2, 64), 4)
    check(backend, *make_step(decodes, 16, 2, 64), 4)
    assert (calls.wrappers, len(events)) == (2, 2), "the first plan may not be on the device yet"
    events[0].done = True
    for _ in range(3):
        check(backend, *make_step(decodes, 16, 2, 64), 4)
        events[0].done = events[1].done = True
    assert calls.wrappers == 2


def on_a_gpu(wrapper: Any) -> Any:
    real, wrapper.device = wrapper.device, torch.device("cuda")
    keep = wrapper.keep

    def kept(*args: Any) -> None:
        wrapper.device = real
        keep(*args)
        wrapper.device = torch.device("cuda")

    wrapper.keep = kept
    return wrapper


# ---------------------------------------------------------------- whole engines


def llm(path: Path, backend: str, block_size: int, **settings: Any) -> LLM:
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, **settings}
    return LLM(
        str(path), dtype="float32", attention_backend=backend, block_size=block_size, max_model_len=128, device="cpu",
        skip_tokenizer_init=True, use_tqdm_on_load=False, **settings,
    )  # fmt: skip


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, 96, int(n)).tolist() for n in rng.integers(1, 90, 10)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("qwen3", "mistral_window", "gemma2")
    hf = {name: make_hf_model(name, hidden_size=128, num_attention_heads=4, head_dim=64) for name in names}
    return {name: save(model, tmp_path_factory.mktemp(name)) for name, model in hf.items()}


@pytest.mark.parametrize(
    ("title", "name", "kind"),
    each_once(
        list(WAYS),
        [
            ("qwen3", Transformer),
            ("mistral_window", Transformer),
            ("gemma2", Transformer),
            ("gemma2", TransformersModel),
        ],
    ),
)
def test_an_engine_says_what_it_says_with_torch(
    title: str, name: str, kind: type, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, capability, block_size = WAYS[title]
    calls = install(monkeypatch, title)
    pretend(monkeypatch, capability)
    allow_float32(monkeypatch)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    said = []
    for way in ("torch", backend):
        model_impl = "kvasir" if kind is Transformer else "transformers"
        with llm(checkpoints[name], way, block_size, model_impl=model_impl) as engine:
            worker = engine.llm_engine.client.core.executor  # type: ignore[attr-defined]
            assert isinstance(worker.model, kind) and worker.runner.graphs is None
            said.append(tokens(generate(engine, prompts(), greedy)))
    assert calls.attends
    assert said[0] == said[1]
