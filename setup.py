"""The one thing pyproject.toml cannot say: the CPU library is compiled along, where there is a compiler."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# Run as a file: importing kvasir would need torch, which a build does not have.
BUILD = runpy.run_path(str(ROOT / "kvasir" / "kernels" / "cpu" / "build.py"))


class BuildWithLibrary(build_py):
    """Puts the library beside the Python that loads it: into the wheel, or into the checkout of an editable install."""

    def run(self) -> None:
        super().run()
        package = Path("kvasir") / "kernels" / "cpu"
        place = ROOT / package if self.editable_mode else Path(self.build_lib) / package
        try:
            BUILD["build"](place / BUILD["NAME"])
        except BUILD["NotBuilt"] as error:
            print(f"warning: the CPU library was not built, models will run on plain torch: {error}", file=sys.stderr)


class PlatformDistribution(Distribution):
    """A wheel with the library in it is for one kind of machine."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPython(bdist_wheel):
    """... but for every Python: the library is called through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": AnyPython}, distclass=PlatformDistribution)
