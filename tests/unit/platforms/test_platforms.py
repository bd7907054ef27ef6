"""Choosing a device, and what the CPU says of its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvasir import platforms
from kvasir.errors import ConfigError


def test_cpu_is_always_there() -> None:
    platform = platforms.select("cpu")
    assert (platform.device, platform.kind, platform.default_block_size) == ("cpu", "cpu", 16)
    assert platform.default_attention == "torch"
    total, free = platform.memory_bytes(), platform.memory_free()
    assert total is not None and free is not None
    assert 0 < platform.memory_used() < total
    assert 0 < free < total
    assert platform.default_kv_bytes() <= free
    platform.synchronize()


def test_auto_takes_a_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platforms.select().available()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert platforms.select().device == "cuda"
    assert platforms.select("cuda:1").default_block_size == 64


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device='cuda:2' was asked for, but torch finds no such device"):
        platforms.select("cuda:2")


@pytest.mark.parametrize("device", ["tpu", "", "cuda:", "cuda:x", "CPU"])
def test_an_unknown_device(device: str) -> None:
    with pytest.raises(ConfigError, match="is not known; use auto, cuda, xpu, mps, cpu"):
        platforms.select(device)


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = platforms.select("cpu")
    assert [on_cpu.default_dtype(d) for d in platforms.DTYPES] == ["float32", "bfloat16", "bfloat16"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    on_gpu = platforms.select("cuda")
    for supported, expected in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation, s=supported: s)
        assert [on_gpu.default_dtype(d) for d in platforms.DTYPES] == [expected, expected, "float16"]
    with pytest.raises(ConfigError, match="dtype 'int4' is not known; set dtype to one of float32"):
        on_cpu.default_dtype("int4")


def test_importing_costs_no_torch() -> None:
    program = "import sys, kvasir.platforms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
