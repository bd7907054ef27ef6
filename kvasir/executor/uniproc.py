"""The worker in the core's own process: it does all that an executor must, so it is one."""

from __future__ import annotations

from importlib import import_module

from kvasir.config import EngineConfig
from kvasir.executor.base import Executor
from kvasir.platforms.cpu_features import prepare_cpu


def in_process(config: EngineConfig) -> Executor:
    prepare_cpu()  # must come before torch, which the worker imports
    worker: Executor = import_module("kvasir.worker.worker").Worker(config)
    return worker
