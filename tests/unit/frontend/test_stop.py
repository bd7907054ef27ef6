from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.frontend.text.stop import StopStrings


def _feed(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """All that was shown, the stop string, and what was shown after each piece."""
    shown = []
    for piece in pieces:
        text, stop = stops.feed(piece)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop, shown
    shown.append(stops.flush())
    return "".join(shown), None, shown


def _expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By trying every end in turn."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_the_first_stop_is_found_however_the_text_is_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    text, stop = _expected("".join(pieces), stops, include)
    shown, found, _ = _feed(StopStrings(stops, include), pieces)
    assert (shown, found) == (text, stop)


@given(
    pieces=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_leaks_and_nothing_else_waits(pieces: list[str], stops: list[str]) -> None:
    checker = StopStrings(stops, False)
    fed = shown = ""
    for piece in pieces:
        fed += piece
        text, stop = checker.feed(piece)
        shown += text
        if stop is not None:
            break
        waiting = fed[len(shown) :]
        assert not waiting or any(stop.startswith(waiting) for stop in stops)
        longer = [fed[-n:] for n in range(len(waiting) + 1, len(fed) + 1)]
        assert not any(stop.startswith(end) and stop != end for stop in stops for end in longer)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stop"),
    [
        (["</s>"], ["a<", "/", "s", ">b"], "a", "</s>"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["b", "a"], ["ab"], "", "a"),
        (["bc", "abcd"], ["abcd"], "a", "bc"),
        (["b", "ab"], ["xab"], "x", "ab"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["stop"], ["sto", "re"], "store", None),
        (["日本"], ["日", "本語"], "", "日本"),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: str, stop: str | None) -> None:
    assert _feed(StopStrings(stops, False), pieces)[:2] == (shown, stop)
    included = _feed(StopStrings(stops, True), pieces)
    assert included[:2] == (shown + (stop or ""), stop)


def test_no_search_until_allowed() -> None:
    stops = StopStrings(["ab", "xaby"], False)
    assert stops.feed("ab", search=False) == ("ab", None)
    assert stops.feed("xab", search=False) == ("", None)  # may begin "xaby"
    assert stops.feed("z") == ("xabz", None)  # the "ab" in it ended before the search began
    assert stops.feed("a", search=False) == ("", None)
    assert stops.feed("b") == ("", "ab")  # begins before, ends after
