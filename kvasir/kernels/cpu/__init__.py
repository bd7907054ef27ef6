"""The CPU library's file name and sources. build.py runs this file alone, so it imports the standard library only."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

NAME = "libkvasir_cpu.dylib" if sys.platform == "darwin" else "libkvasir_cpu.so"
SOURCES = Path(__file__).parents[3] / "csrc" / "cpu"


def fingerprint() -> str | None:
    """A hash of the sources; None where there are none, as in an installed wheel. The library contains the hash of the
    sources it was built from (kv_sources), so that an outdated library is detected."""
    files = sorted(file for file in SOURCES.glob("*.*") if file.suffix in (".cpp", ".h", ".inl"))
    if not files:
        return None
    all_of_them = hashlib.sha256()
    for file in files:
        all_of_them.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return all_of_them.hexdigest()[:16]
