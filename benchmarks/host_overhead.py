"""Measures the host's cost of a steady decode step: real scheduler, cache and messages, a device that takes no time.

    python benchmarks/host_overhead.py [--json FILE] [--check]

Every row decodes one token per step. Prompt lengths are staggered, so that in each step the same share of the rows
enters a new block. Needs numpy only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # run it from a checkout without installing

from kvasir.bench.report import commit, hardware, table
from kvasir.engine.cache.manager import KVCacheManager
from kvasir.engine.core import EngineCore
from kvasir.engine.policies import FairShare
from kvasir.engine.scheduler import Limits, Scheduler
from kvasir.executor.fake import DelayExecutor
from kvasir.messages import EngineRequest

RUNNING = (1, 64, 256, 1024)
BLOCK_SIZES = (16, 64)
STAGGER = 64  # prompt lengths differ by up to so much: a multiple of every block size
SHORTEST_PROMPT = 128
WARM_UP_STEPS = 64
LIMIT_US = 300.0  # for 1024 running
LIMIT_PER_ROW_US = 0.1  # of the 960 rows that 1024 running have more than 64


@dataclass(frozen=True)
class Figure:
    """Microseconds per step."""

    running: int
    block_size: int
    stream: bool
    median_us: float
    mean_us: float
    p99_us: float


def decoding_core(running: int, block_size: int, stream: bool, num_steps: int) -> EngineCore:
    """A core whose requests have all been prefilled and have at least `num_steps` tokens to go."""
    prefill_steps = 2 + running * (SHORTEST_PROMPT + STAGGER) // 16384
    max_tokens = prefill_steps + WARM_UP_STEPS + num_steps + 8
    max_model_len = SHORTEST_PROMPT + STAGGER + max_tokens
    num_blocks = running * -(-max_model_len // block_size) + 1
    cache = KVCacheManager(num_blocks, block_size, running, max_model_len, True)
    scheduler = Scheduler(Limits(running, 16384), cache, FairShare(), max_model_len)
    core = EngineCore(scheduler, DelayExecutor(block_size), lookahead=1)
    rng = np.random.default_rng(0)
    for key in range(running):
        prompt = rng.integers(0, 50_000, SHORTEST_PROMPT + key % STAGGER).astype(np.int32)
        core.add(EngineRequest(key, prompt, max_tokens, stream=stream))
    for _ in range(prefill_steps + WARM_UP_STEPS):
        core.run_step()
    return core


def measure(running: int, block_size: int, stream: bool, num_steps: int) -> Figure:
    core = decoding_core(running, block_size, stream, num_steps)
    before = core.stats()
    times = np.zeros(num_steps)
    for i in range(num_steps):
        started = time.perf_counter()
        core.run_step()
        times[i] = time.perf_counter() - started
    after = core.stats()
    tokens = after.scheduled_tokens - before.scheduled_tokens
    assert tokens == running * num_steps and after.num_running == running, "not every row decoded in every step"
    times *= 1e6
    return Figure(
        running, block_size, stream, float(np.median(times)), float(times.mean()), float(np.quantile(times, 0.99))
    )


def conditions(figures: Sequence[Figure]) -> list[tuple[str, bool]]:
    """What must hold, per block size and way of output, and whether it does."""
    found = []
    medians = {(f.block_size, f.stream, f.running): f.median_us for f in figures}
    for block_size in BLOCK_SIZES:
        for stream in (False, True):
            small, large = medians[block_size, stream, 64], medians[block_size, stream, 1024]
            where = f"blocks of {block_size}, {'streamed' if stream else 'at the end'}"
            found.append((f"{where}: 1024 running {large:.0f} us, under {LIMIT_US:.0f}", large < LIMIT_US))
            per_row = (large - small) / (1024 - 64)
            found.append(
                (f"{where}: {per_row:.3f} us for a row more, under {LIMIT_PER_ROW_US}", per_row < LIMIT_PER_ROW_US)
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=640, help="steps measured per figure (default: 640)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a condition does not hold")
    arguments = parser.parse_args()
    figures = [
        measure(running, block_size, stream, arguments.steps)
        for block_size in BLOCK_SIZES
        for stream in (False, True)
        for running in RUNNING
    ]
    code = commit() or "no checkout"
    print(f"microseconds per steady decode step, {arguments.steps} steps each; {hardware('cpu')}, commit {code}\n")
    rows = [
        [str(f.running), f.block_size, "streamed" if f.stream else "at the end", f.median_us, f.mean_us, f.p99_us]
        for f in figures
    ]
    print(table(["running", "block size", "tokens sent", "median", "mean", "p99"], rows) + "\n")
    held = conditions(figures)
    for text, holds in held:
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")
    if arguments.json:
        record = {"hardware": hardware("cpu"), "commit": commit(), "steps": arguments.steps}
        record["figures"] = [asdict(f) for f in figures]
        record["conditions"] = [{"text": text, "holds": holds} for text, holds in held]
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(arguments.check and not all(holds for _, holds in held))


if __name__ == "__main__":
    sys.exit(main())
