from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from kvasir.errors import RequestError
from kvasir.sampling_params import UNSUPPORTED, RepetitionDetectionParams, RequestOutputKind, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    expected = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "max_tokens": 16}
    expected |= {
        "min_tokens": 0,
        "logprobs": None,
        "ignore_eos": False,
        "detokenize": True,
        "skip_special_tokens": True,
    }
    assert {name: getattr(params, name) for name in expected} == expected
    assert (params.stop, params.stop_token_ids) == ([], [])
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_positional_order_is_vllms() -> None:
    params = SamplingParams(1, 0.0, 0.0, 1.0, 0.5, 0.9, 7, 0.1, 42, "END", [3], True, 5, 2, 4)
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=42,
        stop=["END"],
        stop_token_ids=[3],
        ignore_eos=True,
        max_tokens=5,
        min_tokens=2,
        logprobs=4,
    )


WRONG: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, math.nan, math.inf, "1", True, None)],
    *[("top_p", value) for value in (0, 0.0, -0.5, 1.01, math.nan, math.inf, "0.5", True)],
    *[("min_p", value) for value in (-0.01, 1.5, math.nan, True)],
    *[("top_k", value) for value in (-2, 1.5, "4", True, math.nan, None)],
    *[("max_tokens", value) for value in (0, -1, 1.0, True, "16")],
    *[("min_tokens", value) for value in (-1, 17, 0.5, False, None)],
    *[("seed", value) for value in (1.5, "7", True, 2**64, -(2**63) - 1)],
    *[("logprobs", value) for value in (-2, -3, 0.5, True, "5")],
    *[("stop", value) for value in ("", ["a", ""], [1], 5, {"a": 1})],
    *[("stop_token_ids", value) for value in ([-1], ["a"], [1.0], [True], 5, "5")],
    *[(name, value) for name in ("ignore_eos", "detokenize", "skip_special_tokens") for value in (1, None, "yes")],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, math.nan, "1")],
    *[("repetition_penalty", value) for value in (0, -1, math.inf, math.nan, None)],
    *[("prompt_logprobs", value) for value in (-2, 0.5, True)],
    *[(name, value) for name in ("logprob_token_ids", "forbidden_token_ids") for value in ([-1], ["a"], [1.0], 5)],
    *[("allowed_token_ids", value) for value in ([], [-1], "5")],
    *[("logit_bias", value) for value in ([1], {"a": 1.0}, {-1: 1.0}, {1: math.nan}, {1: "x"}, {"9" * 5000: 1.0})],
    *[("bad_words", value) for value in ("bad", [""], [" "], [1])],
    *[("extra_args", [1]), ("skip_reading_prefix_cache", 1), ("flat_logprobs", 1), ("stream_interval", 0)],
    *[("spaces_between_special_tokens", None), ("logits_processors", [1]), ("logits_processors", len)],
    *[("top_ema_p", value) for value in (-0.1, 1.1, math.nan)],
    *[("top_ema_d", value) for value in (-1, 0.5)],
    *[("repetition_detection", value) for value in (3, {"window": 3}, {"min_count": 1}, {"max_pattern_size": -1})],
    *[("n", value) for value in (0, -1, 1.5, 20_000)],
    *[("best_of", value) for value in (0, 1.5, "2")],
    ("repetition_detection", {"max_pattern_size": 2, "min_pattern_size": 3}),
    *[("include_stop_str_in_output", 0), ("output_kind", 1), ("output_kind", "delta")],
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert name in str(caught.value)


RIGHT: list[tuple[str, Any]] = [
    *[("temperature", 0), ("temperature", 100.0), ("temperature", np.float32(0.5)), ("top_p", 1), ("top_p", 1e-9)],
    *[("top_k", -1), ("top_k", 10**9), ("top_k", np.int64(4)), ("min_p", 0), ("min_p", 1), ("max_tokens", None)],
    *[("min_tokens", 16), ("seed", 0), ("seed", 2**64 - 1), ("seed", -(2**63)), ("logprobs", 0), ("logprobs", 5)],
    *[("logprobs", -1), ("prompt_logprobs", -1), ("presence_penalty", -2), ("repetition_penalty", 0.5)],
    *[("allowed_token_ids", [3]), ("forbidden_token_ids", []), ("stream_interval", 3), ("extra_args", {"a": 1})],
    *[("stop", None), ("stop", ("a", "b")), ("stop_token_ids", (1, 2)), ("stop_token_ids", None)],
]


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_right_values_are_taken(name: str, value: Any) -> None:
    taken = getattr(SamplingParams(**{name: value}), name)
    assert taken == (list(value) if isinstance(value, tuple) else [] if value is None and "stop" in name else value)
    assert not isinstance(taken, np.generic)


def test_contradictions_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens=9 is more than max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    with pytest.raises(RequestError, match="n must be 1 with temperature=0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(RequestError, match="best_of=2 is less than n=3"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(RequestError, match="top_ema_p has no effect without top_ema_d; set both or neither."):
        SamplingParams(top_ema_p=0.5)
    with pytest.raises(RequestError, match="top_ema_d has no effect without top_ema_p; set both or neither."):
        SamplingParams(top_ema_d=2)
    with pytest.raises(RequestError, match="detokenize=True"):
        SamplingParams(stop="END", detokenize=False)


# A value that asks for something, for every field that is not there yet.
ASKING: dict[str, Any] = {
    "truncate_prompt_tokens": 5,
    "routed_experts_prompt_start": 4,
    "trace_decode_token_ids": [1],
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_there_yet_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=rf"^{name}=.* is not supported yet") as caught:
        SamplingParams(**{name: ASKING[name]})
    assert caught.value.parameter == name
    for harmless in UNSUPPORTED[name]:
        SamplingParams(**{name: harmless})


def test_every_field_either_works_or_is_refused() -> None:
    """A new field must be put into the table of refusals or into this list, with its own test."""
    working = """
        temperature top_p top_k min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs detokenize
        skip_special_tokens include_stop_str_in_output output_kind presence_penalty frequency_penalty
        repetition_penalty prompt_logprobs logprob_token_ids flat_logprobs spaces_between_special_tokens
        stream_interval logit_bias allowed_token_ids bad_words forbidden_token_ids logits_processors extra_args
        skip_reading_prefix_cache repetition_detection top_ema_p top_ema_d n best_of
        use_beam_search length_penalty early_stopping num_beam_groups diversity_penalty structured_outputs
        thinking_token_budget keep_special_tokens reasoning_tokens
    """
    assert {f.name for f in fields(SamplingParams)} == set(working.split()) | set(UNSUPPORTED)
    assert not set(working.split()) & set(UNSUPPORTED)


@pytest.mark.parametrize(
    ("name", "value"), [("n", True), ("presence_penalty", False), ("flat_logprobs", 0), ("n", "1")]
)
def test_true_is_not_one(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="no parameter 'max_token'.*Did you mean max_tokens") as caught:
        SamplingParams(max_token=5)  # type: ignore[call-arg]
    assert caught.value.parameter == "max_token"
    with pytest.raises(RequestError, match="Known are: n, "):
        SamplingParams(zzz=5)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="at most"):
        SamplingParams(*[None] * 60)  # type: ignore[arg-type]


def test_older_name_works_with_one_warning(log_lines: list[str]) -> None:
    for _ in range(2):
        assert SamplingParams(stop_strings=["END"]).stop == ["END"]  # type: ignore[call-arg]
    assert log_lines == ["WARNING SamplingParams(stop_strings=...) is deprecated; use stop."]
    with pytest.raises(RequestError, match="stop_strings and stop were both given"):
        SamplingParams(stop_strings="a", stop="b")  # type: ignore[call-arg]


def test_clone_shares_nothing() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], stop_token_ids=[1])
    other = params.clone()
    assert other == params
    other.stop_token_ids.append(2)  # type: ignore[union-attr]
    other.stop.append("b")  # type: ignore[union-attr]
    other.temperature = 0.1
    assert (params.temperature, params.stop, params.stop_token_ids) == (0.5, ["a"], [1])
    assert other != params


def test_assigned_fields_are_verified_again() -> None:
    params = SamplingParams()
    params.stop = "END"
    params.verify()
    assert params.stop == ["END"]
    params.top_p = 3.0
    with pytest.raises(RequestError, match="top_p"):
        params.verify()
    with pytest.raises(AttributeError):
        params.max_token = 3  # type: ignore[attr-defined]


def test_repr_shows_what_was_asked() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(temperature=0.5, stop="END")
    assert repr(params) == "SamplingParams(temperature=0.5, stop=['END'])"
    assert eval(repr(params)) == params


def test_bias_is_cut_and_takes_json_keys() -> None:
    assert SamplingParams(logit_bias={"3": 400, 5: -1.5}).logit_bias == {3: 100.0, 5: -1.5}  # type: ignore[dict-item]


def test_repetition_detection_takes_a_dict() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 4, "min_pattern_size": 0, "min_count": 3})
    assert params.repetition_detection == RepetitionDetectionParams(4, 1, 3)
