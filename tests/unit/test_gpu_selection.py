"""What `pytest -m gpu` selects where there is a GPU: every test that runs on it. Collected as if there were one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Loaded into a pytest of its own: torch says what it is told, and each collected test is named with what became of it.
PLUGIN = """
import torch

torch.cuda.is_available = lambda: {available}


def pytest_deselected(items):
    for item in items:
        print(f"left:{{item.path.name}}")


def pytest_collection_finish(session):
    for item in session.items:
        print(f"taken:{{item.path.name}}")
"""


def collect(tmp_path: Path, files: set[str], available: bool) -> tuple[set[str], set[str]]:
    """Of some files in tests/cpu: those of which `-m gpu` took tests, and those of which it left some."""
    (tmp_path / "as_if.py").write_text(PLUGIN.format(available=available))
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-p", "as_if"]
    command += [f"tests/cpu/{name}" for name in sorted(files)]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    taken, left = ({line[len(mark) :] for line in lines if line.startswith(mark)} for mark in ("taken:", "left:"))
    assert taken | left == files, done.stdout + done.stderr
    return taken, left


def uses_a_gpu() -> set[str]:
    """The modules that choose their device by what there is."""
    pytest.importorskip("triton")
    return {path.name for path in (ROOT / "tests/cpu").glob("test_*.py") if "tests.kernel_builders" in path.read_text()}


@pytest.mark.slow
def test_every_kernel_test_is_selected_where_there_is_a_gpu(tmp_path: Path) -> None:
    files = uses_a_gpu()
    assert {"test_triton_kernels.py", "test_triton_filters.py", "test_eight_bit_kernels.py"} <= files
    taken, left = collect(tmp_path, files | {"test_kernels.py"}, available=True)
    assert taken == files and left == {"test_kernels.py"}  # the last one's device is the CPU in any case


@pytest.mark.slow
def test_none_is_selected_where_there_is_none(tmp_path: Path) -> None:
    assert collect(tmp_path, {"test_block_copy.py"}, available=False) == (set(), {"test_block_copy.py"})


def test_no_other_module_chooses_its_device() -> None:
    """Else it would run on the GPU unselected. A module that only asks whether to skip itself is none of these."""
    chooses = '"cuda" if'
    own = {Path(__file__).name, "kernel_builders.py"}
    choosing = {path.name for path in (ROOT / "tests").rglob("*.py") if chooses in path.read_text()} - own
    assert not choosing, f"take DEVICE from tests/kernel_builders.py, and mark the module `kernel`: {choosing}"


def test_the_benchmark_runs_the_same_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "h200"))
    *kernels, rest = import_module("run").gpu_tests()
    assert {path.name for path in kernels} == uses_a_gpu()
    assert rest == ROOT / "tests" / "gpu"
    for path in rest.glob("test_*.py"):
        assert "pytestmark = pytest.mark.gpu" in path.read_text(), path.name
