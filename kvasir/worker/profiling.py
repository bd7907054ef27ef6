"""Steps and timings from before the first request: the largest step, whose memory is measured, and the costs between
which preemption chooses, copying blocks to the host or computing tokens again. Worker process.

Costs are measured on blocks that hold nothing yet; prompt tokens are written to the null block.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from kvasir.kernels.upload import upload
from kvasir.messages import Extras, Int32Array, NewRow, RowSampling, StepCosts, StepPlan
from kvasir.worker.model_runner import ModelRunner

MAX_TOKENS = 2048  # enough for the device to be busy
MAX_BLOCKS = 64
RUNS = 2  # after one that compiles kernels and touches memory


def largest_step(max_rows: int, max_tokens: int, max_model_len: int) -> StepPlan:
    """All rows sample with the stages that take most memory, and the rest of the token budget is prompt."""
    num_rows = min(max_rows, max_tokens)
    spare = max_tokens - num_rows
    lengths = np.ones(num_rows, np.int32)
    for row in range(num_rows - 1, -1, -1):
        lengths[row] += min(spare, max_model_len - 1)
        spare -= int(lengths[row]) - 1
    extras = Extras(1, presence_penalty=1.0, top_ema_p=0.9, top_ema_d=1)
    sampling = RowSampling(temperature=1.0, top_p=0.9, top_k=10, min_p=0.1, extras=extras)
    return _plan(lengths, sampling, np.zeros(1, np.int32))


def _plan(num_tokens: Int32Array, sampling: RowSampling, token_ids: Int32Array | None) -> StepPlan:
    """A step of new rows, all of which sample alike."""
    count = len(num_tokens)
    return StepPlan(
        rows=np.arange(count, dtype=np.int32),
        num_tokens=num_tokens,
        samples=np.ones(count, np.bool_),
        token_ids=np.zeros(int(num_tokens.sum()), np.int32),
        bounds=num_tokens,
        num_decodes=int((num_tokens == 1).sum()),
        new_rows=[NewRow(row, 0, sampling, token_ids) for row in range(count)],
        table_index=np.zeros(0, np.int32),
        table_block=np.zeros(0, np.int32),
        copies=np.zeros((0, 2), np.int32),
    )


def measure_costs(runner: ModelRunner, max_num_batched_tokens: int) -> StepCosts:
    num_tokens = min(MAX_TOKENS, max_num_batched_tokens, runner.rows.tables.shape[1] * runner.rows.block_size)
    compute = _best(lambda: _prompt(runner, num_tokens), runner.device)
    num_blocks = min(MAX_BLOCKS, runner.kv_memory.num_blocks - 1, runner.host_memory.num_blocks - 1)
    copy = _best(lambda: _round_trip(runner, num_blocks), runner.device)
    return StepCosts(copy / (2 * num_blocks), compute / num_tokens)


def _best(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of the best run."""
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
    """Compute one row's prompt; its blocks are all null."""
    runner.execute(_plan(np.array([num_tokens], np.int32), RowSampling(), None))
    runner.sample().result()


def _round_trip(runner: ModelRunner, num_blocks: int) -> None:
    blocks = np.arange(1, num_blocks + 1, dtype=np.int32)
    (on_device,) = upload([blocks], runner.device)
    runner.host_memory.exchange(blocks, blocks, on_device, on_device)
