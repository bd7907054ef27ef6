"""Which rows are told to attention as sharing a prefix: against a search through all ways to group them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvasir.engine.cache import prefix_groups
from kvasir.engine.cache.prefix_groups import Group, SharingRows, find_groups
from kvasir.messages import MAX_PREFIX_GROUPS

BLOCK = 64


def rows_of(*texts: str) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """A letter is a block. Rows stand at the odd places of a larger table."""
    width = max(map(len, texts))
    table = np.zeros((2 * len(texts), width), np.int32)
    limits = np.zeros(2 * len(texts), np.int64)
    for i, text in enumerate(texts):
        table[2 * i + 1, : len(text)] = [ord(letter) for letter in text]
        limits[2 * i + 1] = len(text)
    return [table], np.arange(1, 2 * len(texts), 2), limits


def found(*texts: str) -> dict[str, list[int]]:
    tables, rows, limits = rows_of(*texts)
    groups = find_groups(tables, rows, limits, BLOCK)
    return {
        texts[int(group.rows[0]) // 2][: group.blocks] + f" x{number}": sorted((group.rows // 2).tolist())
        for number, group in enumerate(groups)
    }


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows that share a block are worth it."""
    monkeypatch.setattr(prefix_groups, "MIN_PREFIX_GROUP_ROWS", 2)
    monkeypatch.setattr(prefix_groups, "pays", lambda sequences, tokens: sequences >= 2 and tokens >= BLOCK)


def test_some_share_and_others_do_not(few: None) -> None:
    assert found("aab", "xyz", "aac", "q", "aad") == {"aa x0": [0, 2, 4]}


def test_several_groups(few: None) -> None:
    assert found("abcd1", "efg1", "abcd2", "efg2", "abcd3", "h") == {"abcd x0": [0, 2, 4], "efg x1": [1, 3]}


def test_one_group_of_all_or_several_of_more(few: None) -> None:
    """a: 5 rows save 4 blocks; abbb and accc: 3 and 2 rows save 2 * 4 and 4."""
    assert found("abbb1", "abbb2", "abbb3", "accc1", "accc2") == {"abbb x0": [0, 1, 2], "accc x1": [3, 4]}
    assert found("aaaaa1", "aaaaa2", "aaaaab3", "aaaaab4") == {"aaaaa x0": [0, 1, 2, 3]}


def test_a_row_that_ends_inside_the_prefix(few: None) -> None:
    assert found("aaaa1", "aaaa2", "a") == {"aaaa x0": [0, 1]}
    assert found("aaa", "aaa", "aaa") == {"aaa x0": [0, 1, 2]}


def test_all_groups_of_layers_must_agree(few: None) -> None:
    tables, rows, limits = rows_of("aaaa1", "aaaa2", "aaaa3")
    others = tables[0] + 1000
    others[rows[1], 2] = 7
    (group,) = find_groups([tables[0], others], rows, limits, BLOCK)
    assert group.blocks == 2 and len(group.rows) == 3
    assert find_groups([], rows, limits, BLOCK) == [], "every group of layers has a window"


def test_no_more_groups_than_the_device_is_told_of(few: None) -> None:
    texts = [letter * (2 + i // 3) + str(n) for i, letter in enumerate("abcdefghijklmnopqrst") for n in (1, 2)]
    groups = found(*texts)
    assert len(groups) == MAX_PREFIX_GROUPS and all(len(name.split()[0]) > 2 for name in groups), (
        "those that save least"
    )


def test_a_tree_as_deep_as_it_has_rows(few: None) -> None:
    """Each row leaves one block later than the one before: the search ends, and finds something."""
    texts = ["a" * i + "b" for i in range(1, 60)]
    groups = found(*texts)
    assert groups and sum(map(len, groups.values())) <= len(texts)


def test_nothing_saves_more(few: None) -> None:
    """Every way to give each of a few rows one of its prefixes, or none."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        texts = ["".join(rng.choice(["a", "b"], int(rng.integers(1, 5)))) for _ in range(int(rng.integers(2, 6)))]
        best = 0
        for choice in product(*(range(len(text) + 1) for text in texts)):
            groups: dict[str, int] = {}
            for text, depth in zip(texts, choice, strict=True):
                groups[text[:depth]] = groups.get(text[:depth], 0) + 1
            best = max(best, sum((count - 1) * len(prefix) for prefix, count in groups.items()))
        tables, rows, limits = rows_of(*texts)
        assert sum(group.saved for group in find_groups(tables, rows, limits, BLOCK)) == best, texts


def test_what_pays() -> None:
    texts = ["a" * 8 + chr(1000 + i) for i in range(128)]
    assert len(found(*texts)) == 1 and found(*texts[:127]) == {}, "512 tokens are for 128 rows and more"
    texts = ["a" * 32 + chr(1000 + i) for i in range(16)]
    assert len(found(*texts)) == 1 and found(*texts[:15]) == {}


def test_lines_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows become lines of the step; those that do not run in it, or run several tokens, do not count."""
    monkeypatch.setattr(prefix_groups, "pays", lambda sequences, tokens: sequences >= 2)
    sharing, calls = SharingRows(10), []

    def find() -> list[Group]:
        calls.append(1)
        return [Group(np.array([1, 3, 5]), 4), Group(np.array([2, 8]), 1)]

    for _ in range(2):
        sharing.update("same", find, BLOCK)
    assert len(calls) == 1
    shared = sharing.among(np.array([8, 5, 4, 2, 1]))
    assert shared is not None
    assert shared.tokens.tolist() == [256, 64] and shared.starts.tolist() == [0, 2, 4]
    assert shared.members.tolist() == [1, 4, 0, 3]
    assert sharing.among(np.array([8, 5, 4])) is None
    sharing.update("other", lambda: [], BLOCK)
    assert sharing.among(np.array([8, 5, 4, 2, 1])) is None
