"""The executor: how the core runs the model, in its own process or in others. Core process; no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from kvasir.config import startup
from kvasir.config.engine import EngineConfig
from kvasir.messages import (
    AdapterTargets,
    DeviceMemory,
    KVSpec,
    Resource,
    SampleInputs,
    StepCosts,
    StepFuture,
    StepPlan,
)
from kvasir.platforms.cpu import prepare_cpu


class Executor(Protocol):
    """Runs steps on the device. Worker, MultiprocExecutor and the fake executors implement it."""

    overlaps: bool  # whether execute and sample return before the device is done

    def kv_spec(self) -> KVSpec:
        """Return the shape of the KV cache that the model needs."""

    def available_kv_bytes(self) -> int:
        """Return the memory that the KV cache may take besides weights and the largest step. This runs a step to
        measure it, so call it once."""

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate KV blocks on the device and in host memory. Call it before the first step."""

    def measure_costs(self) -> StepCosts:
        """Measure what swapping and recomputing cost. Call it after `allocate_kv` and before the first step."""

    def measure_steps(self) -> list[tuple[int, float]]:
        """Measure how long steps take: numbers of tokens and seconds, first of a step of single tokens. Empty: not
        known. Call it after `allocate_kv` and before the first step."""

    def memory(self) -> DeviceMemory:
        """Return the use of device memory. Call it after `allocate_kv`."""

    def adapter_targets(self) -> AdapterTargets | None:
        """Return what adapters must fit; None if the model takes none."""

    def load(self, slot: int, resource: Resource) -> None:
        """Begin to bring a resource to a slot of the device, beside steps. No later step has a row in the slot until
        `finished_loads` has named it."""

    def finished_loads(self, seconds: float = 0.0) -> list[tuple[int, str | None]]:
        """Return the slots whose loads are done, each with an error or None. Waits up to `seconds` for the first."""

    def execute(self, plan: StepPlan) -> None:
        """Launch the forward pass of a step."""

    def sample(self, inputs: SampleInputs | None = None) -> StepFuture:
        """Launch sampling for the step executed last. The tokens stay on the device for the next step. `inputs` is set
        for a step whose plan has `waits_for_host`."""

    def close(self) -> None:
        """Free all memory. The executor cannot be used afterwards."""


def load_worker(config: EngineConfig) -> Executor:
    """Load a worker in this process; it is an executor."""
    prepare_cpu()  # must come before torch, which the worker imports
    with startup.phase(startup.IMPORTS):
        module = import_module("kvasir.worker.worker")
    worker: Executor = module.Worker(config)
    return worker
