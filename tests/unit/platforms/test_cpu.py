"""The decision whether oneDNN must keep off AMX, with CPUs made up for the purpose, and the instruction itself."""

from __future__ import annotations

import os
import platform
import struct
import sys
from pathlib import Path

import pytest

from kvasir.platforms import cpu
from kvasir.platforms.cpu import amx_lacks_description, cpu_flags, cpuid, prepare_cpu

PALETTE_1 = (0x0400_2000, 0x0008_0040, 0x10, 0)  # as a real CPU describes it
AMX = {"amx_tile", "amx_bf16", "avx512f"}


@pytest.mark.parametrize(
    ("flags", "registers", "lacking"),
    [
        (AMX, (0, 0, 0, 0), True),
        (AMX, PALETTE_1, False),
        (AMX, None, True),
        ({"avx512f"}, (0, 0, 0, 0), False),
        (set(), None, False),
    ],
)
def test_decision(flags: set[str], registers: cpu.Registers | None, lacking: bool) -> None:
    assert amx_lacks_description(flags, lambda leaf, subleaf: registers) is lacking


def pretend(monkeypatch: pytest.MonkeyPatch, lacking: bool) -> None:
    for name in cpu.ISA_VARIABLES:
        monkeypatch.setenv(name, "")  # so that the test's end puts back what was there
        monkeypatch.delenv(name)
    monkeypatch.setattr(cpu, "amx_lacks_description", lambda flags, read: lacking)


def test_onednn_is_told_once(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    pretend(monkeypatch, lacking=True)
    prepare_cpu()
    prepare_cpu()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert len(log_lines) == 1 and "shows no description of it" in log_lines[0]


def test_a_sound_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lacking=False)
    prepare_cpu()
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.parametrize("name", cpu.ISA_VARIABLES)
def test_the_users_choice_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lacking=True)
    monkeypatch.setenv(name, "AVX2")
    prepare_cpu()
    assert {k: v for k, v in os.environ.items() if k in cpu.ISA_VARIABLES} == {name: "AVX2"}


def test_flags_are_read(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu amx_tile\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(str(file)) == {"fpu", "amx_tile"}
    assert cpu_flags(str(tmp_path / "absent")) == frozenset()


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="CPUID is an x86 instruction")
def test_cpuid_tells_the_vendor() -> None:
    registers = cpuid(0, 0)
    if registers is None:
        pytest.skip("this system does not let memory be executed")
    _, ebx, ecx, edx = registers
    assert struct.pack("<3I", ebx, edx, ecx).decode() in Path("/proc/cpuinfo").read_text()


def test_cpuid_is_for_x86_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpuid(0, 0) is None
