"""Times what preemption chooses between: copying blocks to the host and back, or computing tokens. Worker process.

Runs before the first step, on blocks that hold nothing yet; prompt tokens are written to the null block.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from kvasir.kernels.upload import upload
from kvasir.messages import NewRow, RowSampling, StepCosts, StepPlan
from kvasir.worker.model_runner import ModelRunner

MOST_TOKENS = 2048  # enough for the device to be busy
MOST_BLOCKS = 64
RUNS = 2  # after one that compiles kernels and touches memory


def measure_costs(runner: ModelRunner, max_num_batched_tokens: int) -> StepCosts:
    num_tokens = min(MOST_TOKENS, max_num_batched_tokens, runner.rows.tables.shape[1] * runner.rows.block_size)
    compute = _best(lambda: _prompt(runner, num_tokens), runner.device)
    num_blocks = min(MOST_BLOCKS, runner.kv_memory.num_blocks - 1, runner.host_memory.num_blocks - 1)
    copy = _best(lambda: _round_trip(runner, num_blocks), runner.device)
    return StepCosts(copy / (2 * num_blocks), compute / num_tokens)


def _best(run: Callable[[], None], device: torch.device) -> float:
    """Seconds."""
    times = []
    for _ in range(1 + RUNS):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prompt(runner: ModelRunner, num_tokens: int) -> None:
    """One row's prompt, its blocks all null."""
    runner.execute(
        StepPlan(
            rows=np.zeros(1, np.int32),
            num_tokens=np.array([num_tokens], np.int32),
            samples=np.ones(1, np.bool_),
            token_ids=np.zeros(num_tokens, np.int32),
            bounds=np.array([num_tokens], np.int32),
            num_decodes=int(num_tokens == 1),
            new_rows=[NewRow(0, 0, RowSampling())],
            table_index=np.zeros(0, np.int32),
            table_block=np.zeros(0, np.int32),
            copies=np.zeros((0, 2), np.int32),
        )
    )
    runner.sample().result()


def _round_trip(runner: ModelRunner, num_blocks: int) -> None:
    blocks = np.arange(1, num_blocks + 1, dtype=np.int32)
    (on_device,) = upload([blocks], runner.device)
    runner.host_memory.exchange(blocks, blocks, on_device, on_device)
