"""The floors of benchmarks/h200: the arithmetic by hand where that is easy, and the pages that quote it."""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType

import pytest

from tests.conftest import ROOT

# Which row of the README's table is which workload.
ROWS = {
    "Qwen3-0.6B, 256 requests of 100-1024": "nano_bench",
    "Qwen3-0.6B, one request": "q_decode_b1",
    "Llama-3.1-8B, one request": "decode_b1",
    "Llama-3.1-8B, 64 requests": "decode_b64",
    "Llama-3.1-8B, 512 requests": "batch_512x512x256",
    "Llama-3.1-8B, 256 requests that share 2048": "shared_256x2048+128x128",
    "Llama-3.1-8B, 256 prompts of 2048": "prefill_256x2048x16",
}


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "h200"))
    return import_module("floors")


def test_sizes_are_those_of_the_record(floors: ModuleType) -> None:
    lines = [line for line in floors.record.load() if "in_tokens" in line and "[" not in line["workload"]]
    assert any(line["commit"] == floors.COMMIT for line in lines)
    recorded = {line["workload"]: (line["requests"], line["in_tokens"], line["out_tokens"]) for line in lines}
    assert recorded.pop("nano_bench_greedy") == recorded["nano_bench"]
    ours = {work.name: (len(work.prompts), work.in_tokens, work.out_tokens) for work in floors.workloads()}
    assert ours == recorded


def test_one_request_reads_all_weights_and_its_cache_in_every_step(floors: ModuleType) -> None:
    weights = 2 * (32 * 4096 * (6144 + 4096 + 28672 + 14336) + 128256 * 4096)
    assert weights == pytest.approx(15.0e9, rel=0.01)
    cache = 2 * 2 * 32 * 8 * 128
    found = floors.floor(floors.Workload("decode_b1", "llama-3.1-8b", [128], [256]), floors.Chip())
    assert found.need.weights == 256 * weights and found.need.cache == cache * (128 + sum(range(129, 384)))
    assert found.figure == pytest.approx(1e3 * (weights + cache * 256) / 4.54e12, rel=1e-6)  # 256 tokens on average


def test_many_prompt_tokens_take_their_operations(floors: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = floors.Shape(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, mlp=128, vocab=1000)
    monkeypatch.setitem(floors.SHAPES, "small", shape)
    work = floors.Workload("prefill", "small", [10, 20], [1, 1])
    need = floors.floor(work, floors.Chip()).need
    # All tokens leave keys and values; two have logits and what leads to them.
    rows_of_all, rows_of_last = 2 * 2 * 16 * 64, 64 * 64 + 64 * 64 + 256 * 64 + 64 * 128 + 1000 * 64
    attended = 4 * 4 * 16 * (10 + 20)
    assert need.operations == 2 * rows_of_all * 30 + 2 * rows_of_last * 2 + attended
    slow = floors.Chip(read=1e30, products=1e6)
    assert floors.floor(work, slow).figure == pytest.approx(32 / (need.operations / 1e6))


def test_what_is_shared_is_computed_and_read_once(floors: ModuleType) -> None:
    apart = floors.floor(floors.Workload("x", "llama-3.1-8b", [2176] * 4, [8] * 4), floors.Chip())
    shared = floors.floor(floors.Workload("x", "llama-3.1-8b", [128] * 4, [8] * 4, shared=2048), floors.Chip())
    assert apart.work.in_tokens == shared.work.in_tokens
    per_token = floors.SHAPES["llama-3.1-8b"].kv_bytes
    assert apart.need.cache - shared.need.cache == 8 * 3 * 2048 * per_token  # prompts, and 7 steps
    assert shared.prompts < 0.4 * apart.prompts and shared.attention < 0.4 * apart.attention


def test_the_page_has_the_table_that_is_computed(floors: ModuleType) -> None:
    page, table = floors.PAGE.read_text(encoding="utf-8"), floors.table(floors.Chip())
    assert page == floors.put(page, table), "run benchmarks/h200/floors.py --write"
    assert page != floors.put(page, table.replace("decode_b1", "decode_b2"))


def test_the_readme_quotes_the_floors(floors: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    by_name = {work.name: floors.floor(work, floors.Chip()).figure for work in floors.workloads()}
    for row, name in ROWS.items():
        (quoted,) = re.findall(rf"^\| {re.escape(row)}.*\| ([\d.,]+) \|$", text, re.MULTILINE)
        assert float(quoted.replace(",", "")) == pytest.approx(by_name[name], rel=0.01), row
