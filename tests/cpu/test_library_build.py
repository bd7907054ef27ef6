"""The CPU library's build and loading: without a compiler, from other sources, with few threads; and its own tests
under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from kvasir.kernels import cpu
from kvasir.kernels.cpu import build, library
from tests.native_builders import SETS, require_library

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thread", "address,undefined"])
def test_sanitizers(kind: str) -> None:
    require_library()
    try:
        assert build.check_with_sanitizer(kind) == "all fine"
    except build.CompileError as error:
        if "cannot find" in str(error) or "unsupported" in str(error):
            pytest.skip(f"the compiler has no {kind} sanitizer")
        raise


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(build.NoCompiler, match="/nowhere/c\\+\\+ cannot be run"):
        build.build(tmp_path / build.NAME)
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'import sys; sys.exit(\"no such flag\")'")
    with pytest.raises(build.CompileError, match="no such flag"):
        build.build(tmp_path / build.NAME)
    assert not list(tmp_path.iterdir())


def test_an_old_compiler_leaves_out_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    require_library()
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$*" in *-mamx*) exit 1;; esac\nexec c++ "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    files, flags = build.sources()
    assert "isa_amx.cpp" not in [file.name for file in files] and "-DKVASIR_ISA_AMX" not in flags
    assert "isa_portable.cpp" in [file.name for file in files]
    assert "does not know the instructions of isa_amx.cpp: it is left out" in capsys.readouterr().err


def test_what_the_benchmark_of_equal_bits_changes_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "cpu"))
    equal_bits = import_module("equal_bits")
    for name, changes in equal_bits.LIBRARIES.items():
        equal_bits.changed_sources(changes, tmp_path / name)
    with pytest.raises(SystemExit, match="csrc/cpu/kernels.h has changed: this script looks for 'nothing'"):
        equal_bits.changed_sources([("kernels.h", "nothing", "")], tmp_path / "none")


@pytest.mark.slow
def test_amx_in_emulated_tiles(tmp_path: Path) -> None:
    """The AMX code of this library on a CPU that may have none."""
    require_library()
    if "avx512" not in SETS:
        pytest.skip("the code around the tiles is for AVX-512")
    made = build.build_with_emulated_tiles(tmp_path / build.NAME)
    environment = os.environ | {"KVASIR_TEST_CPU_LIBRARY": str(made)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/cpu/test_cpu_kernels.py", "-k", "amx"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert ran.returncode == 0 and "passed" in ran.stdout, ran.stdout


@pytest.mark.slow
def test_it_can_be_installed_without_a_compiler(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    unwanted = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "*.so", "tests", "docs")
    shutil.copytree(ROOT, source, ignore=unwanted)
    pip = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--target", str(installed), str(source)]
    if int(version("setuptools").split(".")[0]) >= 77:  # what the build needs is here: no network is
        pip.append("--no-build-isolation")
    environment = os.environ | {"CXX": "/nowhere/c++"}
    ran = subprocess.run(pip, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (ran.stdout + ran.stderr).count("the CPU library was not built, models will run on plain torch") == 1
    assert (installed / "kvasir" / "kernels" / "cpu" / "build.py").is_file()
    assert not list(installed.rglob(build.NAME))


def test_without_the_library_torch_runs_with_one_warning(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from kvasir.kernels.cpu import library
library.PATH = Path({str(tmp_path / "none.so")!r})
import torch
from kvasir import kernels
for _ in range(3):
    assert library.library() is None
    kernels.rms_norm(torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16), 1e-6)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stderr.count("The CPU library is not built: models run on plain torch, slower.") == 1


def test_a_library_from_other_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str], tmp_path: Path
) -> None:
    require_library()
    assert build.is_current() and build.is_current(library.PATH)
    for file in cpu.SOURCES.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(cpu, "SOURCES", tmp_path)
    assert library.library.__wrapped__() is not None
    (tmp_path / "pool.h").write_text("// not what it was\n")
    assert library.library.__wrapped__() is None
    assert "it was built from other sources" in log_lines[-1] and "kvasir.kernels.cpu.build" in log_lines[-1]


def test_more_threads_than_the_system_grants() -> None:
    program = """
import resource
from kvasir.errors import ConfigError
from kvasir.kernels.cpu import library
assert library.num_threads() > 0
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    library.configure(3000)
except ConfigError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "cpu_threads=3000: the system starts no more than" in ran.stdout and "lower cpu_threads" in ran.stdout
