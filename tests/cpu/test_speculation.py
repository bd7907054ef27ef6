"""Speculative decoding: with drafts and without, the text is the same, whatever is drafted and whatever is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

from kvasir import LLM, SamplingParams
from kvasir.config.speculative import SpeculativeConfig
from kvasir.engine.draft_lengths import DraftLengths
from kvasir.kernels import reference
from kvasir.outputs import RequestOutput
from kvasir.sampling.features import SampledRows
from kvasir.worker.speculative.device import RowLines, Speculation
from kvasir.worker.speculative.drafter import Drafter, DrafterSettings, DraftRows, TokensTaken, make_draft_rows
from kvasir.worker.speculative.lookup import LookupDrafter
from tests.engine_builders import SMALL, TIGHT, Model, generate, metric, tokens
from tests.model_builders import save
from tests.pairwise import few

VOCAB = 96
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 5}


class Guesser(Drafter):
    """Drafts the right token about half of the time where the text repeats, and nonsense elsewhere. It drafts for
    every row in every step, so that every length of accepted drafts occurs. A drafter from outside the package."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self.last = torch.zeros(self.max_rows, 2, dtype=torch.int32)

    def learn(self, taken: TokensTaken) -> None:
        for row, own, count in zip(taken.rows.tolist(), taken.tokens, taken.counts.tolist(), strict=True):
            for token in own[:count].clamp(min=0):
                self.last[row] = torch.stack([self.last[row, 1], token])

    def propose(self, taken: TokensTaken, drafts: DraftRows) -> None:
        drafts.counts[taken.rows] = self.num_drafts
        drafts.tokens[taken.rows] = self.last[taken.rows].repeat(1, self.num_drafts)[:, : self.num_drafts]


DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3}  # and the model's path
GUESS = {"method": "tests.cpu.test_speculation:Guesser", "num_speculative_tokens": 4}
LOOKUP = {"method": "lookup", "num_speculative_tokens": 4}
DRAFTERS = {"ngram": NGRAM, "suffix": SUFFIX, "lookup": LOOKUP, "plugin": GUESS, "draft_model": DRAFT_MODEL}


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("qwen3")


@pytest.fixture(scope="module")
def engines(model: Model, request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """Engines in which requests are chunked and preempted, made once each."""

    @cache
    def engine(name: str | None = None, **more: Any) -> LLM:
        drafting: dict[str, Any] = {}
        if name is not None:
            drafting = {"speculative_config": {**DRAFTERS[name], "adaptive": False}}
        if name == "draft_model":
            drafting["speculative_config"]["model"] = request.getfixturevalue("drafting_model").path
        return model.llm(**{**TIGHT, **drafting, **more})

    yield engine
    engine.cache_clear()


def repetitive(seed: int, count: int = 8, longest: int = 50) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(2, VOCAB, int(n)).tolist() for n in rng.integers(1, 6, count)]
    return [(part * 20)[: int(rng.integers(1, longest))] for part in parts]


def plain(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs]


def scores(output: RequestOutput) -> list[float]:
    """All log-probabilities of a request, in order of tokens and ids."""
    lists = [each.logprobs for each in output.outputs if each.logprobs] + [output.prompt_logprobs or []]
    return [entry.logprob for found in lists for line in found if line for _, entry in sorted(line.items())]


def assert_same(got: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert plain(one) == plain(other)
        assert scores(one) == pytest.approx(scores(other), abs=1e-4)


# ---------------------------------------------------------------- the text stays the same


@pytest.mark.parametrize(("name", "ahead"), few([(n, a) for n in DRAFTERS for a in (False, True)], fast=[]))
def test_greedy_text_is_transformers_own(model: Model, engines: Callable[..., LLM], name: str, ahead: bool) -> None:
    llm = engines(name, async_scheduling=ahead)
    before = metric(llm, "spec_decode_num_accepted_tokens")
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    assert tokens(generate(llm, model.prompts, params)) == [model.greedy(prompt) for prompt in model.prompts]
    assert metric(llm, "num_preemptions") > 0
    assert metric(llm, "spec_decode_num_accepted_tokens") > before
    assert metric(llm, "spec_decode_num_draft_tokens") >= metric(llm, "spec_decode_num_accepted_tokens")


EVERYTHING = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "seed": 5, "logprobs": 3},
    {"temperature": 1.2, "min_p": 0.02, "seed": 6, "n": 2},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0.8, "frequency_penalty": 0.5, "seed": 8, "logprobs": 1, "prompt_logprobs": 2},
    {"logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 6, "stop_token_ids": [7, 11, 30]},
    {"temperature": 0.9, "top_ema_p": 0.3, "top_ema_d": 4, "seed": 12},
    {"allowed_token_ids": list(range(4, 24)), "stop_token_ids": [9]},
    {"temperature": 0.5, "forbidden_token_ids": [3, 4, 5], "seed": 2},
    {"temperature": 1.0, "seed": 77, "logprob_token_ids": [4, 8]},
)


def mixed(seed: int, count: int, **more: Any) -> list[SamplingParams]:
    rng = np.random.default_rng(seed)
    chosen = [EVERYTHING[int(i)] for i in rng.permutation(len(EVERYTHING))][:count]
    lengths = rng.integers(1, 40, count)
    base = {"temperature": 0.0, "ignore_eos": True, **more}
    return [SamplingParams(**{**base, "max_tokens": max(int(n), each.get("min_tokens", 1)), **each})
            for n, each in zip(lengths, chosen, strict=True)]  # fmt: skip


def check_mixed(engines: Callable[..., LLM], name: str, ahead: bool, seed: int) -> None:
    prompts, params = repetitive(seed), mixed(seed, 8)
    drafting = engines(name, async_scheduling=ahead)
    assert_same(generate(drafting, prompts, params), generate(engines(), prompts, params))


def test_every_parameter_mixed_gives_the_same_text(engines: Callable[..., LLM]) -> None:
    check_mixed(engines, "suffix", True, 11)


@pytest.mark.slow
@settings(max_examples=max(5, settings().max_examples // 20 if settings().max_examples < 2000 else 2000))
@given(seed=st.integers(0, 2**30), name=st.sampled_from(list(DRAFTERS)), ahead=st.booleans())
def test_every_parameter_mixed_gives_the_same_text_often(
    engines: Callable[..., LLM], seed: int, name: str, ahead: bool
) -> None:
    check_mixed(engines, name, ahead, seed)


@pytest.mark.slow
def test_several_processes_say_what_one_says(model: Model, engines: Callable[..., LLM]) -> None:
    prompts, params = repetitive(3), mixed(3, 8)
    with model.llm(**TIGHT, tensor_parallel_size=2, speculative_config={**SUFFIX, "adaptive": False}) as llm:
        assert_same(generate(llm, prompts, params), generate(engines(), prompts, params))
        assert metric(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.slow
def test_swapped_requests_resume_with_the_same_text(model: Model, engines: Callable[..., LLM]) -> None:
    llm = engines("suffix", swap_space=0.01, preemption_mode="swap")
    prompts, params = model.prompts, SamplingParams(temperature=0.8, seed=4, max_tokens=24, ignore_eos=True)
    assert_same(generate(llm, prompts, params), generate(engines(), prompts, params))
    assert metric(llm, "num_preemptions_swapped") > 0


@pytest.mark.slow
def test_layers_with_windows_keep_what_drafts_need(models: Callable[[str], Model]) -> None:
    other = models("gemma3")
    prompts, params = repetitive(9, longest=60), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    drafting = {**SUFFIX, "adaptive": False}
    with (
        other.llm(**other.tight()) as plain_llm,
        other.llm(**other.tight(), speculative_config=drafting, async_scheduling=True) as llm,
    ):
        assert tokens(generate(llm, prompts, params)) == tokens(generate(plain_llm, prompts, params))
        assert metric(llm, "kv_blocks_freed_by_window") > 0 < metric(llm, "spec_decode_num_accepted_tokens")


@pytest.mark.slow
def test_drafts_of_changing_numbers_leave_the_text_as_it_is(model: Model, engines: Callable[..., LLM]) -> None:
    llm = model.llm(**TIGHT, speculative_config={**SUFFIX, "adaptive": True}, async_scheduling=True)
    prompts, params = repetitive(11), mixed(11, 8)
    assert_same(generate(llm, prompts, params), generate(engines(), prompts, params))


def test_fewer_drafts_for_the_next_step_lose_no_token_of_this_one(
    model: Model, engines: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of drafts changes before the tokens of the step are taken in, also in an engine with beam searches."""
    rng = np.random.default_rng(0)

    def choose(self: DraftLengths, rows: np.ndarray[Any, Any], tried: np.ndarray[Any, Any]) -> None:
        state = self._scheduler.rows
        rows = rows[state.most_drafts[rows] > 0]
        state.max_new[rows] = 1 + rng.integers(0, 3, len(rows))
        state.num_drafts[rows] = np.minimum(state.num_drafts[rows], state.max_new[rows] - 1)

    monkeypatch.setattr(DraftLengths, "_choose", choose)
    llm = model.llm(**TIGHT, speculative_config={**SUFFIX, "adaptive": True})
    generate(llm, [[5, 6]], SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=2, ignore_eos=True))
    prompts, params = repetitive(3), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert_same(generate(llm, prompts, params), generate(engines(), prompts, params))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.slow
def test_synthetic_acceptance_is_the_rate_that_was_asked_for(model: Model) -> None:
    drafting = {**GUESS, "adaptive": False, "synthetic_acceptance_rate": 0.5}
    llm = model.llm(**SMALL, speculative_config=drafting)
    generate(llm, model.prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    per_step = metric(llm, "spec_decode_num_accepted_tokens") / metric(llm, "spec_decode_num_drafts")
    assert per_step == pytest.approx(0.5 + 0.25 + 0.125 + 0.0625, abs=0.25)


# ---------------------------------------------------------------- the law of the text


@pytest.mark.parametrize("count", few([60_000, 500_000], fast=[60_000]))
def test_the_joint_law_of_four_tokens_is_the_models_own(count: int) -> None:
    """Four positions with four tokens each, drawn by the sampler and verified against wrong and right drafts: every
    text is as likely as the chain of the model's probabilities says. 500,000 texts are two million draws."""
    size, rng = 4, np.random.default_rng(0)
    tables = torch.from_numpy(rng.normal(size=(4, size, size)).astype(np.float32))  # logits by position and last token
    state = SimpleNamespace(
        num_computed=torch.zeros(count + 1, dtype=torch.int32),
        next_token=torch.zeros(count + 1, dtype=torch.int32),
        drafts=make_draft_rows(count + 1, 3, torch.device("cpu")),
    )
    settings = DrafterSettings(SpeculativeConfig("ngram", 3), 1, 16, torch.device("cpu"))
    speculation = Speculation(LookupDrafter(settings), state)
    rows = torch.arange(count)
    seeds = torch.from_numpy(rng.integers(-(2**31), 2**31, count + 1).astype(np.int32))
    heat = torch.full((count + 1,), 0.8)
    drafts = torch.from_numpy(rng.integers(0, size, (count, 3)).astype(np.int32))
    state.drafts.tokens[:count], state.drafts.counts[:count] = drafts, 3
    text = torch.full((count, 4), -1, dtype=torch.int32)
    known = torch.zeros(count, dtype=torch.int32)
    while bool((known < 4).any()):
        # each line follows the text so far, or the drafts before it
        believed = torch.cat([text, torch.zeros(count, 1, dtype=torch.int32)], dim=1)
        for column in range(3):
            place = known + 1 + column
            fits = place <= 4
            believed[rows[fits], place[fits].long() - 1] = torch.where(
                text[rows[fits], (place[fits] - 1).clamp(max=3).long()] >= 0,
                text[rows[fits], (place[fits] - 1).clamp(max=3).long()],
                drafts[fits, column],
            )
        columns = torch.arange(4)
        position = (known[:, None] + columns).clamp(max=3).long()
        before = torch.where(position > 0, believed.gather(1, (position - 1).clamp(min=0)), 0).long()
        logits = tables[position, before].reshape(-1, size)
        drawn = reference.draw(
            logits,
            rows.repeat_interleave(4),
            position.reshape(-1),
            heat,
            seeds,
            torch.zeros(count + 1, dtype=torch.int32),
        )
        lines = RowLines(rows, torch.arange(count, dtype=torch.int32) * 4, torch.full((count,), 4, dtype=torch.int32),
                         known + 4)  # fmt: skip
        taken = speculation._accept(drawn, lines, SampledRows(rows.numpy(), rows, rows))
        for column in range(4):
            fits = (column < taken.counts) & (known + column < 4)
            text[rows[fits], (known + column)[fits].long()] = taken.tokens[fits, column]
        known = known + taken.counts
        drafts = torch.from_numpy(rng.integers(0, size, (count, 3)).astype(np.int32))
        state.drafts.tokens[:count] = drafts
    chances = torch.ones(1, dtype=torch.float64)
    last = torch.zeros(1, dtype=torch.long)
    for position in range(4):
        step = torch.softmax(tables[position, last].double() / 0.8, dim=-1)
        chances, last = (chances[:, None] * step).reshape(-1), torch.arange(size).repeat(len(last))
    found = torch.bincount((text.long() * torch.tensor([64, 16, 4, 1])).sum(dim=1), minlength=256).double()
    statistic = float(((found - count * chances) ** 2 / (count * chances)).sum())
    assert statistic < 255 + 5 * (2 * 255) ** 0.5, "chi-square of 255 degrees of freedom"


# ---------------------------------------------------------------- lookup


def test_lookup_drafts_what_transformers_drafts() -> None:
    """With the settings of `prompt_lookup_num_tokens`: matches of up to `max_matching_ngram_size`, the earliest."""
    rng, drafts = np.random.default_rng(1), 5
    for _ in range(60):
        longest, text = int(rng.integers(1, 5)), rng.integers(0, 6, int(rng.integers(2, 60)))
        finder = PromptLookupCandidateGenerator(
            num_output_tokens=drafts, max_matching_ngram_size=longest, max_length=1000
        )
        wanted = finder.get_candidates(torch.from_numpy(text)[None])[0][0, len(text) :].tolist()
        history = torch.from_numpy(text.astype(np.int32))[None]
        found, counts = torch.zeros(1, drafts, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        length = torch.tensor([len(text)], dtype=torch.int32)
        reference.lookup_drafts(history, torch.tensor([0]), length, found, counts, 1, longest, False)
        assert found[0, : int(counts)].tolist() == wanted


# ---------------------------------------------------------------- the draft model


@pytest.fixture(scope="module")
def drafting_model(models: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model that often agrees with `model`: the same one with small changes to its weights."""
    other = Model("qwen3", tmp_path_factory.mktemp("draft"))
    with torch.no_grad():
        for weight in other.hf.parameters():
            weight += 0.03 * weight.abs().mean() * torch.randn_like(weight)
    other.path = str(save(other.hf, tmp_path_factory.mktemp("changed")))
    return other


def assisted(
    monkeypatch: pytest.MonkeyPatch, model: Model, draft: Model, prompt: list[int], count: int, drafts: int
) -> tuple[int, int]:
    """Steps and accepted drafts of transformers' assisted generation. The first token comes without drafts, as here."""
    found: list[int] = []
    update = AssistedCandidateGenerator.update_candidate_strategy

    def watched(self: Any, ids: Any, scores: Any, num_matches: int) -> None:
        found.append(int(num_matches))
        update(self, ids, scores, num_matches)

    options = draft.hf.generation_config
    options.num_assistant_tokens, options.num_assistant_tokens_schedule = drafts, "constant"
    options.assistant_confidence_threshold = 0.0
    said = model.greedy(prompt, count)
    with monkeypatch.context() as patch:
        patch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", watched)
        ids = torch.tensor([[*prompt, said[0]]])
        own: Any = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "assistant_model": draft.hf}
        text = model.hf.generate(ids, max_new_tokens=count - 1, **own)
    assert text[0, len(prompt) :].tolist() == said
    return len(found), sum(found)


@pytest.mark.slow
def test_a_draft_model_is_accepted_as_often_as_in_transformers(
    model: Model, drafting_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = {"model": drafting_model.path, "num_speculative_tokens": 3, "adaptive": False}
    llm = model.llm(**SMALL, speculative_config=drafting, max_model_len=128)
    prompts, params = model.prompts[:4], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    wanted = [assisted(monkeypatch, model, drafting_model, prompt, 24, 3) for prompt in prompts]
    assert tokens(generate(llm, prompts, params)) == [model.greedy(prompt, 24) for prompt in prompts]
    assert metric(llm, "spec_decode_num_accepted_tokens") == sum(accepted for _, accepted in wanted)
    assert sum(accepted for _, accepted in wanted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_model_changes_no_text_when_requests_are_preempted(
    model: Model, drafting_model: Model, engines: Callable[..., LLM], ahead: bool
) -> None:
    drafting = {**DRAFT_MODEL, "model": drafting_model.path}
    llm = model.llm(**TIGHT, speculative_config=drafting, async_scheduling=ahead)
    prompts, params = repetitive(4), mixed(4, 8)
    assert_same(generate(llm, prompts, params), generate(engines(), prompts, params))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0
