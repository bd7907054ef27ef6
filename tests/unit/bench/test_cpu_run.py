"""The CPU benchmark's table, ratios and records, from figures that a test has made up."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def run() -> Any:
    spec = importlib.util.spec_from_file_location("cpu_run", ROOT / "benchmarks" / "cpu" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpu_run"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def engine(run: Any, name: str, dtype: str, ms_per_tok: list[tuple[float, float]]) -> Any:
    return run.Engine(name, dtype, "python", "model", figures={("W1", "ms_per_tok"): ms_per_tok})


def test_figures_are_medians_of_quiet_repetitions(run: Any) -> None:
    ours = engine(run, "kvasir", "bf16", [(30.0, 0.0), (90.0, 0.5), (32.0, 0.01), (34.0, 0.02)])
    assert ours.median("W1", "ms_per_tok") == 32.0
    (record,) = run.records([ours], 36.0)
    assert (record["ms_per_tok"], record["repetitions"], record["ms_per_tok_spread"]) == (32.0, 3, 0.125)
    assert record["engine"] == "kvasir" and record["commit"] and "noisy" not in record
    (record,) = run.records([engine(run, "vllm", "bf16", [(40.0, 0.4), (50.0, 0.6)])], 36.0)
    assert record["noisy"] is True and record["ms_per_tok"] == 45.0


def test_the_table_compares_kind_with_kind(run: Any) -> None:
    names = [("kvasir", "bf16", 32.0), ("vllm", "bf16", 40.0), ("kvasir", "int8", 18.0), ("llamacpp", "q8_0", 20.0)]
    engines = [engine(run, name, dtype, [(value, 0.0)]) for name, dtype, value in names]
    shown = run.table(engines, 36.0, {"bf16": 988e6, "int8": 525e6, "int4": 369e6})
    assert "| vllm bf16 | 40.0 (1.25) |" in shown
    assert "W1 ms_per_tok: kvasir bf16 / vllm bf16 = 0.80" in shown
    assert "W1 ms_per_tok: kvasir int8 / llamacpp q8_0 = 0.90" in shown
    assert "bf16 27.4 ms" in shown and "read at, GB/s: bf16 30.9, int8 29.2" in shown
