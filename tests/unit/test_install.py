"""An editable install as pyproject.toml describes it, of a clone with a package of one file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import ROOT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
# As Python starts with the wheel's files in site-packages, without the environment's own.
IMPORT = "import site, sys; site.addsitedir(sys.argv[1]); import kvasir; print(kvasir.__file__)"


@pytest.mark.slow
@pytest.mark.skipif(int(version("setuptools").split(".")[0]) < 77, reason="the build needs setuptools 77")
def test_an_editable_install_is_found_from_beside_its_clone(tmp_path: Path) -> None:
    """Also where the current folder has one called kvasir, the clone, which is no package."""
    clone, site = tmp_path / "kvasir", tmp_path / "site"
    package = clone / "kvasir"
    (package / "kernels" / "cpu").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for name in ("kernels/cpu/__init__.py", "kernels/cpu/build.py"):
        shutil.copy(ROOT / "kvasir" / name, package / name)
    (package / "__init__.py").write_text('__version__ = "1.0"\n')
    environment = {**os.environ, "CXX": "no-such-compiler"}
    environment.pop("PYTHONPATH", None)

    def run(*command: str, cwd: Path) -> str:
        ran = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    site.mkdir()
    run(sys.executable, "-c", BUILD, str(site), cwd=clone)
    with zipfile.ZipFile(next(site.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    for folder in (tmp_path, clone):
        assert run(sys.executable, "-S", "-c", IMPORT, str(site), cwd=folder) == str(package / "__init__.py")
