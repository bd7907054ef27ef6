from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config.engine import EngineConfig, ModelConfig
from kvasir.errors import RequestError
from kvasir.frontend.requests.input import InputProcessor, process_all
from kvasir.frontend.requests.output import OutputProcessor, StopAbort
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.messages import LOGPROBS, EngineOutput, Finished, FinishReason, Part, Started
from kvasir.outputs import RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
EOS = 2


class Frontend:
    """An input and an output processor with a core that says what the test wants."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        settled: dict[str, Any] = {"max_model_len": 4096, "vocab_size": 400, "generation": {"eos_token_id": EOS}}
        self.input = InputProcessor(EngineConfig(model=ModelConfig(model="m", **settled)), tokenizer)
        self.output = OutputProcessor(tokenizer)
        self.time = count(100)
        self.streams: dict[int, bool] = {}

    def add(self, key: int = 0, prompt: list[int] | None = None, **params: Any) -> None:
        prompt = prompt or [WORD["wo"]]
        request, state = self.input.process(f"r{key}", prompt, SamplingParams(**params), key, 50.0)
        self.output.add(state)
        self.streams[key] = request.stream

    def start(self, key: int = 0, waited: float = 0.0, cached: int = 0) -> None:
        output = EngineOutput.empty()
        output.started = [Started(key, waited, cached)]
        assert self.output.process(output, float(next(self.time))) == ([], [])

    def step(
        self, tokens: dict[int, list[int]], *finished: Finished, logprobs: Part | None = None
    ) -> tuple[list[RequestOutput], list[StopAbort]]:
        width = max(map(len, tokens.values()), default=1)
        lines = [line + [-1] * (width - len(line)) for line in tokens.values()]
        output = EngineOutput(
            np.array(list(tokens), np.int64),
            np.array(lines, np.int32).reshape(len(lines), width),
            np.array([len(line) for line in tokens.values()], np.int32),
            {} if logprobs is None else {LOGPROBS: logprobs},
            list(finished),
        )
        return self.output.process(output, float(next(self.time)))

    def one(self, tokens: list[int], *finished: Finished, logprobs: Part | None = None) -> RequestOutput:
        """A step of request 0 alone, which gives exactly one output and no abort."""
        [output], aborts = self.step({0: tokens}, *finished, logprobs=logprobs)
        assert aborts == []
        return output


WORD: dict[str, int] = {}


@pytest.fixture(autouse=True)
def words(sentencepiece: Tokenizer) -> None:
    WORD.update({token.replace("▁", " "): i for token, i in sentencepiece.get_vocab().items()})


@pytest.fixture
def frontend(sentencepiece: Tokenizer) -> Frontend:
    return Frontend(sentencepiece)


def end(
    key: int = 0,
    reason: FinishReason = FinishReason.LENGTH,
    stop: int | None = None,
    tokens: list[int] | None = None,
) -> Finished:
    return Finished(key, reason, stop, None if tokens is None else np.array(tokens, np.int32))


# ---------------------------------------------------------------- the three kinds of output


def test_cumulative_outputs_grow(frontend: Frontend) -> None:
    frontend.add(output_kind=CUMULATIVE)
    frontend.start(waited=2.0, cached=3)
    first = frontend.one([WORD[" wo"]])
    assert (first.outputs[0].text, first.outputs[0].token_ids, first.finished) == (" wo", [WORD[" wo"]], False)
    assert (first.outputs[0].finish_reason, first.outputs[0].finished()) == (None, False)
    last = frontend.one([WORD["rd"]], end())
    assert (last.outputs[0].text, last.finished, last.num_cached_tokens) == (" word", True, 3)
    assert last.outputs[0].token_ids == [WORD[" wo"], WORD["rd"]]
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("length", None)
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r0", None, [WORD["wo"]])
    assert first.outputs[0].token_ids is last.outputs[0].token_ids  # shared, not copied at every token
    assert len(frontend.output) == 0


def test_deltas_hold_what_is_new(frontend: Frontend) -> None:
    frontend.add(output_kind=DELTA)
    outputs = [frontend.one([WORD["he"]]), frontend.one([WORD["lo"], WORD["."]]), frontend.one([WORD["h"]], end())]
    assert [o.outputs[0].text for o in outputs] == ["he", "lo.", "h"]
    assert [o.outputs[0].token_ids for o in outputs] == [[WORD["he"]], [WORD["lo"], WORD["."]], [WORD["h"]]]


def test_log_probabilities_that_were_streamed_are_not_kept(frontend: Frontend) -> None:
    frontend.add(0, output_kind=DELTA, logprobs=0)
    for word in ("he", "lo"):
        scores = _logprobs([0], [[WORD[word]]], [[-1]], [1])
        [output], _ = frontend.step({0: [WORD[word]]}, logprobs=scores)
        assert [list(each) for each in output.outputs[0].logprobs or ()] == [[WORD[word]]]
        [state] = frontend.output.states_of("r0")
        assert state.logprobs is not None and state.logprobs.num_values == 0


def test_final_only_comes_once(frontend: Frontend) -> None:
    frontend.add(output_kind=FINAL_ONLY)
    assert frontend.streams[0] is False
    output = frontend.step({}, end(tokens=[WORD[" wo"], WORD["rd"]]))[0][0]
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (" word", [WORD[" wo"], WORD["rd"]])
    assert output.finished


def test_final_only_that_streams_internally_comes_once(frontend: Frontend) -> None:
    frontend.add(output_kind=FINAL_ONLY, stop="zzz")
    assert frontend.streams[0] is True
    assert frontend.step({0: [WORD["he"]]}) == ([], [])
    assert frontend.one([WORD["lo"]], end()).outputs[0].text == "helo"


def test_many_requests_in_one_step(frontend: Frontend) -> None:
    for key in range(6):
        frontend.add(key, output_kind=FINAL_ONLY if key % 2 else DELTA)
    ended = [end(3, tokens=[WORD["."]]), end(0), end(5, tokens=[])]
    results, _ = frontend.step({4: [WORD["he"]], 0: [WORD["lo"]]}, *ended)
    assert {r.request_id: r.outputs[0].text for r in results} == {"r4": "he", "r0": "lo", "r3": ".", "r5": ""}
    assert {r.request_id for r in results if r.finished} == {"r0", "r3", "r5"}
    assert len(frontend.output) == 3


def test_requests_of_unlike_kinds_are_detokenized_alike(frontend: Frontend) -> None:
    frontend.add(0, output_kind=FINAL_ONLY, skip_special_tokens=False)
    frontend.add(1, output_kind=FINAL_ONLY)
    frontend.add(2, output_kind=FINAL_ONLY, detokenize=False)
    results, _ = frontend.step({}, *(end(key, tokens=[WORD["he"], 1]) for key in range(3)))
    assert [r.outputs[0].text for r in results] == ["he<s>", "he", ""]


def test_without_detokenizing_there_are_ids_only(frontend: Frontend) -> None:
    frontend.add(detokenize=False)
    output = frontend.one([WORD["he"]], end())
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [WORD["he"]])
    bare = Frontend(None)
    bare.add()
    assert bare.one([5], end()).outputs[0].token_ids == [5]
    bare.add(1, output_kind=FINAL_ONLY)
    assert bare.step({}, end(1, tokens=[6]))[0][0].outputs[0].token_ids == [6]


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize(
    ("params", "token", "text", "reason"),
    [
        ({}, EOS, "he", None),
        ({"skip_special_tokens": False}, EOS, "he", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, EOS, "he</s>", None),
        ({"stop_token_ids": [300]}, EOS, "he", None),
        ({"stop_token_ids": [EOS]}, EOS, "he", None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, "he", EOS),
        ({"stop_token_ids": "."}, ".", "he", "."),
        ({"stop_token_ids": ".", "include_stop_str_in_output": True}, ".", "he.", "."),
    ],
)
def test_stop_tokens(
    frontend: Frontend, kind: RequestOutputKind, params: dict[str, Any], token: Any, text: str, reason: Any
) -> None:
    """The stop token is among the ids, but not in the text; the model's own end token is no stop_reason."""
    token, reason = WORD.get(token, token), WORD.get(reason, reason)
    if params.get("stop_token_ids") == ".":
        params = params | {"stop_token_ids": [WORD["."]]}
    frontend.add(output_kind=kind, **params)
    ids = [WORD["he"], token]
    if frontend.streams[0]:
        first = frontend.one(ids[:1])
        last = frontend.one(ids[1:], end(reason=FinishReason.STOP, stop=token))
    else:
        first = last = frontend.step({}, end(reason=FinishReason.STOP, stop=token, tokens=ids))[0][0]
    got = "".join(o.outputs[0].text for o in ((first, last) if kind is DELTA else (last,)))
    all_ids = [i for o in ((first, last) if kind is DELTA else (last,)) for i in o.outputs[0].token_ids]
    assert (got, all_ids) == (text, ids)
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", reason)


def test_half_characters_wait_for_the_rest_or_the_end(frontend: Frontend) -> None:
    euro = [WORD[f"<0x{byte:02X}>"] for byte in "€".encode()]
    frontend.add(0, output_kind=DELTA)
    frontend.add(1, output_kind=DELTA)
    texts = {0: "", 1: ""}
    for token in euro[:2]:
        for output in frontend.step({0: [token], 1: [token]})[0]:
            assert output.outputs[0].text == ""
    for output in frontend.step({0: euro[2:], 1: [WORD["he"]]}, end(0), end(1))[0]:
        texts[int(output.request_id[1])] += output.outputs[0].text
    assert texts == {0: "€", 1: "\ufffd\ufffdhe"}


def test_an_end_without_new_tokens_gives_what_was_held(frontend: Frontend) -> None:
    frontend.add(stop="lol")
    assert frontend.one([WORD["he"]]).outputs[0].text == "he"
    assert frontend.one([WORD["lo"]]).outputs[0].text == "he"
    [output], aborts = frontend.step({}, end(reason=FinishReason.ABORT))
    assert (output.outputs[0].text, output.outputs[0].finish_reason, aborts) == ("helo", "abort", [])


def test_what_the_core_says_of_unknown_requests_is_dropped(frontend: Frontend) -> None:
    assert frontend.step({5: [1]}, end(5), end(6, tokens=[1])) == ([], [])


# ---------------------------------------------------------------- stop strings


def test_a_stop_string_ends_the_request_at_once(frontend: Frontend) -> None:
    frontend.add(stop=["lo w", "zz"], output_kind=DELTA)
    frontend.start(cached=5)
    outputs = [frontend.one([WORD["he"]]), frontend.one([WORD["lo"]])]
    [last], aborts = frontend.step({0: [WORD[" wo"], WORD["rd"]]})
    assert [o.outputs[0].text for o in outputs] == ["he", ""]
    assert (last.outputs[0].text, last.finished) == ("", True)
    assert last.outputs[0].token_ids == [WORD[" wo"]]  # cut at the token that completed it
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "lo w")
    assert last.num_cached_tokens == 5
    assert aborts == [StopAbort(0, 3)]
    # What the core had already sampled is dropped, and so is its answer to the abort.
    assert frontend.step({0: [WORD["rd"]]}) == ([], [])
    assert frontend.step({}, end(reason=FinishReason.ABORT)) == ([], [])


def test_a_stop_string_may_be_included(frontend: Frontend) -> None:
    frontend.add(stop="lo w", include_stop_str_in_output=True, output_kind=FINAL_ONLY)
    [last], aborts = frontend.step({0: [WORD["he"], WORD["lo"], WORD[" wo"]]})
    assert (last.outputs[0].text, aborts) == ("helo w", [StopAbort(0, 3)])


def test_a_stop_string_completed_by_the_last_token_needs_no_abort(frontend: Frontend) -> None:
    frontend.add(stop="lo")
    [last], aborts = frontend.step({0: [WORD["he"], WORD["lo"]]}, end(reason=FinishReason.LENGTH))
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason, aborts) == ("stop", "lo", [])
    assert last.outputs[0].text == "he"
    assert len(frontend.output) == 0


def test_a_stop_string_beats_a_later_stop_token(frontend: Frontend) -> None:
    frontend.add(stop="lo")
    [last], aborts = frontend.step({0: [WORD["lo"], EOS]}, end(reason=FinishReason.STOP, stop=EOS))
    assert (last.outputs[0].stop_reason, last.outputs[0].token_ids, aborts) == ("lo", [WORD["lo"]], [])


def test_a_stop_string_may_be_completed_by_the_end_itself(frontend: Frontend) -> None:
    frontend.add(stop="\ufffd")
    frontend.one([WORD["he"]])
    [last], aborts = frontend.step({0: [WORD["<0xE2>"]]}, end())
    assert (last.outputs[0].text, last.outputs[0].stop_reason, aborts) == ("he", "\ufffd", [])


def test_min_tokens_hold_for_stop_strings(frontend: Frontend) -> None:
    frontend.add(stop="lo", min_tokens=2, output_kind=DELTA)
    assert frontend.one([WORD["lo"], WORD["lo"]]).outputs[0].text == "lolo"
    [last], aborts = frontend.step({0: [WORD["he"], WORD["lo"]]})
    assert (last.outputs[0].text, aborts) == ("he", [StopAbort(0, 4)])


def test_a_stop_token_has_no_text_to_stop_at(frontend: Frontend) -> None:
    frontend.add(stop=".", stop_token_ids=[WORD["."]])
    output = frontend.one([WORD["."]], end(reason=FinishReason.STOP, stop=WORD["."]))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", WORD["."])


@given(data=st.data())
def test_all_kinds_of_output_tell_the_same_story(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    """However tokens come and whoever follows: the same text, tokens, reasons; and deltas add up."""
    words = ("he", "lo", " wo", "rd", " ", "é", "<0xE2>", "<0x82>", "<0xAC>", "<s>")
    vocabulary = st.sampled_from([WORD[word] for word in words])
    tokens = data.draw(st.lists(vocabulary, min_size=1, max_size=12))
    stops = data.draw(st.lists(st.sampled_from(["lo", "elo", "o w", "rdrd", "é", "€", "helohe"]), max_size=3))
    options: dict[str, Any] = {"stop": stops, "min_tokens": data.draw(st.integers(0, 4))}
    options["include_stop_str_in_output"] = data.draw(st.booleans())
    options["skip_special_tokens"] = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(1, 3), min_size=12, max_size=12))
    stories = set()
    for kind in RequestOutputKind:
        for sizes in ([1] * 12, cuts):
            frontend = Frontend(sentencepiece)
            frontend.add(output_kind=kind, **options)
            stories.add(_tell(frontend, tokens, sizes, kind))
    assert len(stories) == 1
    [(text, ids, reason, stop)] = stories
    assert list(ids) == tokens[: len(ids)]
    assert (reason == "stop") == (stop is not None)
    assert stop is None or (text.endswith(stop) if options["include_stop_str_in_output"] else stop in stops)


def _tell(
    frontend: Frontend, tokens: list[int], sizes: list[int], kind: RequestOutputKind
) -> tuple[str, tuple[int, ...], str | None, Any]:
    outputs: list[RequestOutput] = []
    if not frontend.streams[0]:
        outputs += frontend.step({}, end(tokens=tokens))[0]
    rest = list(tokens)
    for size in sizes:
        if frontend.streams[0] and rest and len(frontend.output):
            part, rest = rest[:size], rest[size:]
            outputs += frontend.step({0: part}, *([] if rest else [end()]))[0]
    last = outputs[-1].outputs[0]
    if kind is not DELTA:
        return last.text, tuple(last.token_ids), last.finish_reason, last.stop_reason
    ids = tuple(token for output in outputs for token in output.outputs[0].token_ids)
    return "".join(output.outputs[0].text for output in outputs), ids, last.finish_reason, last.stop_reason


# ---------------------------------------------------------------- logprobs


def _logprobs(index: list[int], ids: list[list[int]], values: list[list[float]], ranks: list[int]) -> Part:
    ints = {"token_ids": np.array(ids, np.int32), "ranks": np.array(ranks, np.int32)}
    return Part(np.array(index, np.int32), ints, {"values": np.array(values, np.float32)})


def test_logprobs_of_sampled_and_likeliest_tokens(frontend: Frontend) -> None:
    he, lo, wo = WORD["he"], WORD["lo"], WORD[" wo"]
    frontend.add(0, logprobs=2)
    frontend.add(1)
    frontend.add(2, logprobs=0, output_kind=DELTA)
    values = [[-1.5, -0.5, -1.5, -3], [-2.25, -1, -2, -2.25]]
    lines = _logprobs([0, 2], [[he, lo, he, wo], [lo, he, wo, lo]], values, [2, 3])
    results, _ = frontend.step({0: [he], 1: [wo], 2: [lo]}, logprobs=lines)
    one, none, zero = (result.outputs[0] for result in results)
    assert one.logprobs is not None and zero.logprobs is not None
    assert [(token, p.logprob, p.rank, p.decoded_token) for token, p in one.logprobs[0].items()] == [
        (he, -1.5, 2, "he"),
        (lo, -0.5, 1, "lo"),
    ]
    assert (none.logprobs, none.cumulative_logprob) == (None, None)
    assert [(token, p.logprob, p.rank) for token, p in zero.logprobs[0].items()] == [(lo, -2.25, 3)]
    lines = _logprobs([0, 0, 1], [[wo, lo, wo, he]] * 3, [[-0.25, -0.125, -0.25, -math.inf]] * 3, [2, 2, 2])
    results, _ = frontend.step({0: [wo, wo], 2: [wo]}, end(0), logprobs=lines)
    zero, one = (result.outputs[0] for result in results)
    assert one.logprobs is not None and zero.logprobs is not None
    assert (len(one.logprobs), one.cumulative_logprob) == (3, -2.0)
    assert one.logprobs[1][wo].decoded_token == " wo"
    assert (len(zero.logprobs), zero.cumulative_logprob) == (1, -2.5)  # a delta, and the sum so far


def test_logprobs_are_cut_with_the_tokens(frontend: Frontend) -> None:
    lo = WORD["lo"]
    frontend.add(stop="lo", logprobs=0, output_kind=FINAL_ONLY)
    lines = _logprobs([0, 0], [[lo], [lo]], [[-1], [-2]], [1, 1])
    [last], _ = frontend.step({0: [lo, lo]}, logprobs=lines)
    assert (last.outputs[0].token_ids, len(last.outputs[0].logprobs or [])) == ([lo], 1)
    assert last.outputs[0].cumulative_logprob == -1


def test_equally_likely_tokens_share_a_rank(frontend: Frontend) -> None:
    frontend.add(logprobs=2)
    lines = _logprobs([0], [[5, 6, 5]], [[-1, -1, -1]], [1])  # both are likeliest, and 5 is listed second
    [entry] = frontend.one([5], logprobs=lines).outputs[0].logprobs or []
    assert entry[5].rank == 1


def test_logprobs_without_text() -> None:
    frontend = Frontend(None)
    frontend.add(logprobs=1)
    lines = _logprobs([0], [[5, 6]], [[-1, -0.5]], [2])
    output = frontend.one([5], end(), logprobs=lines).outputs[0]
    assert output.logprobs is not None
    assert {token: p.decoded_token for token, p in output.logprobs[0].items()} == {5: None, 6: None}


# ---------------------------------------------------------------- aborts and figures


def test_abort_ends_requests_here(frontend: Frontend) -> None:
    frontend.add(0, stop="lol")
    frontend.add(1, output_kind=FINAL_ONLY)
    frontend.start(cached=5)
    frontend.step({0: [WORD["lo"]]})
    aborted = frontend.output.abort(["r0", "r1", "unknown"], 7.0)
    assert [keys for keys, _ in aborted] == [[0], [1]]
    assert [(o.outputs[0].text, o.outputs[0].finish_reason, o.finished) for _, o in aborted] == [
        ("lo", "abort", True),
        ("", "abort", True),
    ]
    assert [o.num_cached_tokens for _, o in aborted] == [5, None]
    assert len(frontend.output) == 0 and "r0" not in frontend.output
    assert frontend.step({0: [WORD["he"]]}, end(1, tokens=[5])) == ([], [])


def test_an_aborted_request_keeps_the_text_of_its_tokens(frontend: Frontend) -> None:
    frontend.add(0, output_kind=FINAL_ONLY, logprobs=0)
    frontend.step({0: [WORD["he"]]}, logprobs=_logprobs([0], [[WORD["he"]]], [[-1]], [1]))
    [(_, output)] = frontend.output.abort(["r0"], 7.0)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("he", [WORD["he"]])


def test_a_running_id_is_not_taken_twice(frontend: Frontend) -> None:
    frontend.add(0)
    _, state = frontend.input.process("r0", [1], SamplingParams(), 9, 0.0)
    with pytest.raises(RequestError, match="'r0' is running already"):
        frontend.output.add(state)
    assert len(frontend.output) == 1
    frontend.one([5], end())
    frontend.output.add(state)


def test_times_of_a_request(frontend: Frontend) -> None:
    frontend.add(0)
    frontend.start(waited=20.0)
    frontend.one([5])
    frontend.one([5])
    metrics = frontend.one([5], end()).metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.first_token_time, metrics.last_token_time) == (50.0, 101.0, 103.0)
    assert (metrics.time_to_first_token, metrics.latency, metrics.num_generation_tokens) == (51.0, 53.0, 3)
    assert (metrics.first_scheduled_time, metrics.time_in_queue) == (70.0, 20.0)


def test_times_of_a_request_that_is_not_streamed(frontend: Frontend) -> None:
    frontend.add(0, output_kind=FINAL_ONLY)
    frontend.start(waited=1.0)
    [last], _ = frontend.step({}, replace(end(tokens=[5, 6]), first_token=4.0))
    assert last.metrics is not None
    assert (last.metrics.time_to_first_token, last.metrics.last_token_time) == (4.0, 101.0)


def test_totals(frontend: Frontend) -> None:
    frontend.add(0, prompt=[1, 2, 3], stop="lo")
    frontend.add(1, output_kind=FINAL_ONLY)
    frontend.add(2)
    frontend.start(1, waited=2.0, cached=1)
    frontend.step({0: [WORD["lo"]]}, end(1, tokens=[5, 6]))
    frontend.output.abort(["r2"], 60.0)
    assert frontend.output.metrics.snapshot() == {
        "prompt_tokens": 5,
        "prompt_tokens_cached": 1,
        "request_success_abort": 1,
        "request_success_length": 1,
        "request_success_stop": 1,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 51.0,
        "request_queue_time_seconds_count": 1,
        "request_queue_time_seconds_sum": 2.0,
        "e2e_request_latency_seconds_count": 3,
        "e2e_request_latency_seconds_sum": 112.0,
    }


# ---------------------------------------------------------------- branches


def test_a_stop_string_ends_one_branch_and_the_request_ends_with_the_last(frontend: Frontend) -> None:
    params = SamplingParams(n=3, stop="lol", output_kind=DELTA)
    request, states = process_all(frontend.input, "r", [WORD["wo"]], params, iter(range(3)), 50.0)
    assert isinstance(states, list) and [fork.key for fork in request.forks] == [1, 2]
    assert len({request.sampling.seed, *(fork.sampling.seed for fork in request.forks)}) == 3
    frontend.output.add(*states, num_returned=3)
    assert len(frontend.output) == 1
    [output], aborts = frontend.step({0: [WORD["he"]], 1: [WORD["lo"]], 2: [WORD["lo"]]})
    assert [branch.index for branch in output.outputs] == [0, 1, 2] and not aborts
    [output], aborts = frontend.step({0: [WORD["he"]], 1: [WORD["lo"]]})
    assert [abort.key for abort in aborts] == [1] and not output.finished
    assert [(branch.index, branch.finish_reason) for branch in output.outputs] == [(0, None), (1, "stop")]
    [output], _ = frontend.step({0: [WORD["he"]], 2: [WORD["he"]]}, end(0), end(2))
    assert output.finished and [branch.index for branch in output.outputs] == [0, 2]
    assert len(frontend.output) == 0 and frontend.output.metrics.prompt_tokens == 1


def test_the_longest_branch_is_told_of(frontend: Frontend) -> None:
    _, states = process_all(frontend.input, "r", [WORD["wo"]], SamplingParams(n=2), iter(range(2)), 50.0)
    assert isinstance(states, list)
    frontend.output.add(*states, num_returned=2)
    frontend.step({0: [WORD["he"]], 1: [WORD["he"]]}, end(0))
    [output], _ = frontend.step({1: [WORD["lo"], WORD["lo"]]}, end(1))
    assert output.metrics is not None and output.metrics.max_num_generation_tokens == 3


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_an_output_that_cannot_be_handled_fails_its_request_alone(
    kind: RequestOutputKind, frontend: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    for key in range(3):
        frontend.add(key, output_kind=kind)
    said = {key: [-5 if key == 1 else WORD[" wo"]] for key in range(3)}  # a tokenizer cannot decode a negative id
    tokens = {key: None if kind is DELTA else np.array(ids, np.int32) for key, ids in said.items()}
    ends = [Finished(key, FinishReason.LENGTH, None, ids) for key, ids in tokens.items()]
    outputs, _ = frontend.step(said if kind is DELTA else {}, *ends)
    assert [output.request_id for output in outputs] == ["r0", "r2"]
    (broken,) = frontend.output.take_broken()
    assert (broken.request_id, broken.keys) == ("r1", [1]) and "OverflowError" in str(broken.error)
    assert "'r1'" in caplog.text and not len(frontend.output) and not frontend.output.take_broken()
