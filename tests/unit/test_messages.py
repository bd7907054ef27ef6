"""The text that DeviceMemory writes for the log."""

from __future__ import annotations

from dataclasses import replace

from kvasir.messages import DeviceMemory

GIB = 1 << 30


def test_device_memory_lists_its_parts_and_what_is_free() -> None:
    memory = DeviceMemory(80 * GIB, 15 * GIB, 50 * GIB, 5 * GIB // 2, GIB // 2, graphs_expected=GIB)
    spent = "80.0 GiB: 15.0 weights, 2.5 the largest step, 50.0 KV cache, 0.5 outside the engine"
    expected = "of which graphs are expected to take 1.0 as they are captured"
    assert memory.describe() == f"{spent}, 12.0 free, {expected}"
    assert replace(memory, graphs=2 * GIB, graphs_expected=0).describe() == f"{spent}, 2.0 graphs, 10.0 free"


def test_device_memory_names_parts_that_were_not_measured() -> None:
    unknown = "15.0 weights, 50.0 KV cache, the largest step not measured, outside the engine not measured"
    assert DeviceMemory(None, 15 * GIB, 50 * GIB).describe() == f"GiB: {unknown}"
    assert DeviceMemory(80 * GIB, 15 * GIB, 50 * GIB).describe() == f"80.0 GiB: {unknown}, 15.0 free"
