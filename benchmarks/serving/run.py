"""Starts servers in turn, runs the loads on each, ends it, and writes the record and a report.

    python benchmarks/serving/run.py --out results --loads rate16,shared32 \\
        --engine "kvasir=kvasir serve MODEL --load-format dummy" --engine "vllm=vllm serve MODEL --load-format dummy"

An engine is NAME=COMMAND. `{port}` in the command becomes a free port; without it, `--port` is appended. Every engine
is a fresh process. All flags of loads.py for loads (`--loads`, `--rate`, `--sweep`, ...) are taken here too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loads
import report

RESULTS = Path(__file__).parent / "results.jsonl"
POLL_SECONDS = 0.02
SECONDS_TO_END = 30.0
PROBE = loads.Request(0.0, 4, {"prompt": list(range(10, 26)), "max_tokens": 4, "temperature": 0})


class EngineFailed(Exception):
    """A server that ended, was not ready in time or did not answer."""


def parse_engine(text: str) -> tuple[str, list[str]]:
    """The name and the command of NAME=COMMAND."""
    name, separator, command = text.partition("=")
    if not separator or not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or not command.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND, such as vllm='vllm serve MODEL'")
    return name, shlex.split(command)


def with_port(command: list[str], port: int) -> list[str]:
    if any("{port}" in word for word in command):
        return [word.replace("{port}", str(port)) for word in command]
    return [*command, "--port", str(port)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process group of its own, which is ended afterwards."""
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise EngineFailed(f"cannot start: {error}") from None
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end; kill what is left of its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(process: subprocess.Popen[bytes], url: str, since: float, limit: float) -> float:
    """Seconds from `since` until the server is ready."""
    while not loads.is_ready(url):
        if process.poll() is not None:
            raise EngineFailed(f"ended with status {process.returncode} before it was ready")
        if time.perf_counter() - since > limit:
            raise EngineFailed(f"was not ready within {limit:g} s")
        time.sleep(POLL_SECONDS)
    return time.perf_counter() - since


def first_answer(url: str, since: float) -> dict[str, float]:
    """Times of a request of 16 tokens in and 4 out: seconds from `since` to its first token, and its TTFT."""
    model = loads.served_model(url)
    server, sent = loads.Server(url, model["id"], os.environ.get("OPENAI_API_KEY")), loads.Sent(PROBE)
    asyncio.run(server.send(server.message(PROBE), sent))
    answer = loads.read_answer(sent)
    if answer.error is not None:
        raise EngineFailed(f"did not answer the first request: {answer.error}")
    return {
        "first_answer_s": round(sent.start + answer.ttft - since, 2),
        "first_ttft_ms": round(1e3 * answer.ttft, 2),
    }


def run_engine(
    name: str, command: list[str], arguments: argparse.Namespace, log: Path, out: Path
) -> list[loads.Record]:
    port = free_port()
    url, whole = f"http://127.0.0.1:{port}", with_port(command, port)
    print(f"--- {name}: {shlex.join(whole)}", flush=True)
    since = time.perf_counter()
    with started(whole, log) as process:
        start: dict[str, Any] = {"ready_s": round(wait_for(process, url, since, arguments.start_timeout), 2)}
        if arguments.probe:
            start |= first_answer(url, since)
        print(f"{name}: {start}", flush=True)
        try:
            records = loads.measure(arguments, url, {"label": name, "command": shlex.join(command), **start}, out)
        except OSError as error:
            raise EngineFailed(f"no longer answers: {error}") from None
        if process.poll() is not None:
            raise EngineFailed(f"ended with status {process.returncode} during the loads")
        return records


def main() -> int:
    arguments = parse(sys.argv[1:])
    directory = arguments.out or Path(tempfile.mkdtemp(prefix="serving-"))
    directory.mkdir(parents=True, exist_ok=True)
    out, failed, records = directory / "results.jsonl", [], []
    for name, command in arguments.engine:
        log = directory / f"{name}.log"
        try:
            records += run_engine(name, command, arguments, log, out)
        except EngineFailed as error:
            failed.append(name)
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
            print(f"{name} {error}; the end of {log}:\n{tail}", flush=True)
    for record in records:
        print(loads.line(record))
    page = directory / "report.html"
    page.write_text(report.page(loads.read_records([out])), encoding="utf-8")
    if arguments.record and out.is_file():
        loads.append(records, RESULTS)
    print(f"record: {out}\nreport: {page}" + (f"\nFAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed or any(record["errors"] for record in records) else 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=parse_engine, action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="for record, report and logs; default: a new one")
    parser.add_argument("--record", action="store_true", help=f"also append to {RESULTS.parent.name}/{RESULTS.name}")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS", help="default: 600")
    parser.add_argument(
        "--no-probe", dest="probe", action="store_false", help="send nothing between /ready and the first load"
    )
    loads.add_arguments(parser)
    arguments = parser.parse_args(words)
    names = [name for name, _ in arguments.engine]
    if len(set(names)) < len(names):
        parser.error("every --engine needs a name of its own")
    loads.chosen(arguments)  # a wrong name ends here, not after a start of minutes
    return arguments


if __name__ == "__main__":
    sys.exit(main())
