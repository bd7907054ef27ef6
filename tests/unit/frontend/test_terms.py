"""Terms of service: what callers may ask, and what is refused because it would have no effect."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvasir.errors import RequestError
from kvasir.frontend.requests.input import make_terms


def test_nothing_asked_is_a_plain_request_that_comes_now() -> None:
    before = time.monotonic()
    terms = make_terms("fcfs")
    assert before <= terms.arrival <= time.monotonic()
    assert (terms.priority, terms.tenant, terms.weight, terms.deadline) == (0, "", 1.0, None)


def test_what_is_asked_reaches_the_policy() -> None:
    terms = make_terms("priority", priority=-3, tenant="a key", weight=2, timeout=5)
    assert (terms.priority, terms.tenant, terms.weight) == (-3, "a key", 2.0)
    assert terms.deadline == pytest.approx(terms.arrival + 5)


def test_arrival_is_by_the_wall_clock_and_never_in_the_future() -> None:
    now = time.monotonic()
    assert make_terms("fcfs", arrival_time=time.time() - 1000).arrival == pytest.approx(now - 1000, abs=100)
    assert make_terms("fcfs", arrival_time=time.time() + 1e6).arrival <= time.monotonic()


@pytest.mark.parametrize("policy", ["fcfs", "wrr", "deadline"])
def test_a_priority_that_nobody_looks_at_is_refused(policy: str) -> None:
    with pytest.raises(RequestError, match=f"no effect under scheduling_policy={policy}") as error:
        make_terms(policy, priority=1)
    assert error.value.parameter == "priority"
    assert make_terms(policy, priority=0).priority == 0
    assert make_terms("mine:Policy", priority=1).priority == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 1.5), ("priority", True), ("priority", None), ("priority", 2**60),
        ("tenant", 3), ("tenant", None),
        ("weight", 0), ("weight", -1.0), ("weight", float("inf")), ("weight", "2"), ("weight", True),
        ("weight", 1e-307), ("weight", 0.0009), ("weight", 1001), ("weight", float("nan")),
        ("timeout", 0), ("timeout", -1), ("timeout", float("nan")), ("timeout", "soon"), ("timeout", False),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} must be") as error:
        make_terms("priority", **{name: value})
    assert error.value.parameter == name
