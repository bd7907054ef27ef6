"""`kvasir collect-env`: says what there is, hides what is secret, and stands a torch that does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir.entrypoints.cli import collect_env
from kvasir.entrypoints.cli.main import main

ROOT = Path(__file__).parent.parent.parent


def test_it_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json", str(tmp_path / "env.json")]) == 0
    found = json.loads((tmp_path / "env.json").read_text())
    assert list(found) == ["kvasir", "system", "cpu", "memory", "gpu", "torch", "packages", "settings"]
    assert found["torch"]["version"] == found["packages"]["torch"]
    assert found["system"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    shown = capsys.readouterr().out
    assert f"  version  {found['kvasir']['version']}" in shown and "\nsettings:" in shown


def test_secrets_are_not_shown() -> None:
    shown = collect_env.shown_variables(
        {
            "KVASIR_API_KEY": "open sesame",
            "HF_TOKEN": "open sesame",
            "VLLM_SOME_PASSWORD": "open sesame",
            "HF_ENDPOINT": "https://me:sesame@host/x",
            "KVASIR_LOG_LEVEL": "DEBUG",
            "AWS_SECRET_ACCESS_KEY": "open sesame",
            "HOME": "/home/me",
        }
    )
    assert "sesame" not in str(shown)
    assert shown == {
        "HF_ENDPOINT": "https://***@host/x",
        "HF_TOKEN": "(set, not shown)",
        "KVASIR_API_KEY": "(set, not shown)",
        "KVASIR_LOG_LEVEL": "DEBUG",
        "VLLM_SOME_PASSWORD": "(set, not shown)",
    }


@pytest.mark.parametrize(
    ("torch", "problem"),
    [
        ("raise ImportError('libcudart.so.99: cannot open')", "(exit status 1): ImportError: libcudart.so.99"),
        ("import os; os.abort()", "(signal 6)"),
        ("import sys; sys.exit(0)", "(exit status 0)"),
    ],
    ids=["raises", "crashes", "leaves"],
)
def test_a_broken_torch_is_told_not_suffered(torch: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "kvasir", "collect-env"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert f"cannot be imported {problem}" in ran.stdout and "\npackages:" in ran.stdout


def test_without_any_package() -> None:
    """-S: nothing that pip installed can be imported by the command itself."""
    command = [sys.executable, "-S", "-m", "kvasir", "collect-env"]
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"\n  fastapi +-\n", ran.stdout)
