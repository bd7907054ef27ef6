"""Compiles the kernels of a step before the step is run for real: at once, on all cores, or by and by beside the work.

One after the other they take half a second each, and the first steps need some thirty of them.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs

from kvasir.log import get_logger
from kvasir.platforms.limits import usable_cpus

logger = get_logger(__name__)
_ONE_AT_A_TIME = threading.Lock()  # the hook is the whole process's
_EMPTY: dict[Any, Callable[..., Any]] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}
THREADS = "compile kernels"  # what they are called
_BESIDE = 2  # threads beside the work: each takes Python's lock from those who serve, for half of its time

Missing = dict[tuple[Any, str], str]  # kernel and variant -> how to compile it


class _Zeros(TorchFunctionMode):
    """What a kernel would have written may be an index into something: let it be one that exists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _EMPTY.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def rehearsal(*, wait: bool) -> Iterator[None]:
    """Within, this thread launches no kernel that is not compiled yet, so that nothing of use is computed.

    On leaving, everything that it would have launched is compiled; unless one does not `wait`, in the background.
    """
    missing: Missing = {}
    with _ONE_AT_A_TIME, _putting_off(missing), _Zeros():
        yield
    if wait:
        with ThreadPoolExecutor(
            usable_cpus(), "compile", torch.cuda.set_device, (torch.cuda.current_device(),)
        ) as pool:
            for _compiled in pool.map(_compile, [kernel for kernel, _ in missing], missing.values()):
                pass  # raises what the compiler did
    elif missing:
        Background(missing).start()


@contextmanager
def _putting_off(missing: Missing) -> Iterator[None]:
    here = threading.get_ident()

    def put_off(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton asks this before it compiles. True: it shall not, nor launch."""
        if threading.get_ident() != here:
            return False
        missing[fn.jit_function, compile["key"]] = compile["specialization_data"]
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = put_off
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


class Background:
    """Compiles in a few threads, in the order in which kernels were met. What is needed before its turn is compiled by
    whoever needs it; what fails here fails there again, and is said there."""

    def __init__(self, missing: Missing) -> None:
        self._left = deque((kernel, how) for (kernel, _), how in missing.items())
        device = torch.cuda.current_device()
        self._threads = [threading.Thread(None, self._work, THREADS, (device,), daemon=True) for _ in range(_BESIDE)]

    def start(self) -> None:
        logger.debug("%d kernels for larger batches are compiled in the background", len(self._left))
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)  # no thread may be in the compiler when it is unloaded

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Once those that are being compiled are done."""
        self._left.clear()
        self.join()

    def _work(self, device: int) -> None:
        torch.cuda.set_device(device)
        while self._left:
            try:
                kernel, how = self._left.popleft()
            except IndexError:
                break  # the other thread was faster
            try:
                _compile(kernel, how)
            except Exception as error:
                logger.debug("a kernel could not be compiled ahead: %s", error)


def _compile(kernel: Any, specialization: str) -> Any:
    """With what launches it, which is compiled, too."""
    return kernel.preload(specialization).run
