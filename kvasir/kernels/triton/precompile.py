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

THREADS = "compile"  # prefix of the threads' names
_ONE_AT_A_TIME = threading.Lock()  # the hook is one for the whole process
_THIS_THREAD = threading.local()  # `precompiles`: whether it is in `precompile`
_EMPTY: dict[Any, Callable[..., Any]] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}


class _Zeros(TorchFunctionMode):
    """Replaces empty tensors by zeros: a number that a skipped kernel did not write may be used as an index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _EMPTY.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def precompile() -> Iterator[None]:
    """Within this context, this thread skips launches of kernels that are not compiled yet, so that its results mean
    nothing. On leaving, all kernels that it skipped are compiled, in parallel.
    """
    assert not getattr(_THIS_THREAD, "precompiles", False), "precompile within precompile would wait for itself"
    here = threading.get_ident()
    missing: dict[tuple[Any, str], str] = {}  # kernel and variant -> how to compile it

    def skip(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton calls this before it compiles. True: it neither compiles nor launches."""
        if threading.get_ident() != here:
            return False
        missing[fn.jit_function, compile["key"]] = compile["specialization_data"]
        return True

    with _ONE_AT_A_TIME:
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = skip
        _THIS_THREAD.precompiles = True
        try:
            with _Zeros():
                yield
        finally:
            knobs.runtime.jit_cache_hook = before
            _THIS_THREAD.precompiles = False
    if not missing:
        return
    with ThreadPoolExecutor(usable_cpus(), THREADS, torch.cuda.set_device, (torch.cuda.current_device(),)) as pool:
        for _compiled in pool.map(_compile, [kernel for kernel, _ in missing], missing.values()):
            pass  # raises what the compiler did


def _compile(kernel: Any, specialization: str) -> Any:
    """Compile a kernel and its launcher."""
    return kernel.preload(specialization).run
