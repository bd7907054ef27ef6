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

# The matrices of an adapter with two parts, for an H200 on a machine without a GPU: prints the second kernel.
EXPAND = """
from tests import compile_for_gpu as gpu
import torch
from triton import knobs
from kvasir.kernels.layout import AdapterMatrices, TokenSlots
from kvasir.kernels.triton import adapters
gpu.pretend()
wanted = []
def skip(*, fn, compile, **_):
    wanted.append((fn.jit_function, compile["specialization_data"]))
    return True
knobs.runtime.jit_cache_hook = skip
x, y, factors = torch.zeros(3, 1024), torch.zeros(3, 2048), torch.ones(2, 2048)
x, y, shrink, expand = (each.bfloat16() for each in (x, y, torch.zeros(2, 32, 1024), torch.zeros(2, 16, 2048)))
matrices = AdapterMatrices(shrink, expand, factors, factors, torch.ones(2, 2, dtype=torch.int32), (1024, 1024))
slots = TokenSlots(torch.zeros(3, dtype=torch.int32), 2)
slots.__dict__["tiles"] = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
adapters.adapt(x, y, matrices, slots)
knobs.runtime.jit_cache_hook = None
print(next(kernel.preload(how) for kernel, how in wanted if kernel is adapters._expand_kernel).asm["ptx"])
"""

pytest.importorskip("triton")


def run(tmp_path: Path, *program: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    ran = subprocess.run([sys.executable, *program], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    compiled = json.loads(run(tmp_path, str(ROOT / "tests" / "compile_for_gpu.py")))
    written = {
        f"{file.stem}.{name}"
        for file in KERNELS.glob("*.py")
        for name in KERNEL.findall(file.read_text(encoding="utf-8"))
    }
    assert len(written) > 15 and compiled.keys() == written, "each is launched by some step of compile_for_gpu.py"
    assert compiled["paged_prefill._prefill_kernel"] >= 2 <= compiled["paged_mixed._mixed_kernel"], "with a window, too"
    assert compiled["hopper_prefill._hopper_prefill_kernel"] >= 4, "of listed chunks and of all others, with sinks, too"


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.slow
def test_adapters_read_nothing_old_before_they_wait(tmp_path: Path) -> None:
    """The processor's own cache may hold what an earlier step had there (see launch.py): `.cg` reads past it."""
    before, _, after = run(tmp_path, "-c", EXPAND).partition("griddepcontrol.wait")
    loads = [line for line in before.splitlines() if "ld.global" in line]
    assert "ld.global" in after and len(loads) > 2 and all("ld.global.cg" in line for line in loads), loads
