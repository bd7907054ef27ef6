"""What may not interrupt the steps of a batch."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvasir.entrypoints.interrupts import delay_full_collections


def test_full_collections_come_after_the_batch() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), delay_full_collections(), delay_full_collections():
        assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > 1 << 20
        raise KeyError
    assert gc.get_threshold() == before


def test_batches_of_several_threads_may_overlap_in_any_order() -> None:
    before = gc.get_threshold()
    first, second = delay_full_collections(), delay_full_collections()
    with ThreadPoolExecutor(1) as thread:
        first.__enter__()
        thread.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert gc.get_threshold()[2] > 1 << 20, "the second still runs"
        thread.submit(second.__exit__, None, None, None).result()
    assert gc.get_threshold() == before
