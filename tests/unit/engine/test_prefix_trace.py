"""The replay of a trace: a cache that holds everything reaches the ideal, and host memory counts as cache."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "prefix_trace.py"))
KIB = 2048  # per token: a block is a GiB


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty conversations of a few turns each, whose prompts grow."""
    rng = np.random.default_rng(0)
    numbers = iter(range(100_000))
    talks: list[list[int]] = [[next(numbers) for _ in range(int(rng.integers(1, 6)))] for _ in range(60)]
    lines = []
    for at in range(400):
        talk = talks[int(rng.integers(0, 60))]
        talk += [next(numbers) for _ in range(int(rng.integers(0, 2)))]
        length = 512 * len(talk) - int(rng.integers(0, 512))
        lines.append({"timestamp": at, "input_length": length, "output_length": 300, "hash_ids": list(talk)})
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_more_room_gives_more_hits_up_to_the_ideal(trace: Path) -> None:
    figures = [SCRIPT["measure"](trace, 40, host, 4, KIB) for host in (0, 40, 100, 2000)]
    rates = [figure.hit_rate for figure in figures]
    assert rates == sorted(rates) and rates[0] < 0.8 * rates[-1]
    assert rates[-1] == pytest.approx(figures[0].ideal)
    assert figures[0].from_host == figures[0].offloaded_gib == 0 < figures[-1].from_host
    assert SCRIPT["measure"](trace, 3000, 0, 4, KIB).hit_rate == pytest.approx(figures[0].ideal)
