"""Compares scheduling policies under overload, in simulated time: the real scheduler, cache and core, a real trace of
arrivals and lengths, and a device that is a formula.

    python benchmarks/scheduling.py [--trace FILE] [--requests 6000] [--loads 1,2,3] [--json FILE]

The trace is one of Azure's LLM inference traces (timestamp, prompt tokens, generated tokens); by default the
conversations under $KVASIR_TEST_DATA/traces. Its arrivals are sped up to a multiple of what the device can serve. Time
is simulated by the formula. Needs numpy only.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # run it from a checkout without installing

from kvasir.bench.report import commit, table
from kvasir.engine.cache.manager import KVCacheManager
from kvasir.engine.core import EngineCore
from kvasir.engine.policies import Context, make_policy
from kvasir.engine.queue import QueueLimits
from kvasir.engine.scheduler import Limits, Scheduler
from kvasir.errors import OverloadedError
from kvasir.executor.fake import DelayExecutor
from kvasir.messages import EngineRequest, FinishReason, RowSampling, StepPlan, StepResult, Terms

# Seconds of a step: round figures near Llama-3.1-8B's in bfloat16 on an H200 (benchmarks/h200), not fitted to them.
STEP, PER_TOKEN, PER_CACHED_TOKEN = 0.0045, 24e-6, 28e-9
MAX_NUM_SEQS, MAX_BATCHED_TOKENS, BLOCK_SIZE = 256, 8192, 64
LONGEST, MOST_GENERATED = 16384, 2048
TENANTS = {"gold": 4.0, "silver": 2.0, "bronze": 1.0}  # weights; the priorities are 0, 1, 2
PATIENCE = {"gold": 15.0, "silver": 30.0, "bronze": 60.0}  # seconds to a deadline
TOKEN, END_OF_TEXT = 7, 8


@dataclass(frozen=True)
class Job:
    """A line of the trace."""

    arrival: float
    num_prompt_tokens: int
    num_generated: int
    tenant: str


@dataclass(frozen=True)
class Case:
    """What one run is made with."""

    name: str
    policy: str
    aging_seconds: float = 0.0
    deadlines: bool = False
    max_queued_requests: int = 0
    watermark: float = 0.01
    least_chance: float = 0.5


PLAIN = [
    Case("fcfs", "fcfs"),
    Case("fcfs, at most 256 wait", "fcfs", max_queued_requests=256),
    Case("priority", "priority"),
    Case("priority, aging 50 s", "priority", aging_seconds=50.0),
    Case("wrr", "wrr"),
]
TIMED = [
    Case("fcfs", "fcfs", deadlines=True),
    Case("deadline", "deadline", deadlines=True),
    Case("deadline, deadline_least_chance=0", "deadline", deadlines=True, least_chance=0.0),
]


@dataclass
class Outcome:
    """What became of the requests of one run; times are seconds from arrival."""

    first: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    backlog_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TENANTS, 0))
    seconds: float = 0.0
    computed_tokens: int = 0
    preemptions: int = 0
    held_back: int = 0
    foreseen: int = 0


class SimulatedDevice(DelayExecutor):
    """Takes what the formula says, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__(BLOCK_SIZE, token=TOKEN)
        self.now = self.busy_until = 0.0
        self.ends = np.zeros(MAX_NUM_SEQS, np.int64)  # by row: how long its text will be

    def clock(self) -> float:
        return self.now

    def execute(self, plan: StepPlan) -> None:
        self._plan = plan
        for new in plan.new_rows:
            self.ends[new.row] = new.sampling.seed  # where the trace's lengths travel: nobody else looks at it
        seconds = STEP + PER_TOKEN * plan.total_tokens + PER_CACHED_TOKEN * int(plan.bounds.sum())
        self.busy_until = max(self.busy_until, self.now) + seconds

    def sample(self, inputs: object = None) -> Simulated:  # type: ignore[override]
        result, plan = super().sample().value, self._plan
        assert plan is not None
        result.token_ids[plan.bounds + 1 >= self.ends[plan.rows], 0] = END_OF_TEXT
        return Simulated(self, result, self.busy_until)


@dataclass
class Simulated:
    """A result that takes simulated time to wait for."""

    device: SimulatedDevice
    value: StepResult
    at: float

    def done(self) -> bool:
        return self.device.now >= self.at

    def result(self) -> StepResult:
        self.device.now = max(self.device.now, self.at)
        return self.value


def read_trace(path: Path, count: int) -> list[Job]:
    """The first requests of a trace, dealt to the tenants at random."""
    rng = np.random.default_rng(0)
    with path.open(encoding="utf-8") as file:
        lines = [line for line, _ in zip(csv.DictReader(file), range(count), strict=False)]
    times = [datetime.fromisoformat(line["TIMESTAMP"][:26]).timestamp() for line in lines]
    names = rng.choice(list(TENANTS), len(lines))
    return [
        Job(at - times[0], int(line["ContextTokens"]), int(line["GeneratedTokens"]), str(name))
        for at, line, name in zip(times, lines, names, strict=True)
    ]


def make_core(case: Case, device: SimulatedDevice, num_blocks: int) -> EngineCore:
    cache = KVCacheManager(num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, LONGEST, False)
    limits = Limits(MAX_NUM_SEQS, MAX_BATCHED_TOKENS, watermark=case.watermark)
    policy = make_policy(
        case.policy, Context(device.clock, aging_seconds=case.aging_seconds, least_chance=case.least_chance)
    )
    queue_limits = QueueLimits(case.max_queued_requests)
    return EngineCore(Scheduler(limits, cache, policy, LONGEST), device, lookahead=1, queue_limits=queue_limits)


def make_request(key: int, job: Job, case: Case) -> EngineRequest:
    terms = Terms(
        arrival=job.arrival or 1e-9,
        priority=list(TENANTS).index(job.tenant) if case.policy == "priority" else 0,
        tenant=job.tenant,
        weight=TENANTS[job.tenant],
        deadline=job.arrival + PATIENCE[job.tenant] if case.deadlines else None,
    )
    # the engine does not know beforehand how much a request will generate
    sampling = RowSampling(seed=job.num_prompt_tokens + job.num_generated, stop_token_ids=(END_OF_TEXT,))
    return EngineRequest(key, np.ones(job.num_prompt_tokens, np.int32), MOST_GENERATED, sampling, terms=terms)


def simulate(jobs: list[Job], case: Case, num_blocks: int) -> Outcome:
    """Run the jobs, each added when its time has come."""
    device = SimulatedDevice()
    core, outcome, next_job = make_core(case, device, num_blocks), Outcome(), 0
    waiting = dict.fromkeys(TENANTS, 0)  # requests without a first token
    while next_job < len(jobs) or core.has_work():
        if not core.has_work():
            device.now = max(device.now, jobs[next_job].arrival)
        while next_job < len(jobs) and jobs[next_job].arrival <= device.now:
            try:
                core.add(make_request(next_job, jobs[next_job], case))
                waiting[jobs[next_job].tenant] += 1
            except OverloadedError:
                outcome.refused.add(next_job)
            next_job += 1
        everybody_waits = all(waiting.values()) and core.stats().num_waiting > MAX_NUM_SEQS
        output = core.run_step()
        for key in output.keys.tolist():
            job, is_first = jobs[key], key not in outcome.first
            if is_first:
                outcome.first[key] = device.now - job.arrival
                waiting[job.tenant] -= 1
            if everybody_waits:  # only then do shares mean something
                outcome.backlog_tokens[job.tenant] += 1 + is_first * job.num_prompt_tokens
        for end in output.finished:
            outcome.done[end.key] = device.now - jobs[end.key].arrival
            if end.reason is FinishReason.TIMEOUT:
                outcome.late.add(end.key)
                waiting[jobs[end.key].tenant] -= end.key not in outcome.first
    stats = core.stats()
    assert stats.num_used_blocks == 0 and len(outcome.done) + len(outcome.refused) == len(jobs)
    outcome.seconds, outcome.computed_tokens = device.now, stats.scheduled_tokens
    outcome.preemptions, outcome.held_back = stats.preemptions, stats.held_back
    outcome.foreseen = stats.timeouts_foreseen
    return outcome


def capacity(jobs: list[Job], num_blocks: int) -> float:
    """Requests per second that the device serves when all of them wait from the start."""
    at_once = [replace(job, arrival=0.0) for job in jobs]
    return len(jobs) / simulate(at_once, Case("all at once", "fcfs"), num_blocks).seconds


def at_load(jobs: list[Job], load: float, per_second: float) -> list[Job]:
    """The same arrivals, so quick that they are `load` times what the device can serve."""
    speed = load * per_second * jobs[-1].arrival / len(jobs)
    return [replace(job, arrival=job.arrival / speed) for job in jobs]


# ---------------------------------------------------------------- what is shown


def quantiles(values: list[float], *shares: float) -> list[float]:
    return [float(np.quantile(values, share)) for share in shares] if values else [float("nan")] * len(shares)


def latencies(jobs: list[Job], per_second: float, loads: list[float], num_blocks: int) -> list[dict[str, object]]:
    """Time to the first token and to the end per policy, and what each tenant gets of them."""
    rows: list[dict[str, object]] = []
    for load in loads:
        for case in PLAIN:
            outcome = simulate(timed := at_load(jobs, load, per_second), case, num_blocks)
            ttft, done = list(outcome.first.values()), list(outcome.done.values())
            row: dict[str, object] = {"load": load, "policy": case.name}
            row |= dict(zip(("TTFT p50", "p90", "p99"), quantiles(ttft, 0.5, 0.9, 0.99), strict=True))
            row |= dict(zip(("done p50", "p99 "), quantiles(done, 0.5, 0.99), strict=True))
            row["refused %"] = 100 * len(outcome.refused) / len(jobs)
            for tenant in TENANTS:
                own = [seconds for key, seconds in outcome.first.items() if timed[key].tenant == tenant]
                row[f"{tenant} p50"] = quantiles(own, 0.5)[0]
            total = sum(outcome.backlog_tokens.values())
            shares = [100 * tokens / total for tokens in outcome.backlog_tokens.values()] if total else []
            row["tokens %"] = " ".join(f"{share:.0f}" for share in shares) or "-"
            rows.append(row)
    return rows


def deadlines(jobs: list[Job], per_second: float, loads: list[float], num_blocks: int) -> list[dict[str, object]]:
    """How many requests are done in time, and how much was computed for those that were not."""
    rows: list[dict[str, object]] = []
    for load in loads:
        for case in TIMED:
            outcome = simulate(at_load(jobs, load, per_second), case, num_blocks)
            in_time = [key for key in outcome.done if key not in outcome.late]
            useful = sum(jobs[key].num_prompt_tokens + jobs[key].num_generated - 1 for key in in_time)
            row: dict[str, object] = {"load": load, "policy": case.name, "in time %": 100 * len(in_time) / len(jobs)}
            for tenant in TENANTS:
                own = [key for key in range(len(jobs)) if jobs[key].tenant == tenant]
                row[f"{tenant} %"] = 100 * len(set(own) & set(in_time)) / len(own)
            row["ended early %"] = 100 * outcome.foreseen / len(jobs)
            row["wasted tokens %"] = 100 * (1 - useful / outcome.computed_tokens)
            rows.append(row)
    return rows


def watermarks(jobs: list[Job], num_blocks: int) -> list[dict[str, object]]:
    """All requests at once, in a cache that they do not fit: preemptions against throughput."""
    rows: list[dict[str, object]] = []
    at_once = [replace(job, arrival=0.0) for job in jobs]
    for share in (0.0, 0.01, 0.02, 0.05, 0.1):
        outcome = simulate(at_once, Case("", "fcfs", watermark=share), num_blocks)
        rows.append(
            {
                "watermark": share,
                "preemptions": outcome.preemptions,
                "steps held back": outcome.held_back,
                "tokens computed": outcome.computed_tokens,
                "requests/s": len(jobs) / outcome.seconds,
            }
        )
    return rows


def show(title: str, rows: list[dict[str, object]]) -> None:
    lines = [[_shown(value) for value in row.values()] for row in rows]
    print(f"{title}\n\n{table([name.strip() for name in rows[0]], lines)}\n")


def _shown(value: object) -> object:
    return value if not isinstance(value, float) else f"{value:.2f}" if value < 1 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="FILE")
    parser.add_argument("--requests", type=int, default=6000, help="of the trace, from its start (default: 6000)")
    parser.add_argument("--loads", default="1,2,3", help="multiples of what the device can serve (default: 1,2,3)")
    parser.add_argument("--blocks", type=int, default=8192, help="of the KV cache, 64 tokens each (default: 8192)")
    parser.add_argument("--few-blocks", type=int, default=2048, help="for the watermark's table (default: 2048)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    data = os.environ.get("KVASIR_TEST_DATA")
    if arguments.trace is None and data is None:
        parser.error("name a trace with --trace, or the directory of test data with KVASIR_TEST_DATA")
    path = arguments.trace or Path(data or "") / "traces" / "AzureLLMInferenceTrace_conv.csv"
    jobs, loads = read_trace(path, arguments.requests), [float(load) for load in arguments.loads.split(",")]
    per_second = capacity(jobs, arguments.blocks)
    print(f"{len(jobs)} requests of {path.name}; the device serves {per_second:.2f} a second; commit {commit()}\n")
    found = {
        "latencies": latencies(jobs, per_second, loads, arguments.blocks),
        "deadlines": deadlines(jobs, per_second, loads, arguments.blocks),
        "watermarks": watermarks(jobs, arguments.few_blocks),
    }
    show("Seconds to the first token and to the end; share of tokens while all tenants wait", found["latencies"])
    show("With a deadline for each request", found["deadlines"])
    show("All at once, in a small cache", found["watermarks"])
    if arguments.json:
        arguments.json.write_text(json.dumps({"commit": commit(), "capacity": per_second, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
