"""Ctrl-C between two steps instead of anywhere. API process."""

from __future__ import annotations

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
