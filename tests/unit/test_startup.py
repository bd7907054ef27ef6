"""Phases of a start add up, also one within another."""

from __future__ import annotations

import pytest

from kvasir.config import startup


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "seconds", {})
    monkeypatch.setattr(startup, "_inner", [0.0])


def test_a_phase_within_another_takes_its_time_off_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(startup.time, "perf_counter", lambda: now)
    with startup.phase("outer"):
        now += 0.25
        with startup.phase("inner"):
            now += 0.5
        now += 1
        with startup.phase("inner"):
            now += 2
    assert list(startup.seconds.items()) == [("outer", 1.25), ("inner", 2.5)]


def test_a_phase_that_fails_is_counted_and_closed() -> None:
    with pytest.raises(RuntimeError), startup.phase("outer"), startup.phase("inner"):
        raise RuntimeError
    with startup.phase("next"):
        pass
    assert list(startup.seconds) == ["outer", "inner", "next"] and startup._inner != [0.0] and len(startup._inner) == 1


def test_what_came_before_the_first_line_is_known() -> None:
    startup.record_imports()
    assert 0 < startup.seconds[startup.IMPORTS] < 86_400
