"""Compiles the kernels of a step all at once, on all cores, before the step is run for real.

One after the other they take half a second each, and the first steps need some thirty of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs

from kvasir.platforms.limits import usable_cpus

THREADS = "compile"  # how their names begin
_ONE_AT_A_TIME = threading.Lock()  # the hook is the whole process's
_THIS_THREAD = threading.local()  # whether it rehearses
_EMPTY: dict[Any, Callable[..., Any]] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}


class _Zeros(TorchFunctionMode):
    """What a kernel would have written may be an index into something: let it be one that exists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _EMPTY.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def rehearsal() -> Iterator[None]:
    """Within, this thread launches no kernel that is not compiled yet, so that nothing of use is computed.

    On leaving, everything that it would have launched is compiled.
    """
    assert not getattr(_THIS_THREAD, "rehearses", False), "a rehearsal within a rehearsal would wait for itself"
    here = threading.get_ident()
    missing: dict[tuple[Any, str], str] = {}  # kernel and variant -> how to compile it

    def put_off(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton asks this before it compiles. True: it shall not, nor launch."""
        if threading.get_ident() != here:
            return False
        missing[fn.jit_function, compile["key"]] = compile["specialization_data"]
        return True

    with _ONE_AT_A_TIME:
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = put_off
        _THIS_THREAD.rehearses = True
        try:
            with _Zeros():
                yield
        finally:
            knobs.runtime.jit_cache_hook = before
            _THIS_THREAD.rehearses = False
    if not missing:
        return
    with ThreadPoolExecutor(usable_cpus(), THREADS, torch.cuda.set_device, (torch.cuda.current_device(),)) as pool:
        for _compiled in pool.map(_compile, [kernel for kernel, _ in missing], missing.values()):
            pass  # raises what the compiler did


def _compile(kernel: Any, specialization: str) -> Any:
    """With what launches it, which is compiled, too."""
    return kernel.preload(specialization).run
