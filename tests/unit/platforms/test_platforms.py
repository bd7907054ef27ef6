"""Choosing a device, and what the CPU says of its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvasir import platforms
from kvasir.errors import ConfigError
from kvasir.platforms import cpu


def test_cpu_is_always_there() -> None:
    platform = platforms.select("cpu")
    assert (platform.device, platform.kind, platform.default_block_size) == ("cpu", "cpu", 16)
    assert platform.default_attention("float32") == "torch"
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
    with pytest.raises(ConfigError, match="device='cuda:2' was asked for, but torch finds none"):
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


def test_a_container_bounds_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = tuple(str(tmp_path / name) for name in ("limit", "used", "stat"))
    monkeypatch.setattr(cpu, "_CGROUPS", (paths,))
    platform = platforms.select("cpu")
    unlimited = platform.memory_bytes()
    for name, text in (("limit", "300000\n"), ("used", "200000\n"), ("stat", "anon 5\ninactive_file 50000\n")):
        (tmp_path / name).write_text(text)
    assert (platform.memory_bytes(), platform.memory_free()) == (300000, 150000)
    (tmp_path / "limit").write_text("max\n")
    assert platform.memory_bytes() == unlimited


def test_importing_costs_no_torch() -> None:
    program = "import sys, kvasir.platforms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_cpu_library_runs_bfloat16_where_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, expected in ((object(), "cpu"), (None, "torch")):
        monkeypatch.setattr(cpu.cpu_library, "library", lambda there=there: there)
        assert platforms.select("cpu").default_attention("bfloat16") == expected
        assert platforms.select("cpu").default_attention("float32") == "torch"


def test_cpus_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = tuple(str(tmp_path / name) for name in ("max", "quota", "period"))
    assert cpu._quota(paths) is None
    for name, text in (("quota", "150000"), ("period", "100000")):
        (tmp_path / name).write_text(text)
    assert cpu._quota(paths) == 1.5
    (tmp_path / "max").write_text("max 100000")
    assert cpu._quota(paths) is None
    (tmp_path / "max").write_text("50000 100000")
    half = cpu._quota(paths)
    monkeypatch.setattr(cpu, "_quota", lambda: half)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu.usable_cpus() == 1, "half a CPU is one thread"


def test_fewer_threads_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cpu, "_quota", lambda: None)
    for text, threads in (("3", 3), ("100", 8), ("", 8), ("many", 8), ("2,1", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert cpu.usable_cpus() == threads


def test_lists_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(10)))
    assert cpu.parse_cpus("0-3, 8") == [0, 1, 2, 3, 8]
    for wrong in ("", "a", "3-1", "1-", "-1"):
        with pytest.raises(ConfigError, match="no list of CPUs"):
            cpu.parse_cpus(wrong)
    with pytest.raises(ConfigError, match="names CPU 10, which this process may not use"):
        cpu.parse_cpus("9-11")
