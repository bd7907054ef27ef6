"""Beam search through the engine equals transformers'; diverse search equals a plain reference written here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import LLM, BeamSearchParams, SamplingParams
from kvasir.errors import RequestError
from kvasir.sampling_params import RequestOutputKind
from tests.engine_builders import SMALL, TIGHT, Model, generate, metric
from tests.pairwise import few


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("llama")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=1024)


def theirs(
    model: Model, prompt: list[int], width: int, count: int, eos: list[int], **options: Any
) -> list[tuple[list[int], float]]:
    with torch.inference_mode():
        found = model.hf.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    texts = []
    for line, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        text = line[len(prompt) :]
        ends = [i for i, token in enumerate(text) if token in eos]
        texts.append((text[: ends[0] + 1] if ends else text, score))
    return texts


def ends(model: Model, prompt: list[int]) -> list[int]:
    """Tokens that beams of this prompt do come upon, some early and some late, to be used as end tokens."""
    texts = [text for text, _ in theirs(model, prompt, 4, 12, [])]
    return sorted({texts[0][2], texts[1][6], texts[3][4]})


def search(width: int, count: int, eos: list[int], **options: Any) -> SamplingParams:
    return SamplingParams(
        n=width, use_beam_search=True, temperature=0, max_tokens=count, ignore_eos=True, stop_token_ids=eos, **options
    )


def check(output: Any, wanted: list[tuple[list[int], float]], length_penalty: float) -> None:
    assert [text.token_ids for text in output.outputs] == [text for text, _ in wanted]
    for text, (_, score) in zip(output.outputs, wanted, strict=True):
        got = text.cumulative_logprob / len(text.token_ids) ** length_penalty
        assert math.isclose(got, score, abs_tol=2e-4), f"{got} is not {score}"


@pytest.mark.parametrize(
    ("width", "stops"),
    few([(width, stops) for stops in (False, True) for width in range(2, 9)], fast=[(4, True)]),
)
def test_tokens_and_scores_equal_transformers(model: Model, width: int, stops: bool) -> None:
    num_ended = 0
    with model.llm(block_size=4, async_scheduling=True) as llm:
        for prompt, count in zip(model.prompts[:3], (1, 7, 20), strict=True):
            eos = ends(model, prompt) if stops else []
            for length_penalty in (1.0, 0.0, -0.5, 2.0):
                for early in (False, True, "never"):
                    options = {"length_penalty": length_penalty, "early_stopping": early}
                    (output,) = generate(llm, [prompt], search(width, count, eos, **options))
                    check(output, theirs(model, prompt, width, count, eos, **options), length_penalty)
                    num_ended += sum(text.finish_reason == "stop" for text in output.outputs)
        assert metric(llm, "kv_cache_blocks_used") == 0
    assert (num_ended > 20) == stops


def test_one_beam_is_greedy(model: Model) -> None:
    with model.llm() as llm:
        (output,) = llm.beam_search({"prompt_token_ids": model.prompts[0]}, BeamSearchParams(1, 12, ignore_eos=True))
    text = output.sequences[0].tokens
    assert text == model.prompts[0] + model.greedy(model.prompts[0], 12)
    wanted = model.logprobs(text)
    total = sum(float(wanted[at - 1, text[at]]) for at in range(len(text) - 12, len(text)))
    assert math.isclose(output.sequences[0].score, total / 12, abs_tol=1e-4)


def test_sequences_are_vllms(model: Model) -> None:
    prompt = model.prompts[1]
    eos = ends(model, prompt)
    wanted = theirs(model, prompt, 4, 12, eos, length_penalty=0.7)
    assert any(text[-1] in eos for text, _ in wanted), "the case is about ends"
    for include in (True, False):
        params = BeamSearchParams(4, 12, length_penalty=0.7, include_stop_str_in_output=include)
        with model.llm(override_generation_config={"eos_token_id": eos}) as llm:
            (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
        for sequence, (text, score) in zip(output.sequences, wanted, strict=True):
            cut = text if include or text[-1] not in eos else text[:-1]
            assert sequence.tokens == prompt + cut
            assert math.isclose(sequence.score, score, abs_tol=2e-4)
            assert sequence.finish_reason == ("stop" if text[-1] in eos else "length")


@pytest.mark.parametrize(
    "settings",
    few(
        [{}, SMALL, {**TIGHT, "max_num_seqs": 9}, {"enable_prefix_caching": False}],
        fast=[{}, {**TIGHT, "max_num_seqs": 9}],
    ),
    ids=str,
)
def test_searches_and_samples_in_one_batch(model: Model, settings: dict[str, Any]) -> None:
    """Many searches at once, among ordinary requests, with chunks and preemption: the texts of running alone."""
    params = [
        search(2 + i % 4, 9, ends(model, model.prompts[i]) if i % 3 else [])
        if i % 2
        else SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for i in range(16)
    ]
    with model.llm(**settings, async_scheduling=True) as llm:
        outputs = generate(llm, model.prompts, params)
        assert metric(llm, "kv_cache_blocks_used") == 0
        if "num_gpu_blocks_override" in settings:
            assert metric(llm, "num_preemptions") > 0
    for i, (prompt, output) in enumerate(zip(model.prompts, outputs, strict=True)):
        if i % 2:
            check(output, theirs(model, prompt, 2 + i % 4, 9, ends(model, prompt) if i % 3 else []), 1.0)
        else:
            assert output.outputs[0].token_ids == model.greedy(prompt, 20)


def test_eight_beams_hold_a_long_prompt_once(long_model: Model) -> None:
    prompt = np.random.default_rng(1).integers(2, 96, 512).tolist()
    with long_model.llm(max_model_len=600, block_size=16, enable_prefix_caching=False) as llm:
        engine = llm.llm_engine
        engine.add_request("a", {"prompt_token_ids": prompt}, search(8, 24, []))
        most = 0.0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            most = max(most, metric(llm, "kv_cache_blocks_used"))
        assert metric(llm, "kv_block_copies") > 0, "beams parted in the middle of a block"
        assert metric(llm, "kv_block_shares") > 7 * 32
        assert metric(llm, "iteration_tokens") == 512 + 8 * 23, "the prompt was computed once"
    assert 32 + 8 <= most <= 32 + 8 * 2, "the prompt's 32 blocks are held once"
    check(outputs[-1], theirs(long_model, prompt, 8, 24, []), 1.0)


# ---------------------------------------------------------------- diverse


def diverse(
    model: Model, prompt: list[int], groups: int, width: int, count: int, eos: list[int], penalty: float
) -> list[list[int]]:
    """Diverse beam search over whole distributions, written as in the paper; length penalty 1, early stopping."""

    def logprobs(said: tuple[int, ...]) -> np.ndarray:
        return model.logprobs([*prompt, *said])[-1].numpy()

    beams: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())] for _ in range(groups)]
    done: list[list[tuple[float, tuple[int, ...]]]] = [[] for _ in range(groups)]
    for length in range(1, count + 1):
        taken: Counter[int] = Counter()
        for g in range(groups):
            if len(done[g]) >= width:
                continue
            found = []
            for score, said in beams[g]:
                row = logprobs(said)
                for token in range(96):
                    found.append((score + row[token] - penalty * taken[token], (*said, token)))
            found.sort(key=lambda pair: -pair[0])
            ending = [p for p in found[:width] if p[1][-1] in eos or length == count]
            done[g] += [(score / length, said) for score, said in ending]
            done[g] = sorted(done[g], key=lambda pair: -pair[0])[:width]
            beams[g] = [p for p in found if p[1][-1] not in eos][:width]
            if len(done[g]) < width:
                taken.update(said[-1] for _, said in beams[g])
    return [list(said) for _, said in sorted(chain(*done), key=lambda pair: -pair[0])]


DIVERSE = [(2, 1, False), (2, 2, True), (3, 2, False), (4, 2, True), (4, 1, True)]


@pytest.mark.parametrize(
    ("groups", "width", "stops"),
    few(DIVERSE, fast=[(2, 1, False), (4, 2, True)]),
)
def test_diverse_search_equals_a_plain_one(model: Model, groups: int, width: int, stops: bool) -> None:
    prompt = model.prompts[3]
    eos = ends(model, prompt) if stops else []
    options = {"num_beam_groups": groups, "early_stopping": True}
    with model.llm(async_scheduling=True) as llm:
        texts = {}
        for penalty in (0.0, 0.8, 3.0):
            (output,) = generate(llm, [prompt], search(groups * width, 6, eos, diversity_penalty=penalty, **options))
            texts[penalty] = [text.token_ids for text in output.outputs]
            wanted = diverse(model, prompt, groups, width, 6, eos, penalty)
            # texts of equal groups have equal scores: their order is no one's
            assert Counter(map(tuple, texts[penalty])) == Counter(map(tuple, wanted))
    assert len({tuple(text) for text in texts[3.0]}) > len({tuple(text) for text in texts[0.0]})


# ---------------------------------------------------------------- streams, ends


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_the_best_beam_is_streamed(model: Model, kind: RequestOutputKind) -> None:
    prompt = model.prompts[0]
    with model.llm() as llm:
        engine = llm.llm_engine
        engine.add_request("a", {"prompt_token_ids": prompt}, search(4, 16, [], output_kind=kind))
        pieces: list[list[int]] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                pieces.append(output.outputs[0].token_ids)
    ((wanted, _), *others) = theirs(model, prompt, 4, 16, [])
    assert (list(chain(*pieces)) if kind is RequestOutputKind.DELTA else pieces[-1]) == wanted
    assert len(pieces) > (1 if kind is RequestOutputKind.DELTA else 14)
    assert [text.token_ids for text in output.outputs[1:]] == [text for text, _ in others]


def test_abort_ends_a_search_and_lets_the_next_begin(model: Model) -> None:
    with model.llm(max_num_seqs=6) as llm:
        engine = llm.llm_engine
        for name in ("a", "b", "c"):
            engine.add_request(name, {"prompt_token_ids": model.prompts[0]}, search(4, 40, []))
        for _ in range(6):
            engine.step()
        assert metric(llm, "num_requests_running") == 4, "two searches of four beams do not fit six rows"
        ended = engine.abort_request(["a", "c"])
        assert [output.outputs[0].finish_reason for output in ended] == ["abort", "abort"]
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].request_id == "b"
        assert metric(llm, "kv_cache_blocks_used") == 0


@pytest.fixture(scope="module")
def eight_rows(model: Model) -> Iterator[LLM]:
    with model.llm(max_num_seqs=8) as llm:
        yield llm


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: search(4, 8, [], logprobs=2), "logprobs"),
        (lambda: search(4, 8, [], stop="x"), "stop"),
        (lambda: search(4, 8, [], presence_penalty=1.0), "presence_penalty"),
        (lambda: search(4, 8, [], num_beam_groups=3), "num_beam_groups"),
        (lambda: search(4, 8, [], early_stopping="maybe"), "early_stopping"),
        (lambda: search(9, 8, []), "beam_width"),
        (lambda: SamplingParams(length_penalty=2.0), "length_penalty"),
        (lambda: BeamSearchParams(2, 4, temperature=0.5).to_sampling_params(), "temperature"),
        (lambda: BeamSearchParams(2, 4, structured_outputs={"json": {}}).to_sampling_params(), "structured_outputs"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(
    model: Model, eight_rows: LLM, make: Callable[[], SamplingParams], said: str
) -> None:
    with pytest.raises(RequestError) as error:
        generate(eight_rows, [model.prompts[0]], make())
    assert error.value.parameter == said
