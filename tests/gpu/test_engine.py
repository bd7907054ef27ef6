"""The whole engine on a GPU: graphs, eager kernels and plain torch give the same text, and no step waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.frontend.requests.extras import ExtrasBuilder
from tests.model_builders import make_hf_model, save

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "torch": {"attention_backend": "torch"},
    "chunked and tight": {
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
        "block_size": 16,
        "num_gpu_blocks_override": 20,
    },
    "one at a time": {"async_scheduling": False},
}


@pytest.fixture(scope="module", params=["llama_tied_biases_llama3", "mistral_window", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    hf = make_hf_model(request.param, hidden_size=64, num_attention_heads=4, head_dim=16)
    return hf, save(hf, tmp_path_factory.mktemp("model"))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, 96, int(n)).tolist() for n in rng.integers(1, 60, 16)]


def make(path: Path, **settings: Any) -> LLM:
    settings = {"kv_cache_memory_bytes": 64 << 20, "dtype": "float32", "max_model_len": 128, **settings}
    return LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings)


def forbid_waiting(llm: LLM) -> None:
    """From here on an operation that makes the host wait inside execute or sample is an error."""
    worker = llm.llm_engine.client.core.executor  # type: ignore[attr-defined]

    def strict(call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return wrapped

    worker.execute, worker.sample = strict(worker.execute), strict(worker.sample)


def run(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_equals_transformers(checkpoint: tuple[Any, Path], way: str) -> None:
    hf, path = checkpoint
    with make(path, **WAYS[way]) as llm:
        run(llm, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))  # compiles kernels, captures graphs
        llm.reset_prefix_cache()
        forbid_waiting(llm)
        said = run(llm, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
        graphs = llm.llm_engine.client.core.executor.runner.graphs  # type: ignore[attr-defined]
        assert (graphs is not None and graphs.stats.replays > 30) == (way not in ("eager", "torch"))
        assert graphs is None or graphs.stats.mixed_steps > 0
    for prompt, text in zip(prompts(), said, strict=True):
        with torch.inference_mode():
            wanted = hf.generate(
                torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert text == wanted[0, len(prompt) :].tolist()


def test_seeded_text_does_not_depend_on_the_way(checkpoint: tuple[Any, Path]) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
    filtered = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=5, max_tokens=24, ignore_eos=True)
    scored = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=3)
    said = {}
    ways = {way: settings for way, settings in WAYS.items() if way != "torch"}  # its float32 products are less exact
    for way, settings in ways.items():
        with make(checkpoint[1], **settings) as llm:
            said[way] = run(llm, params) + run(llm, filtered) + run(llm, scored)
            graphs = llm.llm_engine.client.core.executor.runner.graphs  # type: ignore[attr-defined]
            assert graphs is None or graphs.stats.heads["filters"] > 10
    first = said["graphs"]
    differ = [(way, i) for way, texts in said.items() for i, text in enumerate(texts) if text != first[i]]
    assert not differ
    assert first[:16] != first[16:]


WISHES: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    {"logit_bias": {3: 2.0}, "logprobs": 4},
    {"allowed_token_ids": list(range(10, 60)), "top_p": 0.9},
    {"forbidden_token_ids": [1, 2, 3], "prompt_logprobs": 2},
    {"top_ema_p": 0.5, "top_ema_d": 2},
    {"logits_processors": [lambda said, logits: logits.roll(len(said) % 3)]},
    {"logprob_token_ids": [4, 5], "n": 3},
    {"use_beam_search": True, "n": 4, "temperature": 0, "seed": None},
]


def test_every_stage_gives_the_same_text_in_every_way_without_waiting(checkpoint: tuple[Any, Path]) -> None:
    params = [
        SamplingParams(**{"seed": i, "max_tokens": 16, "ignore_eos": True, **WISHES[i % len(WISHES)]})
        for i in range(16)
    ]
    said = []
    for way in WAYS.values():
        with make(checkpoint[1], **way) as llm:
            run(llm, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            forbid_waiting(llm)
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
            said.append([[branch.token_ids for branch in output.outputs] for output in outputs])
    assert all(one == said[0] for one in said)


GRAPH_WISHES: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    {"logit_bias": {3: 2.0, 0: 1.0}},
    {"allowed_token_ids": list(range(10, 60)), "top_p": 0.9},
    {"bad_words": [*(str(i) for i in range(20, 40)), *(f"{i} {i}" for i in range(40, 52))]},
    {"min_tokens": 6, "stop_token_ids": list(range(16))},
    {"frequency_penalty": 0.3, "bad_words": ["7", "8 9"], "top_k": 30},
    {},
]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_heads_that_do_more_are_graphs_and_change_nothing(
    checkpoint: tuple[Any, Path], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many requests as rows, so that rows get other tenants. Lists are as long as tables of graphs can be."""
    words = lambda _, params: tuple(tuple(map(int, word.split())) for word in params.bad_words or ())  # noqa: E731
    monkeypatch.setattr(ExtrasBuilder, "_bad_words", words)
    rng = np.random.default_rng(3)
    texts = [{"prompt_token_ids": rng.integers(2, 96, int(n)).tolist()} for n in rng.integers(1, 60, 48)]
    wishes = [GRAPH_WISHES[i % len(GRAPH_WISHES)] for i in range(48)]
    wishes[40] = {"logit_bias": {token: 0.1 for token in range(50)}}
    # No graph has log-probabilities of more than eight rows, or of named tokens: they come late.
    for i in range(24, 48, 2):
        wishes[i] = {**wishes[i], "logprobs": i % 21}
    wishes[41] = {"logprob_token_ids": list(range(9))}
    wishes[47] = {"logprob_token_ids": [4, 5], "temperature": 0}
    params = [
        SamplingParams(**{"seed": i, "max_tokens": 8 + i % 17, "ignore_eos": True, **wish})
        for i, wish in enumerate(wishes)
    ]
    said: list[Any] = []
    for settings in ({}, {"enforce_eager": True}):
        limits = {"max_num_seqs": 24, "max_num_batched_tokens": 512, "logprobs_mode": mode}
        with make(checkpoint[1], **limits, **settings) as llm:
            run(llm, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            runner = llm.llm_engine.client.core.executor.runner  # type: ignore[attr-defined]
            launched = count_calls(runner, "_sample_eagerly")
            forbid_waiting(llm)
            said.append([branch for each in llm.generate(texts, params, use_tqdm=False) for branch in each.outputs])
            if runner.graphs is not None:
                stats = runner.graphs.stats
                assert launched, "log-probabilities of more than eight rows, and of named tokens"
                assert stats.heads["stages"] > 5 and stats.heads["filters"] > 5 and not stats.stale_heads
    graph, eager = said
    assert [branch.token_ids for branch in graph] == [branch.token_ids for branch in eager]
    found, wanted = ([entry for branch in way for entry in branch.logprobs or ()] for way in (graph, eager))
    assert [len(entry) for entry in found] == [len(entry) for entry in wanted]
    values = [[each.logprob for entry in way for each in entry.values()] for way in (found, wanted)]
    np.testing.assert_allclose(*values, atol=1e-4)
    places = [[(token, each.rank) for entry in way for token, each in entry.items()] for way in (found, wanted)]
    differ = sum(one != other for one, other in zip(*places, strict=True))
    assert len(places[0]) > 1000 and differ <= 4, "neighbours may be equally likely, but not many are"


def count_calls(owner: Any, name: str) -> list[int]:
    """Grows by one with each call."""
    calls: list[int] = []
    real = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    setattr(owner, name, counted)
    return calls


def test_closing_frees_the_device(checkpoint: tuple[Any, Path]) -> None:
    left = []
    for _ in range(3):  # the first leaves the math library's workspaces behind
        with make(checkpoint[1]) as llm:
            run(llm, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            running = torch.cuda.memory_allocated()
        left.append(torch.cuda.memory_allocated())
        assert running > left[-1] + (10 << 20)
    assert left[2] - left[0] < 1 << 20


def test_beginning_with_the_longest_changes_nothing(checkpoint: tuple[Any, Path]) -> None:
    rng = np.random.default_rng(2)
    texts = [{"prompt_token_ids": rng.integers(2, 96, int(n)).tolist()} for n in rng.integers(1, 100, 200)]
    # steps get smaller, through several graphs
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in rng.integers(12, 28, 200)]
    said, taken = [], []
    for settings in ({}, {"enforce_eager": True}):
        with make(checkpoint[1], **settings) as llm:
            said.append([output.outputs[0].token_ids for output in llm.generate(texts, params, use_tqdm=False)])
            graphs = llm.llm_engine.client.core.executor.runner.graphs  # type: ignore[attr-defined]
            taken.append(graphs.stats.ordered_steps if graphs is not None else 0)
    assert said[0] == said[1]
    assert taken[0] >= 8 and taken[1] == 0


@pytest.mark.parametrize("all_share", [True, False])
def test_shared_prefixes_are_read_once_and_change_nothing(checkpoint: tuple[Any, Path], all_share: bool) -> None:
    hf, path = checkpoint
    rng = np.random.default_rng(1)
    # all share a stem; or some do, others share another one, and the rest shares nothing
    stems = [rng.integers(2, 96, n).tolist() for n in (2048, 2304, 100)]
    kinds = [0] * 40 if all_share else [i % 5 // 2 for i in range(80)]
    ends = rng.integers(1, 70, len(kinds))
    texts = [stems[kind] + rng.integers(2, 96, int(n)).tolist() for kind, n in zip(kinds, ends, strict=True)]
    for i in np.flatnonzero(np.array(kinds) == 2):
        texts[i][0] = 2 + int(i)
    prompts = [{"prompt_token_ids": text} for text in texts]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    said, taken = [], []
    for settings in (WAYS["graphs"], WAYS["eager"], WAYS["torch"]):
        with make(path, max_model_len=4096, hf_overrides={"max_position_embeddings": 4096}, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            said.append([output.outputs[0].token_ids for output in outputs])
            graphs = llm.llm_engine.client.core.executor.runner.graphs  # type: ignore[attr-defined]
            taken.append(graphs.stats.shared_prefix_steps if graphs is not None else 0)
    assert said[0] == said[1] == said[2]
    sees_all = getattr(hf.config, "sliding_window", None) is None  # a window forgets the prefix
    assert (taken[0] >= 10) == sees_all and taken[1:] == [0, 0]


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_an_eight_bit_cache_is_read_alike_in_every_way(checkpoint: tuple[Any, Path], kind: str) -> None:
    """Graphs decode a text; every way scores it as a prompt."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    with make(checkpoint[1], kv_cache_dtype=kind) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
        graphs = llm.llm_engine.client.core.executor.runner.graphs  # type: ignore[attr-defined]
        assert graphs.stats.replays > 20
    texts = [{"prompt_token_ids": p + o.outputs[0].token_ids} for p, o in zip(prompts(), outputs, strict=True)]
    decoded = [value(entry) for output in outputs for entry in output.outputs[0].logprobs]
    for way in ("graphs", "eager", "torch"):
        with make(checkpoint[1], kv_cache_dtype=kind, **WAYS[way]) as llm:
            scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        again = [value(entry) for output in scored for entry in output.prompt_logprobs[-24:]]
        # a key that is computed a little otherwise may round to a neighbour
        assert np.abs(np.array(again) - decoded).mean() < 0.02, way


def value(entry: dict[int, Any]) -> float:
    return float(next(iter(entry.values())).logprob)


@pytest.mark.parametrize("way", ["graphs", "eager", "torch"])
def test_logits_that_are_not_numbers_end_their_request_alone(way: str, tmp_path: Path) -> None:
    hf = make_hf_model("qwen3", hidden_size=64, num_attention_heads=4, head_dim=16, tie_word_embeddings=False)
    bad = 7  # its embedding becomes NaN, so every prompt with it fails
    texts = [[token for token in prompt if token != bad] or [1] for prompt in prompts()]
    ways = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1, top_p=0.9, seed=4, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.1, max_tokens=24, ignore_eos=True),
    ]
    params = [ways[i % len(ways)] for i in range(len(texts))]
    with make(save(hf, tmp_path), **WAYS[way]) as llm:
        alone = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
        model: Any = llm.llm_engine.client.core.executor.model  # type: ignore[attr-defined]
        model.embedding.weight.data[bad] = torch.nan
        mixed = [{"prompt_token_ids": [*text, bad]} for text in texts] + [{"prompt_token_ids": text} for text in texts]
        found = llm.generate(mixed, params + params, use_tqdm=False)
    assert {output.outputs[0].finish_reason for output in found[: len(texts)]} == {"error"}
    assert "NaN" in str(found[0].outputs[0].stop_reason)
    for one, other in zip(alone, found[len(texts) :], strict=True):
        said = other.outputs[0].token_ids
        assert other.outputs[0].finish_reason in ("length", "error")
        # what it generates may be the bad token itself, which ends it one token later
        assert said == one.outputs[0].token_ids[: len(said)] and (len(said) == 24 or said[-1] == bad)
