"""What the core may ask of whoever runs the model: one process, several, or a fake."""

from __future__ import annotations

from typing import Protocol

from kvasir.messages import DeviceMemory, KVSpec, SampleInputs, StepCosts, StepFuture, StepPlan


class Executor(Protocol):
    overlaps: bool  # whether execute and sample return before the device is done

    def kv_spec(self) -> KVSpec:
        """The shape of one KV block, as the model needs it."""

    def available_kv_bytes(self) -> int:
        """Memory that the KV cache may take, after weights and the largest step. Measured, so call it once."""

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Take the memory, on the device and in the host. Must come before the first step."""

    def measure_costs(self) -> StepCosts:
        """Time what preemption chooses between. Asked, if at all, after `allocate_kv` and before the first step."""

    def memory(self) -> DeviceMemory:
        """Where the memory went. After allocate_kv, for people who ask."""

    def execute(self, plan: StepPlan) -> None:
        """Launch the forward pass of a step."""

    def sample(self, inputs: SampleInputs | None = None) -> StepFuture:
        """Launch sampling for the step last executed; its tokens stay on the device for the next one. `inputs`: what
        the core learned since, for steps that wait for it."""

    def close(self) -> None:
        """Give all memory back. The executor cannot be used afterwards."""
