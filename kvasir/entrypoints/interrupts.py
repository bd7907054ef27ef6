"""What would interrupt the steps of a batch: Ctrl-C comes between two of them, and Python's full garbage collections
after all of them. API process."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delay_interrupts() -> Iterator[Callable[[], None]]:
    """Record Ctrl-C instead of raising. Call the yielded function between steps: it raises a recorded interrupt.

    A second Ctrl-C raises at once. Outside the main thread, or if the program handles SIGINT itself, signals are left
    as they are.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: None
        return
    pending = False

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            signal.default_int_handler(number, frame)
        pending = True

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, record)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_NEVER = 1 << 30
_lock = threading.Lock()
_batches = 0  # that run now
_threshold = 0  # of full collections, as the program had it


@contextmanager
def delay_full_collections() -> Iterator[None]:
    """Collect young garbage only. A full collection looks at every object of torch and of the model, for a tenth of a
    second, and thousands of requests would cause several."""
    global _batches, _threshold
    with _lock:
        first, second, oldest = gc.get_threshold()
        if _batches == 0:
            _threshold = oldest
            gc.set_threshold(first, second, _NEVER)
        _batches += 1
    try:
        yield
    finally:
        with _lock:
            _batches -= 1
            if _batches == 0:
                first, second, _ = gc.get_threshold()
                gc.set_threshold(first, second, _threshold)
