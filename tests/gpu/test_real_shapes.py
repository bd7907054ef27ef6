"""Engines of real width in bfloat16, as they are measured: what they say is read by transformers and compared.

Qwen3-0.6B and Llama-3.1-8B with their widths, heads and vocabularies, few layers and random weights. Each load takes a
path that small models in float32 do not have, and proves that it was taken. How the comparison judges is tested on the
CPU: tests/cpu/test_teacher_forced.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir import LLM
from tests.teacher_forced import (
    WIDTHS,
    Load,
    Reference,
    Said,
    Step,
    compare,
    make_reference,
    runner_of,
    scaled,
    speak,
    watch_steps,
)

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from kvasir.kernels import triton as fast
from kvasir.kernels.triton import linear
from kvasir.kernels.triton.linear import COUNTS
from kvasir.worker.graph_keys import MIXED_TOKENS

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Evidence:
    """How an engine computed what it said, twice: unscored, and with log-probabilities."""

    load: Load
    runner: Any
    steps: list[Step]
    launches: Counter[str]

    @property
    def stats(self) -> Any:
        return self.runner.graphs.stats

    @property
    def decode_sizes(self) -> set[int]:
        """Rows of the graphs in which every row runs one token."""
        return {key.rows for key in self.runner.graphs.forwards if not key.is_mixed}

    def expects(self, kind: str, rows: int) -> bool:
        """Whether this device's table has o and down in parts, or the head in tiles, for so many rows."""
        width, vocab = self.runner.model.embedding.weight.shape[1], self.runner.model.vocab_size
        begins = f"parts {width}x" if kind == "parts" else f"tile {vocab}x{width} "
        known = linear.table(torch.cuda.get_device_name())
        return any(key.startswith(begins) and key.endswith(f" for {max(rows, COUNTS[0])}") for key in known)


def one_row_products(seen: Evidence) -> None:
    assert 1 in seen.decode_sizes and seen.stats.replays >= 2 * (seen.load.max_tokens - 2)
    assert all(seen.launches[f"gemv {kind}"] for kind in ("norm", "add", "gated", "plain")), seen.launches


def decode_graphs(seen: Evidence) -> None:
    rows = len(seen.load.lengths)
    assert rows in seen.decode_sizes and seen.stats.replays >= 2 * (seen.load.max_tokens - 2)
    assert max(step.rows for step in seen.steps if step.decodes == step.rows) == rows
    for kind in ("parts", "tile"):
        assert seen.launches[f"{kind} {rows}"] or not seen.expects(kind, rows), seen.launches


def mixed_graphs(seen: Evidence) -> None:
    mixed = [step for step in seen.steps if step.is_mixed]
    assert len(mixed) > 4 and max(step.tokens for step in mixed) <= MIXED_TOKENS[-1]
    assert seen.stats.mixed_steps >= len(mixed)
    assert seen.launches["descriptor of the cache"]


def eager_chunks(seen: Evidence) -> None:
    above = [step for step in seen.steps if step.tokens > MIXED_TOKENS[-1]]
    assert len(above) >= 4 and seen.runner.stats.narrowed_steps >= len(above)
    assert max(seen.load.lengths) > max(step.tokens for step in above), "no prompt was cut"
    assert seen.launches["descriptor of the cache"]


def shared_prefix(seen: Evidence) -> None:
    assert seen.stats.shared_prefix_steps >= 2 * (seen.load.max_tokens - 2)


@dataclass(frozen=True)
class Case:
    load: Load
    proof: Callable[[Evidence], None]


MIXED = Load(
    [5, 300, 17, 450, 128, 64, 257, 1, 33, 600, 90, 200], max_tokens=24, settings={"max_num_batched_tokens": 256}
)
CASES = {
    "one": Case(Load([37], max_tokens=32), one_row_products),
    "one, split": Case(Load([1500], max_tokens=16), one_row_products),
    "8": Case(Load([1, 16, 17, 63, 64, 65, 128, 250]), decode_graphs),
    "64": Case(Load([1 + 37 * i % 300 for i in range(64)], max_tokens=12), decode_graphs),
    "mixed": Case(MIXED, mixed_graphs),
    "chunked": Case(Load([3000, 1300, 700, 2049], settings={"max_num_batched_tokens": 2048}), eager_chunks),
    "shared": Case(Load([1 + 7 * i % 70 for i in range(40)], shared=2048, max_tokens=12), shared_prefix),
}


@pytest.fixture(scope="module", params=WIDTHS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Reference, Reference, Path]]:
    """transformers in float32 and in bfloat16, and what an engine loads."""
    kind, shape = WIDTHS[request.param]
    path = tmp_path_factory.mktemp("model")
    exact = make_reference(kind, "cuda", torch.bfloat16, **shape)
    rounded = exact.rounded(torch.bfloat16)
    rounded.model.save_pretrained(path)
    yield exact, rounded, path
    del exact, rounded
    torch.cuda.empty_cache()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each way of a product was launched, or captured at the start; replays of a graph do not come by."""
    counts: Counter[str] = Counter()

    def count(name: str, label: Callable[..., str]) -> None:
        launch = getattr(fast, name)

        def counted(*args: Any, **how: Any) -> Any:
            counts[label(*args, **how)] += 1
            return launch(*args, **how)

        monkeypatch.setattr(fast, name, counted)

    def gemv_kind(*args: Any, **how: Any) -> str:
        return "gemv " + (
            "gated" if how.get("gated") else "norm" if "gain" in how else "add" if "add" in how else "plain"
        )

    count("gemv", gemv_kind)
    count("tile_linear", lambda x, *rest: f"tile {len(x)}")
    count("linear_parts", lambda x, *rest: f"parts {len(x)}")
    made = TensorDescriptor.__post_init__

    def described(self: Any) -> None:
        counts["descriptor of the cache" if self.base.dim() == 5 else "descriptor of weights"] += 1
        made(self)

    monkeypatch.setattr(TensorDescriptor, "__post_init__", described)
    return counts


def open_llm(path: Path, **settings: Any) -> LLM:
    settings = {"dtype": "bfloat16", "max_model_len": 4096, "kv_cache_memory_bytes": 2 << 30, **settings}
    return LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings)


def run(
    path: Path, case: Case, launches: Counter[str], vocab_size: int, **settings: Any
) -> tuple[list[Said], list[Said]]:
    """What is said without log-probabilities, and with them, by other heads; the path is proven."""
    load = case.load
    with open_llm(path, **load.settings, **settings) as llm:
        steps = watch_steps(llm)
        prompts = load.prompts(vocab_size)
        said = speak(llm, prompts, load.max_tokens, scored=False), speak(llm, prompts, load.max_tokens)
        case.proof(Evidence(load, runner_of(llm), steps, launches))
    return said


@pytest.mark.parametrize("name", CASES)
def test_engine_equals_transformers(
    checkpoint: tuple[Reference, Reference, Path], name: str, launches: Counter[str]
) -> None:
    exact, rounded, path = checkpoint
    for answers in run(path, CASES[name], launches, exact.model.config.vocab_size):
        found = compare(answers, exact, rounded)
        print(found)
        found.check()


def eight_bits_in_mixed_graphs(seen: Evidence) -> None:
    mixed_graphs(seen)
    spec = seen.runner.kv_memory.spec
    assert spec.page_bytes == 2 * spec.block_size * 8 * 128, "a byte a number"


def test_engine_with_an_8_bit_cache_equals_transformers_with_one(
    checkpoint: tuple[Reference, Reference, Path], launches: Counter[str]
) -> None:
    """A key that is computed a little otherwise may round to a neighbour. transformers in bfloat16 has that, too, so
    that the tolerance, which comes from there, is wider than without."""
    exact, rounded, path = checkpoint
    case, kind = replace(CASES["mixed"], proof=eight_bits_in_mixed_graphs), torch.float8_e4m3fn
    said = run(path, case, launches, exact.model.config.vocab_size, kv_cache_dtype="fp8_e4m3")
    for answers in said:
        found = compare(answers, replace(exact, kv_dtype=kind), replace(rounded, kv_dtype=kind))
        print(found)
        found.check()
    with pytest.raises(AssertionError, match="too far off|no near-tie"):
        compare(said[1], exact, rounded).check()


def test_a_layer_that_is_a_tenth_too_large_is_seen(
    checkpoint: tuple[Reference, Reference, Path], launches: Counter[str]
) -> None:
    exact, rounded, path = checkpoint
    _, said = run(path, CASES["8"], launches, exact.model.config.vocab_size)
    for weight in ("self_attn.o_proj", "mlp.down_proj"):
        with scaled(exact, weight, 1.1), scaled(rounded, weight, 1.1):
            found = compare(said, exact, rounded)
        print(found)
        with pytest.raises(AssertionError, match="too far off|no near-tie"):
            found.check()
