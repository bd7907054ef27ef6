"""Every Triton kernel compiles for an H200, in variants that real steps launch: what the interpreter cannot tell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KERNELS = ROOT / "kvasir" / "kernels" / "triton"
KERNEL = re.compile(r"^@(?:triton|gluon)\.jit(?:\([^()]*\))?.*\ndef (\w+_kernel)\(", re.MULTILINE)

pytest.importorskip("triton")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(ROOT / "tests" / "compile_for_gpu.py")]
    ran = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    compiled = json.loads(ran.stdout)
    written = {
        f"{file.stem}.{name}"
        for file in KERNELS.glob("*.py")
        for name in KERNEL.findall(file.read_text(encoding="utf-8"))
    }
    assert len(written) > 15 and compiled.keys() == written, "each is launched by some step of compile_for_gpu.py"
    assert compiled["paged_prefill._prefill_kernel"] >= 2 <= compiled["paged_mixed._mixed_kernel"], "with a window, too"
    assert compiled["hopper_prefill._hopper_prefill_kernel"] >= 4, "of listed chunks and of all others, with sinks, too"
