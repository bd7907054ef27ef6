"""Drafts by lookup, and their verification: the CPU library's and Triton's versions equal the reference."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.kernels import reference
from kvasir.kernels.cpu import ops
from kvasir.kernels.cpu.library import library

pytest.importorskip("triton")

from kvasir.kernels.triton import drafts
from tests.kernel_builders import DEVICE

pytestmark = pytest.mark.kernel
VERSIONS: list[Any] = [drafts, *([ops] if library() is not None else [])]


def device_of(version: ModuleType) -> str:
    return DEVICE if version is drafts else "cpu"


def lookup_by(version: Any, seed: int, latest: bool) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    width, size = int(rng.integers(3, 1300)), int(rng.integers(1, 9))
    history = torch.from_numpy(rng.integers(0, rng.choice([2, 3, 8, 50]), (5, width)).astype(np.int32))
    rows, lengths = torch.from_numpy(rng.permutation(5)[:3].copy()), rng.integers(1, width + 1, 3).astype(np.int32)
    shortest = int(rng.integers(1, 4))
    longest = shortest + int(rng.integers(0, 20))
    found, counts = torch.zeros(5, size, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    given = [each.to(device_of(version)) for each in (history, rows, torch.from_numpy(lengths), found, counts)]
    version.lookup_drafts(*given, shortest, longest, latest)
    *_, found, counts = given
    return [found[row, : int(counts[row])].tolist() for row in rows.tolist()]


@pytest.mark.parametrize("latest", [False, True])
def test_every_lookup_equals_the_reference(latest: bool) -> None:
    for seed in range(12):
        wanted = lookup_by(reference, seed, latest)
        assert all(lookup_by(version, seed, latest) == wanted for version in VERSIONS)


def accept_by(version: Any, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    size, count = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    lines = rng.integers(1, size + 2, count).astype(np.int32)
    starts = (np.cumsum(lines) - lines).astype(np.int32)
    tokens = torch.from_numpy(rng.integers(-1, 3, int(lines.sum())).astype(np.int32))
    rows = torch.from_numpy(rng.permutation(7)[:count].copy())
    columns = [rng.integers(0, 3, (7, size)), rng.integers(0, size + 1, 7), rng.integers(20, 40, 7), np.zeros(7)]
    state = [torch.from_numpy(each.astype(np.int32)) for each in columns]
    given = (tokens, rows, torch.from_numpy(starts), torch.from_numpy(lines), *state)
    tokens, rows, first, number, *state = (each.to(device_of(version)) for each in given)
    own = version.accept_drafts(tokens, rows, first, number, *state)
    return [each.tolist() for each in (*own, *state)]


def test_every_verification_equals_the_reference() -> None:
    for seed in range(20):
        assert all(accept_by(version, seed) == accept_by(reference, seed) for version in VERSIONS)
