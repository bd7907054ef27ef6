"""Which blocks a small product runs with, by device, kind, shape and rows: data, in products.json.

benchmarks/h200/tune_products.py measures them anew, for another GPU or another model's shapes. A device or a shape that
was never measured gets blocks that are never bad, and tiles only where they were seen to beat cuBLAS.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

DATA = Path(__file__).parent / "products.json"


@cache
def table(device_name: str) -> dict[str, list[int]]:
    """All that is known of a device: "kind rows x inner [x at most so many rows of x]" -> blocks."""
    measured: dict[str, dict[str, list[int]]] = json.loads(DATA.read_text(encoding="utf-8"))
    return measured.get(device_name, {})


@cache
def device_name(index: int | None) -> str:
    return torch.cuda.get_device_name(index) if torch.cuda.is_available() else "none"


def find(key: str, x: torch.Tensor) -> list[int] | None:
    return table(device_name(x.device.index)).get(key)


def gemv_key(kind: str, rows: int, inner: int) -> str:
    return f"gemv {kind} {rows}x{inner}"


def tile_key(rows: int, inner: int, count: int) -> str:
    return f"tile {rows}x{inner} for {count}"


def parts_key(rows: int, inner: int, count: int) -> str:
    return f"parts {rows}x{inner} for {count}"
