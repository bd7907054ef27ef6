"""Sets the numbers of CPU threads of torch and of the CPU library, and the CPUs that they run on. Worker process.

The library's threads are pinned. The calling thread, which computes too, is pinned only if cpu_bind is set. torch's
threads sleep while the library's work, so both have as many as were asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from kvasir.config.engine import EngineConfig
from kvasir.kernels.cpu import library
from kvasir.layers.mesh import Mesh
from kvasir.platforms.limits import parse_cpus, share


def use_threads(config: EngineConfig, mesh: Mesh) -> Callable[[], None]:
    """Returns a function that restores the calling thread's CPUs."""
    threads = config.device.cpu_threads
    assert threads is not None, "resolve settles it for the CPU"
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    cpus: list[int] | None = None
    restore: Callable[[], None] = _nothing
    if config.device.cpu_bind is not None:
        before = os.sched_getaffinity(0)
        cpus = share(parse_cpus(config.device.cpu_bind), mesh.rank, mesh.size)
        os.sched_setaffinity(0, cpus)
        restore = partial(os.sched_setaffinity, 0, before)
    elif mesh.size > 1 and hasattr(os, "sched_getaffinity"):
        cpus = share(sorted(os.sched_getaffinity(0)), mesh.rank, mesh.size)
    if library.library() is not None:  # it computes norms and samples with every attention backend
        library.configure(threads, cpus)
    return restore


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """For steps that the library computes. torch has little to do in them, and its other threads would spin for a while
    afterwards and slow down the library's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _nothing() -> None:
    return None
