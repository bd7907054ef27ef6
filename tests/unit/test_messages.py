"""What messages say of themselves."""

from __future__ import annotations

from kvasir.messages import DeviceMemory

GIB = 1 << 30


def test_a_ledger_adds_up() -> None:
    memory = DeviceMemory(80 * GIB, 15 * GIB, 50 * GIB, largest_step=5 * GIB // 2, outside=GIB // 2)
    assert memory.in_words() == (
        "80.0 GiB: 15.0 weights, 2.5 the largest step, 50.0 KV cache, 0.5 outside torch, 12.0 free, "
        "where graphs go when captured"
    )
    assert DeviceMemory(None, 15 * GIB, 50 * GIB).in_words() == "GiB: 15.0 weights, 50.0 KV cache"
