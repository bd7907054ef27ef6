"""The CPU library's build: without a compiler, and its own tests under the sanitizers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvasir.kernels.cpu import build
from tests.native_builders import require_library

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("kind", ["thread", "address,undefined"])
def test_sanitizers(kind: str) -> None:
    require_library()
    try:
        assert build.check_with_sanitizer(kind) == "all fine"
    except build.NoCompiler as error:
        if "cannot find" in str(error) or "unsupported" in str(error):
            pytest.skip(f"the compiler has no {kind} sanitizer")
        raise


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(build.NoCompiler, match="/nowhere/c\\+\\+ cannot be run"):
        build.build(tmp_path / build.NAME)
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'import sys; sys.exit(\"no such flag\")'")
    with pytest.raises(build.NoCompiler, match="no such flag"):
        build.build(tmp_path / build.NAME)
    assert not list(tmp_path.iterdir())


def test_without_the_library_torch_runs_with_one_warning(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from kvasir.platforms import cpu_library
cpu_library.PATH = Path({str(tmp_path / "none.so")!r})
import torch
from kvasir import kernels, platforms
for _ in range(3):
    assert platforms.select("cpu").default_attention("bfloat16") == "torch"
    kernels.rms_norm(torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16), 1e-6)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stderr.count("The CPU library is not built: models run on plain torch, slower.") == 1
