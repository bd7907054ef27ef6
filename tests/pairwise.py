"""Cases of several parameters: in the fast tests every two values meet, in the long tests all of them meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[int, int, int, int]


def _pairs(case: Sequence[int]) -> set[Pair]:
    """Which values of which two parameters meet in a case, which is given as the number of each parameter's value."""
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}


def _covering(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Few cases in which every two values meet: again and again the one that brings most new pairs."""
    cases = list(product(*map(range, sizes)))
    missing: set[Pair] = set().union(*map(_pairs, cases))
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(_pairs(case) & missing))
        chosen.add(best)
        missing -= _pairs(best)
    return chosen


def pairwise(*parameters: Sequence[Any], every: bool = False) -> list[Any]:
    """The product of the parameters' values for `parametrize`. `every`: all of them are fast tests.

    A value that is a tuple stands for several arguments.
    """
    return _cases(parameters, _covering([len(values) for values in parameters]), every)


def each_once(*parameters: Sequence[Any], every: bool = False) -> list[Any]:
    """As `pairwise`, where the fast tests have each value of each parameter, and not each pair."""
    sizes = [len(values) for values in parameters]
    return _cases(parameters, {tuple(number % size for size in sizes) for number in range(max(sizes))}, every)


def _cases(parameters: Sequence[Sequence[Any]], fast: set[tuple[int, ...]], every: bool) -> list[Any]:
    def arguments(case: tuple[int, ...]) -> tuple[Any, ...]:
        chosen = (values[number] for values, number in zip(parameters, case, strict=True))
        return tuple(part for value in chosen for part in _parts(value))

    cases = product(*(range(len(values)) for values in parameters))
    return _params((arguments(case), every or case in fast) for case in cases)


def _params(values: Iterable[tuple[Any, bool]]) -> list[Any]:
    return [pytest.param(*_parts(value), marks=() if is_fast else pytest.mark.slow) for value, is_fast in values]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)


def few(values: Sequence[Any], fast: Sequence[Any], every: bool = False) -> list[Any]:
    """All values for `parametrize`, of which only some are fast tests."""
    assert all(value in values for value in fast)
    return _params((value, every or value in fast) for value in values)
