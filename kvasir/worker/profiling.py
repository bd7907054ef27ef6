"""Steps and timings from before the first request: the largest step, whose memory is measured, and the costs between
which preemption chooses, copying blocks to the host or computing tokens again. Worker process.

Costs are measured on blocks that hold nothing yet; prompt tokens are written to the null block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
import torch

from kvasir.kernels.layout import upload
from kvasir.messages import (
    MIN_GROUP_ROWS,
    Extras,
    Int32Array,
    NewRow,
    PrefixGroups,
    RowPooling,
    RowSampling,
    StepCosts,
    StepPlan,
)
from kvasir.worker.memory import LARGEST_GRAPH
from kvasir.worker.model_runner import ModelRunner

MAX_TOKENS = 2048  # enough for the device to be busy
MAX_BLOCKS = 64
DECODES = (1, 4, 16, 48, 100, 200, 400)  # beside a prompt: attention cuts sequences in ways that depend on their number
RUNS = 2  # after one that compiles kernels and touches memory


def largest_step(
    max_rows: int, max_tokens: int, max_model_len: int, task: str | None = None, num_drafts: int = 0
) -> StepPlan:
    """All rows sample with the stages that take most memory, at each of their drafts, or ask for a pooling task, and
    the rest of the token budget is prompt."""
    num_rows = min(max_rows, max_tokens)
    drafts = min(num_drafts, max_tokens // num_rows - 1, max_model_len - 1)
    spare = max_tokens - num_rows * (1 + drafts)
    lengths = np.full(num_rows, 1 + drafts, np.int32)
    for row in range(num_rows - 1, -1, -1):
        added = min(spare, max_model_len - int(lengths[row]))
        lengths[row] += added
        spare -= added
    extras = Extras(1, presence_penalty=1.0, top_ema_p=0.9, top_ema_d=1)
    sampling = RowSampling(temperature=1.0, top_p=0.9, top_k=10, min_p=0.1, extras=extras)
    plan = _plan(lengths, sampling, np.zeros(1, np.int32), task)
    if drafts:
        plan.drafts = np.full(num_rows, drafts, np.int32)
    return plan


def pooling_steps(max_rows: int, max_tokens: int, max_model_len: int, tasks: tuple[str, ...]) -> Iterator[StepPlan]:
    """Steps that together launch every kernel variant of a pooling model: texts of all lengths for which attention has
    variants, alone and many at once, for each task."""
    for task, length in product(tasks, (1, 2, 32, 128, 1024, max_model_len)):
        length = min(length, max_model_len, max_tokens)
        for count in (1, 2, min(max_rows, 64)):
            if count <= max_rows and count * length <= max_tokens:
                yield _plan(np.full(count, length, np.int32), RowSampling(), None, task)


def steps_to_compile(
    max_rows: int, max_tokens: int, max_model_len: int, *, has_graphs: bool = True
) -> Iterator[StepPlan]:
    """Steps that together launch every kernel variant of steps that are not graphs: prompts alone, beside numbers of
    decodes for which attention has variants, short and long, with and without a shared prefix, in chunks that differ
    much, and with each kind of sampling; and as many tokens as there can be, by powers of two, because products of
    experts have tiles for numbers of tokens. Without graphs also decodes alone: one row, for which there are kernels of
    their own, and more. What is computed means nothing."""
    plan = partial(_plan, ahead=2)  # a drafter drafts after the step
    chunk = max(2, min(max_tokens, LARGEST_GRAPH + 76, max_model_len))
    longest = min(max_model_len, 4096)
    plain, filtered = RowSampling(temperature=1.0), RowSampling(temperature=1.0, top_p=0.9, top_k=10, min_p=0.1)
    penalties = Extras(1, presence_penalty=1.0)
    lists = Extras(1, logit_bias=((0, 1.0),), forbidden_token_ids=(0,), bad_words=((0,), (0, 0)))
    for count in () if has_graphs else (1, 2):
        if count <= min(max_rows, max_tokens):
            yield plan(np.ones(count, np.int32), plain, None)
    yield plan(np.array([chunk], np.int32), plain, None)
    for sampling in (
        filtered,
        RowSampling(temperature=1.0, extras=penalties),
        RowSampling(temperature=1.0, top_p=0.9, extras=lists, logprobs=2),
        RowSampling(temperature=1.0, stop_token_ids=(0,), banned_until=9, logprobs=0),
        RowSampling(temperature=1.0, extras=Extras(1, prompt_logprobs=1, logprob_token_ids=(0,)), logprobs=1),
    ):
        yield plan(np.array([1, min(chunk, 8)], np.int32), sampling, np.zeros(2, np.int32))
    counts = sorted({min(count, max_rows - 1, max_tokens - 2) for count in DECODES})
    for count, bound, groups in product([each for each in counts if each > 0], (32, longest), (False, True)):
        lengths = np.array([1] * count + [min(chunk, max_tokens - count)], np.int32)
        step = plan(lengths, plain, None)
        step.bounds[:count] = min(bound, max_model_len)
        if groups:
            if count < MIN_GROUP_ROWS:
                continue
            members = np.arange(count, dtype=np.int32)
            step.shared = PrefixGroups(np.array([16], np.int32), np.array([0, count], np.int32), members)
        step.copies = np.zeros((1, 2), np.int32)
        yield step
    for tokens in _doubled(LARGEST_GRAPH + 1 if has_graphs else 2, max_tokens):
        rows = -(-tokens // max_model_len)
        if rows <= max_rows:
            lengths = np.full(rows, max_model_len, np.int32)
            lengths[-1] = tokens - (rows - 1) * max_model_len
            yield plan(lengths, plain, None)
    many = min(max_rows, 200, max_tokens // 4)
    if many > 1:
        yield plan(np.array([2] * (many - 1) + [max(2, min(chunk, max_tokens - 2 * many))], np.int32), plain, None)


def _doubled(first: int, last: int) -> Iterator[int]:
    """`first`, twice as much, and so on, and `last`; nothing if that is less."""
    while first < last:
        yield first
        first *= 2
    if first < 2 * last:
        yield last


def _plan(
    num_tokens: Int32Array,
    sampling: RowSampling,
    token_ids: Int32Array | None,
    task: str | None = None,
    ahead: int = 0,
) -> StepPlan:
    """A step of new rows, all of which sample alike, or ask for the same pooling task. `ahead`: drafts of each row for
    the next step."""
    count = len(num_tokens)
    pooling = [None if task is None else RowPooling(task, length) for length in num_tokens.tolist()]
    return StepPlan(
        rows=np.arange(count, dtype=np.int32),
        num_tokens=num_tokens,
        samples=np.full(count, task is None),
        token_ids=np.zeros(int(num_tokens.sum()), np.int32),
        bounds=num_tokens.copy(),
        num_decodes=int((num_tokens == 1).sum()),
        new_rows=[NewRow(row, 0, sampling, token_ids, pooling[row]) for row in range(count)],
        table_index=np.zeros(0, np.int32),
        table_block=np.zeros(0, np.int32),
        copies=np.zeros((0, 2), np.int32),
        wants_logprobs=sampling.logprobs is not None,
        ahead=np.full(count, ahead, np.int32) if ahead else None,
    )


def measure_costs(runner: ModelRunner, max_num_batched_tokens: int) -> StepCosts:
    num_tokens = min(MAX_TOKENS, max_num_batched_tokens, runner.rows.tables.shape[1] * runner.rows.block_size)
    compute = _best(lambda: _prompt(runner, num_tokens), runner.device)
    num_blocks = min(MAX_BLOCKS, runner.kv_memory.num_blocks - 1, runner.host_memory.num_blocks - 1)
    copy = _best(lambda: _round_trip(runner, num_blocks), runner.device)
    return StepCosts(copy / (2 * num_blocks), compute / num_tokens)


def measure_steps(runner: ModelRunner, max_num_batched_tokens: int) -> list[tuple[int, float]]:
    """Tokens and seconds of a step of one token and of prompts, for a device that runs no graphs."""
    most = min(MAX_TOKENS, max_num_batched_tokens, runner.rows.tables.shape[1] * runner.rows.block_size)
    sizes = [1, *(size for size in (64, 128, 256, 512, 1024, MAX_TOKENS) if size < most), most]
    return [(size, _best(lambda size=size: _prompt(runner, size), runner.device)) for size in sizes]  # type: ignore[misc]


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
    task = next(iter(runner.model.poolers), None)
    runner.execute(_plan(np.array([num_tokens], np.int32), RowSampling(), None, task))
    runner.sample().result()


def _round_trip(runner: ModelRunner, num_blocks: int) -> None:
    blocks = np.arange(1, num_blocks + 1, dtype=np.int32)
    (on_device,) = upload([blocks], runner.device)
    runner.host_memory.exchange(blocks, blocks, on_device, on_device)
