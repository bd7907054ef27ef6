"""Builds the CPU library from csrc/cpu with nothing but a C++ compiler: `python -m kvasir.kernels.cpu.build`.

The package build calls this too (setup.py). Each instruction set is one file, compiled with its own flags.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
# Run as a file, because importing kvasir needs torch, which a build does not have.
_SOURCES = runpy.run_path(str(HERE / "__init__.py"))
SOURCES: Path = _SOURCES["SOURCES"]
NAME: str = _SOURCES["NAME"]

_COMMON = ["-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
# The ABI of vector arguments matters only between files; gcc 12 reports its own intrinsics as uninitialised.
_QUIET = ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-unknown-warning-option"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni"]
_FLAGS = {
    "isa_avx2.cpp": _AVX2,
    "isa_avx512.cpp": _AVX512,
    "isa_amx.cpp": [*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}


class NotBuilt(Exception):
    """The library was not built; the message says why."""


class NoCompiler(NotBuilt):
    """No C++ compiler was found, or it cannot be run."""


class CompileError(NotBuilt):
    """The compiler failed; the message is its output."""


def compiler() -> list[str]:
    """$CXX, or the first of the usual compilers that is installed."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise NoCompiler("no C++ compiler was found (c++, g++, clang++); install one or set CXX")
    return [found]


def sources() -> tuple[list[Path], list[str]]:
    """The files to compile, and the flags for all of them, which also say which instruction sets the compiler knows."""
    known = [name for name in _FLAGS if _is_x86() and _takes(_FLAGS[name])]
    files = [file for file in sorted(SOURCES.glob("*.cpp")) if file.name in known or file.name not in _FLAGS]
    if _is_x86() and len(known) < len(_FLAGS):
        left_out = ", ".join(sorted(set(_FLAGS) - set(known)))
        print(f"{' '.join(compiler())} does not know the instructions of {left_out}: it is left out", file=sys.stderr)
    flags = [f"-DKVASIR_{Path(name).stem.upper()}" for name in known]
    return files, [*flags, f'-DKVASIR_SOURCES="{_SOURCES["fingerprint"]()}"']


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _takes(flags: Sequence[str]) -> bool:
    """Whether the compiler knows these flags. Older compilers know fewer instruction sets."""
    command = [*compiler(), *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise NoCompiler(f"{command[0]} cannot be run ({error})") from error


def is_current(target: Path = HERE / NAME) -> bool:
    """Whether the library exists and, where the sources are present, was built from them as they are."""
    if not target.is_file():
        return False
    now = _SOURCES["fingerprint"]()
    return now is None or now.encode() in target.read_bytes()


def build(target: Path = HERE / NAME, extra: Sequence[str] = ()) -> Path:
    """Compile all files in parallel and link them. The library appears whole or not at all."""
    files, sets = sources()
    if not files:
        raise NotBuilt(f"the sources are not in {SOURCES}")
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        objects = list(workers.map(lambda file: _compile(file, Path(place), [*sets, *extra]), files))
        made = Path(place) / NAME
        _run([*compiler(), "-shared", "-pthread", *extra, *map(str, objects), "-o", str(made)])
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_suffix(f".{os.getpid()}")
        shutil.copy(made, beside)
        beside.replace(target)  # a process that has mapped the old file keeps it
    return target


def build_with_emulated_tiles(target: Path) -> Path:
    """Build a library for tests whose AMX code runs, slowly, on any CPU with AVX-512."""
    return build(target, ["-DKVASIR_EMULATED_TILES", "-include", str(SOURCES / "tests" / "emulated_tiles.h")])


def check_with_sanitizer(kind: str) -> str:
    """Build and run the library's own tests with a sanitizer ("thread", "address,undefined"); returns their output."""
    flags = ["-O1", "-g", f"-fsanitize={kind}", "-fno-sanitize-recover=all"]
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        files, sets = sources()
        files.append(SOURCES / "tests" / "test_library.cpp")
        objects = list(workers.map(lambda file: _compile(file, Path(place), [*sets, *flags]), files))
        program = Path(place) / "test_library"
        _run([*compiler(), "-pthread", *flags, *map(str, objects), "-o", str(program)])
        ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise AssertionError(f"the library's tests under {kind} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    return ran.stdout.strip()


def _compile(file: Path, place: Path, extra: Sequence[str]) -> Path:
    made = place / f"{file.stem}.o"
    _run([*compiler(), *_COMMON, *_QUIET, *_FLAGS.get(file.name, []), *extra, "-c", str(file), "-o", str(made)])
    return made


def _run(command: list[str]) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoCompiler(f"{command[0]} cannot be run ({error})") from error
    if ran.returncode:
        raise CompileError(f"{' '.join(command)} failed:\n{ran.stderr.strip()}")


def main() -> int:
    """Build the library; with the argument `sanitize`, build and run its own tests under both sanitizers instead."""
    started = time.perf_counter()
    try:
        if sys.argv[1:] == ["sanitize"]:
            for kind in ("thread", "address,undefined"):
                print(f"{kind}: {check_with_sanitizer(kind)}")
            return 0
        made = build()
    except NotBuilt as error:
        print(f"The CPU library was not built: {error}", file=sys.stderr)
        return 1
    print(f"built {made} in {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
