"""The worker in the core's own process: it does all that an executor must, so it is one."""

from __future__ import annotations

from importlib import import_module

from kvasir import startup
from kvasir.config.engine import EngineConfig
from kvasir.executor.base import Executor
from kvasir.platforms.cpu_features import prepare_cpu


def in_process(config: EngineConfig) -> Executor:
    prepare_cpu()  # must come before torch, which the worker imports
    with startup.phase(startup.IMPORTS):
        module = import_module("kvasir.worker.worker")
    worker: Executor = module.Worker(config)
    return worker
