"""The worker in the core's own process."""

from __future__ import annotations

from importlib import import_module

from kvasir.config import EngineConfig
from kvasir.messages import KVSpec, StepFuture, StepPlan
from kvasir.platforms.cpu_features import prepare_cpu


class UniprocExecutor:
    def __init__(self, config: EngineConfig) -> None:
        prepare_cpu()  # must come before torch, which the worker imports
        self._worker = import_module("kvasir.worker.worker").Worker(config)
        self.overlaps = config.device.device != "cpu"

    def kv_spec(self) -> KVSpec:
        return self._worker.kv_spec()

    def available_kv_bytes(self) -> int:
        return self._worker.available_kv_bytes()

    def allocate_kv(self, num_blocks: int) -> None:
        self._worker.allocate_kv(num_blocks)

    def execute(self, plan: StepPlan) -> None:
        self._worker.execute(plan)

    def sample(self) -> StepFuture:
        return self._worker.sample()

    def close(self) -> None:
        self._worker.close()
