"""Which layers share block tables."""

from __future__ import annotations

import pytest

from kvasir.models.transformer import MAX_KV_GROUPS, group_layers


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([None] * 3, [(None, [0, 1, 2])]),
        ([5] * 3, [(5, [0, 1, 2])]),
        ([5, None] * 2, [(None, [1, 3]), (5, [0, 2])]),
        ([5, 5, None, 5, 5, None], [(None, [2, 5]), (5, [0, 1]), (5, [3, 4])]),
        ([5, 5, 5, None], [(None, [3]), (5, [0]), (5, [1]), (5, [2])]),
        ([7, 5, None], [(None, [2]), (7, [0]), (5, [1])]),
    ],
)
def test_groups(windows: list[int | None], groups: list[tuple[int | None, list[int]]]) -> None:
    assert group_layers(windows) == groups


def test_one_odd_layer_does_not_make_a_group_of_every_layer() -> None:
    groups = group_layers([4096] * 61 + [None])
    assert len(groups) <= MAX_KV_GROUPS + 1
    assert sorted(layer for _, layers in groups for layer in layers) == list(range(62))
