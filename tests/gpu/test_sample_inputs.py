"""Masks, forced tokens and dropped lines on a GPU: real graphs and kernels against the brute-force loop of the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.cpu import test_stages
from tests.cpu.test_sample_inputs import VOCAB, Bench, run_random_steps
from tests.cpu.test_stages import WISHES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("use_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_inputs_of_the_host(use_graphs: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, so that sums in another order change nothing."""
    monkeypatch.setattr(test_stages, "VOCAB", VOCAB)
    names = [name for name in WISHES if not (use_graphs and "processors" in WISHES[name])]
    bench = Bench(use_graphs, mode, torch.device("cuda"))
    run_random_steps(bench, names, [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 2}])
    if use_graphs:
        heads = bench.runner.graphs.stats.heads  # type: ignore[union-attr]
        assert min(heads["masks"], heads["forced"], heads["stages"], heads["scores"]) > 3
