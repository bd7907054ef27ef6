"""The threads that compute on the CPU: as many as were asked for, torch's and the library's alike.

Worker process. The library's threads are pinned; the calling thread, which works too, stays where the system puts it
unless cpu_bind says where. torch's threads sleep while the library's work, so both may have as many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from kvasir.config.engine import EngineConfig
from kvasir.distributed.mesh import Mesh
from kvasir.kernels.cpu import library
from kvasir.platforms.limits import parse_cpus, share


def use_threads(config: EngineConfig, mesh: Mesh) -> Callable[[], None]:
    """What is returned gives the calling thread back the CPUs it had."""
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
    if library.library() is not None:  # which computes norms and samples whatever attention runs on
        library.configure(threads, cpus)
    return restore


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """For steps that the library computes: the trifles left to torch are not worth its other threads, which would spin
    for a while afterwards, beside the library's, in wait for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _nothing() -> None:
    return None
