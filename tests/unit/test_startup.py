"""Phases of a start add up, also one within another."""

from __future__ import annotations

import time

import pytest

from kvasir import startup


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "seconds", {})
    monkeypatch.setattr(startup, "_inner", [0.0])


def test_a_phase_within_another_takes_its_time_off_it() -> None:
    began = time.perf_counter()
    with startup.phase("outer"):
        time.sleep(0.02)
        with startup.phase("inner"):
            time.sleep(0.05)
        with startup.phase("inner"):
            time.sleep(0.05)
    whole = time.perf_counter() - began
    assert list(startup.seconds) == ["outer", "inner"]
    assert startup.seconds["inner"] >= 0.1
    assert startup.seconds["outer"] <= whole - 0.1
    assert sum(startup.seconds.values()) == pytest.approx(whole, abs=0.01)


def test_a_phase_that_fails_is_counted_and_closed() -> None:
    with pytest.raises(RuntimeError), startup.phase("outer"), startup.phase("inner"):
        raise RuntimeError
    with startup.phase("next"):
        pass
    assert list(startup.seconds) == ["outer", "inner", "next"] and startup._inner != [0.0] and len(startup._inner) == 1


def test_what_came_before_the_first_line_is_known() -> None:
    startup.note_entry()
    assert 0 < startup.seconds[startup.IMPORTS] < 86_400
