"""Profiles a steady decode with torch's profiler and prints where the time between steps goes.

    python benchmarks/h200/profile_gaps.py --model qwen3-0.6b --workload nano_bench [--requests 64] [--steps 100]

All prompts of the workload are prefilled first; then every step decodes one token for each. The time of a step without
the profiler is measured as well, because profiling makes launches slower. Lines that start with PROFILE are JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_kvasir  # first: puts the package and the peers' files on the path
import step_trace
import workloads

SETTLE_STEPS = 10


def main() -> None:
    arguments = _parse()
    import torch

    llm = bench_kvasir.build_llm(arguments.model, False, arguments.gpu_mem, arguments.max_model_len)
    for name in arguments.workload.split(","):
        workload = next(w for w in workloads.all_workloads() if w["name"] == name and w["model"] == arguments.model)
        ids = _fill(llm, workload, arguments)
        per_step = _time_steps(llm, arguments.steps)
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "trace.json"
            _profile(torch, llm, arguments.steps, file)
            figures = step_trace.summarise(
                step_trace.read_steps(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])
            )
            if arguments.trace:
                _keep(file, arguments.trace / f"{name}.json.gz")
        figures |= {
            "workload": name,
            "model": arguments.model,
            "running": len(ids),
            "unwatched_step_us": per_step * 1e6,
        }
        print(f"\n{name} ({arguments.model}), {len(ids)} requests, medians of {figures['steps']} steady decode steps")
        print(f"        without the profiler {per_step * 1e3:.3f} ms per step")
        print(step_trace.render(figures))
        print("PROFILE " + json.dumps(figures), flush=True)
        _drain(llm, ids)
    llm.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=sorted(workloads.MODELS))
    parser.add_argument("--workload", required=True, help="names, comma separated")
    parser.add_argument("--requests", type=int, default=0, help="only the first N")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--trace", type=Path, metavar="DIRECTORY", help="keep the traces there")
    parser.add_argument("--gpu-mem", type=float, default=0.9)
    parser.add_argument("--max-model-len", type=int, default=4096)
    return parser.parse_args()


def _fill(llm: Any, workload: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Add the requests, and run until all of them decode. Returns their ids."""
    from kvasir import SamplingParams
    from kvasir.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    most = engine.config.scheduler.max_num_seqs
    prompts = workload["prompts"][: min(arguments.requests or most, most)]
    params = SamplingParams(
        temperature=workload["temperature"],
        max_tokens=2 * (arguments.steps + SETTLE_STEPS) + len(prompts) + 100,  # none ends before the measuring does
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    ids = [f"{workload['name']}-{i}" for i in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    scheduler = engine.client.core.scheduler
    rows = scheduler.rows
    while len(scheduler.waiting) or (rows.num_computed[rows.order] < rows.fed_from[rows.order]).any():
        engine.step()
    if engine.get_num_unfinished_requests() < len(prompts):
        raise SystemExit(f"{workload['name']}: requests ended before all of them ran; take fewer with --requests")
    for _ in range(SETTLE_STEPS):
        engine.step()
    return ids


def _time_steps(llm: Any, steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        llm.llm_engine.step()
    return (time.perf_counter() - started) / steps


def _drain(llm: Any, ids: list[str]) -> None:
    engine = llm.llm_engine
    engine.abort_request(ids)
    while engine.client.has_work():
        engine.step()
    llm.reset_prefix_cache()


# ---------------------------------------------------------------- the profiler


def _profile(torch: Any, llm: Any, steps: int, file: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    core = llm.llm_engine.client.core
    marks = Marks(torch.profiler.record_function)
    marks.put(core)
    try:
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(steps + 1):
                llm.llm_engine.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    finally:
        marks.take_away(core)
    profiler.export_chrome_trace(str(file))


class Marks:
    """Puts an annotation with the step's number around each phase of the engine's loop."""

    def __init__(self, annotate: Any) -> None:
        self.annotate = annotate
        self.step = 0  # last launched
        self.reading = 0  # the one whose result was read last

    def put(self, core: Any) -> None:
        scheduler, executor = core.scheduler, core.executor
        schedule, execute, sample, update = scheduler.schedule, executor.execute, executor.sample, scheduler.update

        def marked_schedule() -> Any:
            with self.annotate(f"{step_trace.PREFIX}schedule#{scheduler.stats.steps + 1}"):
                return schedule()

        def marked_execute(plan: Any) -> None:
            self.step = plan.step
            with self.annotate(f"{step_trace.PREFIX}execute#{plan.step}"):
                execute(plan)

        def marked_sample(inputs: Any = None) -> Any:
            with self.annotate(f"{step_trace.PREFIX}sample#{self.step}"):
                return Watched(sample(inputs), self.step, self)

        def marked_update(result: Any) -> Any:
            with self.annotate(f"{step_trace.PREFIX}update#{self.reading}"):
                return update(result)

        scheduler.schedule, scheduler.update = marked_schedule, marked_update
        executor.execute, executor.sample = marked_execute, marked_sample

    def take_away(self, core: Any) -> None:
        del core.scheduler.schedule, core.scheduler.update, core.executor.execute, core.executor.sample


class Watched:
    """A result on its way; reading it is a phase of its own."""

    def __init__(self, future: Any, step: int, marks: Marks) -> None:
        self.future, self.step, self.marks = future, step, marks

    def done(self) -> bool:
        return bool(self.future.done())

    def result(self) -> Any:
        self.marks.reading = self.step
        with self.marks.annotate(f"{step_trace.PREFIX}wait#{self.step}"):
            return self.future.result()


def _keep(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with file.open("rb") as source, gzip.open(target, "wb") as packed:
        shutil.copyfileobj(source, packed)


if __name__ == "__main__":
    main()
