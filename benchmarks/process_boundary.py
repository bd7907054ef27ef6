"""What it costs that the engine is in a process of its own: real core, service and client, and a fake device.

    python benchmarks/process_boundary.py [--json FILE] [--check]

Every row decodes one token per step. The loop's turn with the service is compared with the bare step in the same
process, and the client says when it had each step's output in its hands. Clocks are the machine's, so both agree.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parent.parent))  # run it from a checkout without installing

from kvasir.bench.report import commit, hardware, table
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.engine.liveness import Address, ClientLiveness, make_directory
from kvasir.engine.service import EngineService
from kvasir.engine.transport import Progress
from kvasir.errors import KvasirError
from kvasir.executor.fake import delayed, fake_config
from kvasir.frontend.clients.engine_client import EngineClient
from kvasir.messages import EngineOutput, EngineRequest
from kvasir.sampling.startup_processors import StartupProcessors

RUNNING = (1, 64, 256, 1024)
PROMPT = 128
WARM_UP_STEPS = 64
STEP_SECONDS = 0.002  # of the device, where it takes time
LIMIT_US = 100.0  # added to a step of 256
OWNERS: list[object] = []  # the owners' ends of liveness sockets; closing one would end its engine


@dataclass(frozen=True)
class Figure:
    """Microseconds, medians unless said otherwise."""

    running: int
    device_ms: float  # a step takes on the device
    bare_step_us: float  # schedule, execute, update, in the caller's process
    step_us: float  # the same between two turns of the service
    turn_us: float  # with messages taken and outputs sent
    latency_us: float  # from the end of a step until the client has decoded its output
    latency_p99_us: float
    decode_us: float  # of which decoding

    @property
    def added_us(self) -> float:
        return self.turn_us - self.bare_step_us


def middle(running: int, delay: float, num_steps: int, rounds: int) -> Figure:
    """The round of the middle: others may use the machine, too."""
    figures = [measure(running, delay, num_steps) for _ in range(rounds)]
    return sorted(figures, key=lambda figure: figure.added_us)[rounds // 2]


def requests(running: int, keys: Callable[[], int], num_steps: int) -> list[EngineRequest]:
    rng = np.random.default_rng(0)
    max_tokens = num_steps + WARM_UP_STEPS + 64
    return [EngineRequest(keys(), rng.integers(0, 50, PROMPT).astype(np.int32), max_tokens) for _ in range(running)]


def make_core(running: int, delay: float, num_steps: int) -> EngineCore:
    config = fake_config(
        max_model_len=PROMPT + num_steps + 256, max_num_seqs=running, max_num_batched_tokens=max(16384, running)
    )
    return build_core(config, delayed(config, delay))


def bare_steps(running: int, delay: float, num_steps: int) -> np.ndarray:
    core = make_core(running, delay, num_steps)
    for request in requests(running, iter(range(running)).__next__, num_steps):
        core.add(request)
    for _ in range(WARM_UP_STEPS):
        core.run_step()
    return np.array([timed(core.run_step) for _ in range(num_steps)])


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(running: int, delay: float, num_steps: int) -> Figure:
    bare = bare_steps(running, delay, num_steps)
    directory = make_directory(1)
    address = Address(directory, 0)
    owner, kept = Pipe()
    OWNERS.append(kept)
    liveness = ClientLiveness(owner, os.getppid(), address)
    liveness.config = fake_config()
    liveness.start()
    core = make_core(running, delay, num_steps)
    service = EngineService(core, StartupProcessors(None), address.messages, liveness, Progress(address.progress, True))
    command = [sys.executable, __file__, "--client", directory, "--running", str(running), "--steps", str(num_steps)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE)
    steps: list[float] = []
    ends: list[float] = []
    step = core.run_step

    def timed_step() -> EngineOutput:
        started = time.perf_counter()
        output = step()
        steps.append(time.perf_counter() - started)
        if len(output.keys):
            ends.append(time.monotonic())
        return output

    core.run_step = timed_step  # type: ignore[method-assign]
    while core.stats().num_running < running:
        service.run_once()
    for _ in range(WARM_UP_STEPS):
        service.run_once()
    steps.clear()
    turns = np.array([timed(service.run_once) for _ in range(num_steps)])
    measured = np.array(steps)
    while core.has_work():
        service.run_once()
    came, decoded = (np.array(each) for each in pickle.load(client.stdout))  # type: ignore[arg-type]
    client.wait()
    service.close()
    address.remove()
    latency = (came - np.array(ends[: len(came)]))[WARM_UP_STEPS : WARM_UP_STEPS + num_steps]
    medians = [float(np.median(each)) * 1e6 for each in (bare, measured, turns, latency)]
    bare_us, step_us, turn_us, latency_us = medians
    return Figure(
        running, delay * 1e3, bare_us, step_us, turn_us, latency_us,
        float(np.quantile(latency, 0.99)) * 1e6, float(np.median(decoded)) * 1e6,
    )  # fmt: skip


def conditions(figures: Sequence[Figure]) -> list[tuple[str, bool]]:
    """What must hold, and whether it does."""
    added = [figure.added_us for figure in figures if figure.running == 256 and not figure.device_ms]
    return [
        (f"256 running: the boundary adds {us:.0f} us to a step, under {LIMIT_US:.0f}", us < LIMIT_US) for us in added
    ]


def run_client(directory: str, running: int, num_steps: int) -> None:
    """Adds the requests, reads until they end, and says when each step's output was there."""
    client = EngineClient.attach(directory)
    client.listener = Ignore()
    (connection,) = client.connections
    for request in requests(running, partial(next, client.keys), num_steps):
        client.add(request)
    came: list[float] = []
    decoded: list[float] = []
    while client.num_unfinished:
        connection.socket.poll()
        while connection.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            started = time.perf_counter()
            client.receive(limit=1)
            decoded.append(time.perf_counter() - started)
            came.append(time.monotonic())
    pickle.dump((came, decoded), sys.stdout.buffer)
    sys.stdout.flush()
    client.close()


class Ignore:
    """A listener that drops the outputs: only their arrival is measured."""

    def on_output(self, output: EngineOutput) -> None:
        pass

    def on_refusal(self, key: int, error: KvasirError) -> None:
        raise error

    def on_death(self, error: KvasirError) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING, metavar="N", help="requests at once")
    parser.add_argument("--steps", type=int, default=500, help="steps measured per figure (default: 500)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the middle one counts (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the condition does not hold")
    parser.add_argument("--client", metavar="DIRECTORY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        run_client(arguments.client, arguments.running[0], arguments.steps)
        return 0
    figures = [
        middle(running, delay, arguments.steps, arguments.rounds)
        for delay in (0.0, STEP_SECONDS)
        for running in arguments.running
    ]
    code = commit() or "no checkout"
    print(f"microseconds per steady decode step, {arguments.steps} steps each; {hardware('cpu')}, commit {code}\n")
    columns = ["running", "device ms", "bare step", "step", "turn", "added", "latency", "latency p99", "decode"]
    rows = [
        [str(f.running), f.device_ms, f.bare_step_us, f.step_us, f.turn_us, f.added_us, f.latency_us, f.latency_p99_us,
         f.decode_us]
        for f in figures
    ]  # fmt: skip
    print(table(columns, rows) + "\n")
    held = conditions(figures)
    for text, holds in held:
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")
    if arguments.json:
        record = {"hardware": hardware("cpu"), "commit": commit(), "steps": arguments.steps}
        record["figures"] = [{**asdict(f), "added_us": f.added_us} for f in figures]
        record["conditions"] = [{"text": text, "holds": holds} for text, holds in held]
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(arguments.check and not all(holds for _, holds in held))


if __name__ == "__main__":
    sys.exit(main())
