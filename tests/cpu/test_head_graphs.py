"""Heads as graphs that do more than draw, without a GPU: penalties, bias, bans, bad words, min_tokens, scores.

A replay runs again what was captured, and must be given the very tables that the capture was given: a real graph would
read those, whatever has taken their place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from kvasir import LLM, SamplingParams, kernels
from kvasir.attention import base as attention_backends
from kvasir.frontend.requests.extras import ExtrasBuilder
from kvasir.sampling import logit_rules, sampler
from kvasir.sampling.logit_rules import BadWords, Penalties
from kvasir.sampling.logprobs import NamedTokens
from kvasir.sampling.sampler import Sampler
from tests.model_builders import make_hf_model, save
from tests.pairwise import few

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run for real here: see tests/gpu", allow_module_level=True)

from kvasir.kernels import triton
from kvasir.kernels.triton import paged_decode
from kvasir.worker import step_graphs
from kvasir.worker.graph_memory import Captured
from tests.graph_fakes import Repeats

VOCAB = 96
KERNELS = ("penalize", "add_bias", "mask_logits", "ban_words", "count_tokens", "push_tokens")
WISHES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {3: 2.0, 0: -1.0, 17: 4.0}},
    "bans": {"allowed_token_ids": list(range(10, 60)), "forbidden_token_ids": [11, 12]},
    "bad words": {"bad_words": [f"{i}" for i in range(20, 40)] + [f"{i} {i}" for i in range(40, 50)]},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": list(range(40, 52)), "ignore_eos": True},
    "scored": {"logprobs": 3},
    "scored most": {"logprobs": 20},
    "scored alone": {"logprobs": 0, "temperature": 0},
    "many named": {"logprob_token_ids": list(range(50, 59))},
    "named": {"logprob_token_ids": [4, 5, 90]},
    "filtered": {"top_p": 0.9, "top_k": 20, "logprobs": 1},
    "all": {"presence_penalty": 0.5, "logit_bias": {5: 1.0}, "forbidden_token_ids": [6], "bad_words": ["7", "8 9"]}
    | {"min_tokens": 2, "stop_token_ids": [1, 2, 3], "logprobs": 2, "top_p": 0.95},
}
UNCAPTURED = {"named", "many named"}  # no head has a graph for these
STAGED = {"penalties", "bias", "bans", "bad words", "all"}
SCORED = {"scored", "scored most", "scored alone", "named", "many named", "filtered", "all"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention is not what is tested here."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save(make_hf_model("qwen3", **sizes), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def words_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no tokenizer."""
    words = lambda _, params: tuple(tuple(map(int, word.split())) for word in params.bad_words or ())  # noqa: E731
    monkeypatch.setattr(ExtrasBuilder, "_bad_words", words)


class FixedTables(Repeats):
    """A replay that is given other tables than the first fails."""

    given: ClassVar[list[Any]] = []

    def capture(self, run: Callable[[], Any]) -> Captured[Any]:
        captured = super().capture(run)
        wanted: list[Any] = []  # held, so that none of them is taken for another
        replay = captured.graph.replay

        def replay_alike() -> None:
            self.given.clear()
            replay()
            if not wanted:
                wanted.extend(self.given)
            same = len(self.given) == len(wanted) and all(a is b for a, b in zip(self.given, wanted, strict=True))
            assert same, "a graph would have read a table that is no more"

        captured.graph.replay = replay_alike  # type: ignore[method-assign]
        return captured


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this test run as graphs; stages by Triton's kernels."""
    monkeypatch.setattr(step_graphs, "GraphPool", FixedTables)
    monkeypatch.setitem(attention_backends._BACKENDS, "torch", attention_backends._BACKENDS["triton"])
    monkeypatch.setattr(paged_decode, "choose_split", lambda sequences, kv_heads: paged_decode.Split(1, 32))

    def noted(call: Callable[..., Any], tables: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            FixedTables.given += tables(*args)
            return call(*args)

        return noting

    for name in KERNELS:
        monkeypatch.setattr(kernels, name, noted(getattr(triton, name), lambda *args: args[2:]))
    ban, names = Sampler._ban_stop_ids, NamedTokens.of
    monkeypatch.setattr(Sampler, "_ban_stop_ids", noted(ban, lambda sampler, *_: (sampler.parameters.stop_ids,)))
    monkeypatch.setattr(NamedTokens, "of", noted(names, lambda named, _: (named.ids,)))


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[tuple[LLM, Any, list[int]]]:
    """It, its runner, and for every head that was launched kernel by kernel how many rows it had."""
    settings = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 32, "block_size": 16, **settings}
    settings |= {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "kv_cache_memory_bytes": 8 << 20}
    eager: list[int] = []
    with LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings) as llm:
        runner: Any = llm.llm_engine.client.core.executor.runner  # type: ignore[attr-defined]
        launch = runner._sample_eagerly

        def counted(running: Any, sampled: Any, uses: Any, outputs: Any) -> None:
            eager.append(len(sampled.lines))
            launch(running, sampled, uses, outputs)

        runner._sample_eagerly = counted
        yield llm, runner, eager


def requests(names: list[str], seed: int = 0, **changes: Any) -> tuple[list[Any], list[SamplingParams]]:
    rng = np.random.default_rng(seed)
    prompts = [{"prompt_token_ids": rng.integers(2, VOCAB, int(n)).tolist()} for n in rng.integers(1, 14, len(names))]
    params = [
        SamplingParams(
            **{"temperature": 0.9, "seed": i, "max_tokens": int(n), "ignore_eos": True, **WISHES[name], **changes}
        )
        for i, (name, n) in enumerate(zip(names, rng.integers(4, 11, len(names)), strict=True))
    ]
    return prompts, params


def said(outputs: list[Any]) -> tuple[list[list[int]], list[Any]]:
    """Texts, and scores as plain numbers."""
    texts = [branch.token_ids for output in outputs for branch in output.outputs]
    scores = [
        [(place, token, entry.rank, entry.logprob) for token, entry in found.items()]
        for output in outputs
        for branch in output.outputs
        for place, found in enumerate(branch.logprobs or [])
    ]
    return texts, scores


def same(found: list[Any], wanted: list[Any]) -> None:
    (texts, scores), (wanted_texts, wanted_scores) = said(found), said(wanted)
    assert texts == wanted_texts
    tokens, wanted_tokens = ([entry[:3] for line in lines for entry in line] for lines in (scores, wanted_scores))
    assert tokens == wanted_tokens
    values, wanted_values = ([entry[3] for line in lines for entry in line] for lines in (scores, wanted_scores))
    np.testing.assert_allclose(values, wanted_values, atol=1e-3)


def both(path: Path, request: pytest.FixtureRequest, names: list[str], **settings: Any) -> tuple[Any, list[int]]:
    """Plain steps and graphs say the same. Returns the runner that had graphs, and its heads that were none."""
    prompts, params = requests(names)
    with engine(path, **settings) as (llm, runner, _):
        wanted = llm.generate(prompts, params, use_tqdm=False)
        assert runner.graphs is None
    request.getfixturevalue("graphs")
    with engine(path, **settings) as (llm, runner, eager):
        same(llm.generate(prompts, params, use_tqdm=False), wanted)
    return runner, eager


@pytest.mark.parametrize("name", few(list(WISHES), fast=["min_tokens"]))
def test_each_wish_is_a_graph_and_changes_nothing(path: Path, name: str, request: pytest.FixtureRequest) -> None:
    runner, eager = both(path, request, [name, "nothing", name])
    stats = runner.graphs.stats
    assert bool(eager) == (name in UNCAPTURED), "a head was launched kernel by kernel"
    assert (stats.heads["stages"] > 2) == (name in STAGED | {"min_tokens"})
    assert (stats.heads["scores"] > 2) == (name in SCORED - UNCAPTURED)


def test_all_wishes_at_once_while_rows_change_tenants(path: Path, request: pytest.FixtureRequest) -> None:
    names = list(WISHES)[::-1] + ["penalties", "bias"] * 2 + ["nothing"]  # the longest lists are not first
    runner, eager = both(path, request, names)
    stats = runner.graphs.stats
    assert eager and stats.heads["stages"] > 5 and stats.heads["scores"] > 3 and stats.heads["filters"] > 4


@pytest.mark.parametrize(
    "wishes",
    [
        pytest.param(
            [{"min_tokens": 3, "stop_token_ids": list(range(n))} for n in (2, 9)],
            id="min_tokens",
        ),
        pytest.param([{"logit_bias": dict.fromkeys(range(n), 1.0)} for n in (2, 9)], id="bias", marks=pytest.mark.slow),
        pytest.param(
            [{"bad_words": [str(i) for i in range(n)]} for n in (2, 9)], id="bad words", marks=pytest.mark.slow
        ),
        pytest.param(
            [{"bad_words": [words]} for words in ("3 4", "3 4 5 6")], id="longer words", marks=pytest.mark.slow
        ),
    ],
)
def test_a_longer_list_than_any_before(
    path: Path, wishes: list[dict[str, Any]], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same steps again, but for a table that had to grow. Graphs read the old one, and are not used any more."""
    monkeypatch.setattr(sampler, "STOP_IDS", 2)
    for name, size in (("BIASED_TOKENS", 2), ("BAD_WORDS", 2), ("BAD_WORD_TOKENS", 1)):
        monkeypatch.setattr(logit_rules, name, size)

    def answers() -> tuple[list[Any], Any]:
        with engine(path) as (llm, runner, _):
            found = []
            for wish in (*wishes, wishes[0]):
                params = SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True, **wish)
                found += llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
                llm.reset_prefix_cache()
            return found, runner.graphs

    wanted, _ = answers()
    request.getfixturevalue("graphs")
    found, graphs = answers()
    same(found, wanted)
    assert graphs.stats.stale_heads > 0 and graphs.stats.heads["stages"] > 0, "before and after"


@pytest.mark.parametrize(
    "mode",
    few(["raw_logprobs", "processed_logits", "raw_logits", "processed_logprobs"], fast=["processed_logits"]),
)
def test_every_kind_of_score(path: Path, mode: str, request: pytest.FixtureRequest) -> None:
    names = ["scored", "all", "penalties", "filtered", "scored most"]
    runner, eager = both(path, request, names, logprobs_mode=mode)
    assert runner.graphs.stats.heads["scores"] > 5 and not eager


def test_padding_is_not_learnt_from(path: Path, graphs: None) -> None:
    """Heads have more lines than rows sample. Rows keep their slots until others take them."""
    names = ["penalties", "bad words", "penalties", "all"]
    prompts, params = requests(names, max_tokens=9, ignore_eos=True, min_tokens=9)
    with engine(path) as (llm, runner, eager):
        texts, _ = said(llm.generate(prompts, params, use_tqdm=False))
        stages: dict[type, Any] = {type(stage): stage for stage in runner.sampler.parameters.stages._stages}
        counts, recent = stages[Penalties], stages[BadWords]
        assert not eager
        learnt = [Counter(np.repeat(np.arange(VOCAB), counts.counts[slot])) for slot in counts.slots if slot >= 0]
        assert sorted(map(repr, map(sorted, (each.elements() for each in learnt)))) == sorted(
            repr(sorted(map(np.int64, texts[i]))) for i in (0, 2, 3)
        )
        width = recent.recent.shape[1]
        kept = [recent.recent[slot].tolist() for slot in recent.slots if slot >= 0]
        assert sorted(kept) == sorted(texts[i][-width:] for i in (1, 3))


def test_rows_that_do_not_sample_are_not_learnt_from(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of single tokens, one of which is of a prompt that goes on: its row draws too, and nobody asked for it."""
    sent: list[bool] = []
    real = step_graphs.StepGraphs._head_inputs

    def noted(self: Any, *args: Any) -> Any:
        arrays, buffers = real(self, *args)
        sent.append(len(arrays[0]) > 0)
        return arrays, buffers

    monkeypatch.setattr(step_graphs.StepGraphs, "_head_inputs", noted)
    names = ["penalties", "bad words", "all", "penalties", "penalties", "bad words"]
    _, eager = both(path, request, names, max_num_batched_tokens=4, max_num_seqs=4)
    assert any(sent) and not eager


def test_heads_that_find_no_memory_run_without(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FixedTables):
        """A device that has memory for forward passes and the largest heads only."""

        def capture(self, run: Callable[[], Any]) -> Captured[Any]:
            if self.taken >= 24 << 20:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().capture(run)

    prompts, params = requests([name for name in WISHES if name not in UNCAPTURED][5:])
    with engine(path) as (llm, _, _eager):
        wanted = llm.generate(prompts, params, use_tqdm=False)
    request.getfixturevalue("graphs")
    monkeypatch.setattr(step_graphs, "GraphPool", Full)
    with engine(path) as (llm, runner, eager):
        same(llm.generate(prompts, params, use_tqdm=False), wanted)
    stats = runner.graphs.stats
    assert eager and stats.heads["stages"] and stats.heads["scores"], "both ways were to be taken"


def shift(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(len(output) % 3)


@pytest.mark.parametrize(
    "wish",
    [
        pytest.param({"logprobs": 33}, id="33", marks=pytest.mark.slow),
        pytest.param({"logprobs": -1}, id="all", marks=pytest.mark.slow),
        pytest.param({"logits_processors": [shift]}, id="processor"),
        pytest.param({"top_ema_p": 0.5, "top_ema_d": 2}, id="top ema", marks=pytest.mark.slow),
    ],
)
def test_what_no_graph_can_do_is_launched(path: Path, wish: dict[str, Any], request: pytest.FixtureRequest) -> None:
    prompts, params = requests(["penalties", "scored", "bad words"])
    params[1] = SamplingParams(temperature=0.9, seed=7, max_tokens=8, ignore_eos=True, **wish)
    with engine(path, max_logprobs=-1) as (llm, _, _eager):
        wanted = llm.generate(prompts, params, use_tqdm=False)
    request.getfixturevalue("graphs")
    with engine(path, max_logprobs=-1) as (llm, runner, eager):
        same(llm.generate(prompts, params, use_tqdm=False), wanted)
    assert len(eager) >= 7 and runner.graphs.stats.replays > len(eager) - 1


def test_beams_are_graphs(path: Path, request: pytest.FixtureRequest) -> None:
    prompts, _ = requests(["nothing"] * 2)
    params = SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=6, ignore_eos=True)
    with engine(path) as (llm, _, _eager):
        wanted = llm.generate(prompts, params, use_tqdm=False)
    request.getfixturevalue("graphs")
    with engine(path) as (llm, runner, eager):
        same(llm.generate(prompts, params, use_tqdm=False), wanted)
    assert runner.graphs.stats.heads["scores"] > 4 and not eager
