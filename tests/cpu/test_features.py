"""A feature that only the registry knows: its rows' parameters, its work in a head and its part of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvasir.messages import Extras, Int32Array, NewRow, Part, RowSampling
from kvasir.sampling import registry
from kvasir.sampling.features import Drawn, FeatureUse, HeadLayout, RowFeature, SampledLines
from tests.cpu import test_sample_inputs
from tests.cpu.test_sample_inputs import STATES, Bench

use_graphs = test_sample_inputs.use_graphs
larger_vocabulary = test_sample_inputs.larger_vocabulary


@dataclass(slots=True, kw_only=True)
class EntropyUse(FeatureUse):
    index: Int32Array
    plan_lines: Int32Array

    def inputs(self, key: int, layout: HeadLayout) -> tuple[Int32Array, ...]:
        places = layout.places(self.index)
        return (np.pad(places, (0, key - len(places))),)

    def part(self, arrays: Sequence[NDArray[Any]]) -> Part:
        return Part(self.plan_lines, floats={"values": arrays[0]})


class Entropy(RowFeature):
    """Entropy of the model's distribution, in a unit that each row chooses. A key is the number of lines."""

    part_name = "entropy"

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.unit = torch.zeros(max_rows, device=device)  # nats in one unit
        self._asks = np.zeros(max_rows, np.bool_)
        self._lines = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def pack(self, new_rows: list[NewRow]) -> Int32Array:
        units = [(new.sampling.extras or Extras(0)).extra_args for new in new_rows]
        for new, unit in zip(new_rows, units, strict=True):
            self._asks[new.row] = unit is not None
        values = np.array([1.0 if unit is None else unit["entropy"] for unit in units], np.float32)
        return values.view(np.int32)[:, None]

    def open(self, new_rows: list[NewRow], rows: torch.Tensor, packed: torch.Tensor) -> None:
        self.unit[rows] = packed[:, 0].view(torch.float32)

    def use(self, sampled: SampledLines) -> FeatureUse | None:
        index = np.flatnonzero(self._asks[sampled.rows]).astype(np.int32)
        if not len(index):
            return None
        return EntropyUse(len(index), num_entries=len(index), index=index, plan_lines=sampled.lines[index])

    def outputs(self, key: int, drawn: Drawn, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (lines,) = inputs
        logs = drawn.raw[lines].float().log_softmax(-1)
        return (-(logs.exp() * logs).sum(-1) / self.unit[drawn.step.rows[lines]],)

    def graph_keys(self, size: int) -> tuple[int, ...]:
        return (size,)  # one graph for any number of lines

    def graph_key(self, key: int, size: int) -> int:
        return size

    def buffers(self, key: int, size: int) -> tuple[torch.Tensor, ...]:
        return (self._lines[:key],)

    def labels(self, key: int) -> tuple[str, ...]:
        return ("entropy",)


def test_a_new_feature_needs_a_line_in_the_registry(use_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = registry.make_features
    added = lambda settings, parameters: [  # noqa: E731
        *make(settings, parameters),
        Entropy(settings.max_rows, settings.device),
    ]
    monkeypatch.setattr(registry, "make_features", added)
    bench = Bench(use_graphs)
    units = {0: None, 1: 1.0, 2: 2.0, 3: None, 4: 0.5}
    plain = RowSampling(temperature=0.7, top_k=20, logprobs=1)
    rows = {
        row: (plain if unit is None else replace(plain, extras=Extras(1, extra_args={"entropy": unit})), [row + 5])
        for row, unit in units.items()
    }
    asking = [row for row, unit in units.items() if unit is not None]
    texts = {row: prompt for row, (_, prompt) in rows.items()}
    for turn in range(4):
        wanted = []
        for row in asking:
            last = texts[row][-1] * 13 + (len(texts[row]) - 1) * 7
            probs = torch.softmax(bench.model.table[last % STATES].double(), -1)
            wanted.append(float(-(probs * probs.log()).sum()) / float(units[row] or 1))
        result = bench.step(None, rows if turn == 0 else {})  # checks tokens and log-probabilities, too
        part = result.parts["entropy"]
        assert part.index.tolist() == asking
        np.testing.assert_allclose(part.floats["values"], wanted, rtol=1e-4)
        texts = {row: prompt + said for row, (_, prompt, said) in bench.rows.items()}
    if use_graphs:
        assert bench.runner.graphs.stats.heads["entropy"] == 4  # type: ignore[union-attr]
