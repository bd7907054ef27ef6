"""Priorities, timeouts and queue limits through LLM and LLMEngine, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir import SamplingParams
from kvasir.errors import ConfigError, OverloadedError, RequestError
from kvasir.sampling_params import BeamSearchParams
from tests.engine_builders import SMALL, Model, generate, metric, tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("llama")


def finishing_order(model: Model, **settings: object) -> list[str]:
    """Of four requests with priorities 3, 2, 1, 0 that can only run one after the other."""
    with model.llm(max_num_seqs=1, **settings) as llm:
        engine = llm.llm_engine
        for i in range(4):
            priority = 0 if settings["scheduling_policy"] == "fcfs" else 3 - i
            engine.add_request(str(i), [5] * (4 - i), GREEDY, priority=priority)
        order = []
        while engine.has_unfinished_requests():
            order += [output.request_id for output in engine.step() if output.finished]
    return order


def test_the_order_is_the_policys(model: Model) -> None:
    assert finishing_order(model, scheduling_policy="fcfs") == ["0", "1", "2", "3"]
    assert finishing_order(model, scheduling_policy="priority") == ["3", "2", "1", "0"]
    own = "tests.unit.engine.test_policies:ShortestPromptFirst"
    assert finishing_order(model, scheduling_policy=own) == ["3", "2", "1", "0"]


def test_priorities_do_not_change_the_text(model: Model) -> None:
    with model.llm(**SMALL) as llm:
        expected = tokens(generate(llm, model.prompts, GREEDY))
    with model.llm(**model.tight(), scheduling_policy="priority", priority_aging_seconds=0.05) as llm:
        outputs = llm.generate(model.prompts, GREEDY, use_tqdm=False, priority=[i % 3 for i in range(16)])
        assert tokens(outputs) == expected
        with pytest.raises(RequestError, match="16 prompts but 2 values of priority"):
            llm.generate(model.prompts, GREEDY, use_tqdm=False, priority=[1, 2])
        with pytest.raises(RequestError, match="prompt 1: priority must be a whole number"):
            llm.generate(model.prompts[:2], GREEDY, use_tqdm=False, priority=[1, 0.5])  # type: ignore[list-item]


def test_fcfs_refuses_priorities(model: Model) -> None:
    with model.llm() as llm, pytest.raises(RequestError, match="scheduling_policy=priority"):
        llm.generate([1, 2], GREEDY, use_tqdm=False, priority=1)


def test_a_timeout_ends_a_request_with_what_it_has(model: Model) -> None:
    with model.llm() as llm:
        long = SamplingParams(max_tokens=100, ignore_eos=True, n=2)
        done, late = llm.generate([[1, 2], [3, 4]], long, use_tqdm=False, timeout=[1000.0, 1e-6])
        assert {each.finish_reason for each in done.outputs} == {"length"}
        assert [(each.finish_reason, each.token_ids) for each in late.outputs] == [("timeout", [])] * 2
        assert "its deadline of 1e-06 s passed" in str(late.outputs[0].stop_reason)
        assert metric(llm, "timeouts_waiting") == metric(llm, "request_success_timeout") == 2


def test_a_beam_search_times_out(model: Model) -> None:
    with model.llm() as llm:
        search = BeamSearchParams(beam_width=2, max_tokens=100).to_sampling_params()
        (late,) = llm.generate([[1, 2]], search, use_tqdm=False, timeout=1e-6)
        assert late.finished and late.outputs[0].finish_reason == "timeout"
        assert llm.generate([[1, 2]], search, use_tqdm=False)[0].outputs[0].finish_reason != "timeout"


def test_a_full_queue_refuses_with_the_same_error_through_every_face(model: Model) -> None:
    with model.llm(max_num_seqs=1, max_queued_requests=1) as llm:
        with pytest.raises(OverloadedError, match="prompt 2: the queue is full") as error:
            llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False)
        assert error.value.retry_after >= 1
        assert not llm.llm_engine.has_unfinished_requests(), "none of them runs"
        assert llm.generate([[1], [2]], GREEDY, use_tqdm=False)[1].finished
        assert metric(llm, "requests_refused") == 1


def test_a_policy_that_is_not_there_is_a_config_error(model: Model) -> None:
    with pytest.raises(ConfigError, match="scheduling_policy='nowhere_at_all:Policy' cannot be loaded"):
        model.llm(scheduling_policy="nowhere_at_all:Policy")
