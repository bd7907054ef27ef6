"""Which attention packages count as installed, found without importing any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvasir import platforms
from kvasir.errors import ConfigError
from kvasir.platforms.attention_packages import FA2, FA3, FA4_BLACKWELL, FA4_HOPPER, FLASHINFER_PYTHON, Package, load

PACKAGES = (FA2, FA3, FA4_HOPPER, FA4_BLACKWELL, FLASHINFER_PYTHON)
# Importing one would end the process; then which of PACKAGES are installed, by number.
PROGRAM = """
from kvasir.platforms.attention_packages import *
packages = FA2, FA3, FA4_HOPPER, FA4_BLACKWELL, FLASHINFER_PYTHON
print(*[number for number, package in enumerate(packages) if is_installed(package)])
"""


def installed(site: Path, *files: str) -> list[Package]:
    """As a fresh process sees it in which these files are all there is of any package."""
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("raise SystemExit('imported')" if file.endswith(".py") else "Version: 4.0.0\n")
    isolated = f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(site)!r}]\n"
    ran = subprocess.run([sys.executable, "-c", isolated + PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [PACKAGES[int(number)] for number in ran.stdout.split()]


def test_none(tmp_path: Path) -> None:
    assert installed(tmp_path) == []


def test_flash_attention_2_and_its_early_cute(tmp_path: Path) -> None:
    assert installed(tmp_path, "flash_attn/__init__.py", "flash_attn/cute/__init__.py") == [FA2]


def test_flash_attention_4_alone_is_not_2(tmp_path: Path) -> None:
    files = ("flash_attn/cute/__init__.py", "flash_attn_4-4.0.0.dist-info/METADATA")
    assert installed(tmp_path, *files) == [FA4_HOPPER, FA4_BLACKWELL]
    assert installed(tmp_path, "flash_attn/__init__.py") == [FA2, FA4_HOPPER, FA4_BLACKWELL]


def test_flash_attention_3_and_flashinfer(tmp_path: Path) -> None:
    assert installed(tmp_path, "flash_attn_interface.py", "flashinfer/__init__.py") == [FA3, FLASHINFER_PYTHON]


def test_what_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flashinfer.py").write_text("raise ImportError('undefined symbol: torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with pytest.raises(ConfigError, match="importing flashinfer fails: undefined symbol: torch. Install it for this"):
        load(FLASHINFER_PYTHON)


def test_only_nvidia_has_a_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platforms.select("cpu").compute_capability is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (8, 6))
    platform = platforms.select("cuda")
    assert (platform.compute_capability, platform.has_fp8_e4m3) == ((8, 6), False)
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert (platform.compute_capability, platform.has_fp8_e4m3) == (None, True)
