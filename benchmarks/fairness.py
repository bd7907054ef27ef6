"""One API key floods a server, another asks now and then: the other's time to the first token, and the throughput.

    python benchmarks/fairness.py [MODEL] [--requests 500] [--rows 256] [--tokens 64] [--json FILE]

The flood runs twice under each policy: alone, and with the other key's questions. The starter model is the default.
Flags that the script does not know go to the server; write them as --flag=value.
Throughput is the flood's output tokens per second of the engine's CPU time as well as per second, since other load on
the machine slows the latter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # run it from a checkout without installing

from kvasir.bench.report import commit
from kvasir.models.hub import find_starter_model

ROOT = Path(__file__).parent.parent
QUESTIONS = 8


class Server:
    def __init__(self, model: str, policy: str, rows: int, flags: list[str]) -> None:
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        command = [sys.executable, "-m", "kvasir", "serve", model, "--host", "127.0.0.1", "--port", "0"]
        command += ["--api-key", "flood", "--api-key", "other", "--max-num-seqs", str(rows)]
        command += ["--scheduling-policy", policy, "--max-model-len", "1024", *flags]
        with self.log.open("w") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.url = ""

    def wait_until_ready(self) -> None:
        while True:
            assert self.process.poll() is None, f"the server ended: see {self.log}"
            lines = [line for line in self.log.read_text().splitlines() if "listening on " in line]
            if lines:
                self.url = lines[0].rpartition(" ")[2]
                try:
                    if httpx.get(f"{self.url}/ready", timeout=10).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
            time.sleep(0.3)

    def engine_seconds(self) -> float:
        children = psutil.Process(self.process.pid).children(recursive=True)
        times = [each.cpu_times() for each in children if "engine.process" in " ".join(each.cmdline())]
        return sum(each.user + each.system for each in times)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


async def first_token(client: httpx.AsyncClient, key: str, prompt: str, max_tokens: int) -> float:
    """Seconds until the first token of a stream, which is read to its end."""
    started, first = time.monotonic(), 0.0
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.status_code
        async for line in answer.aiter_lines():
            if line.startswith("data:") and not first:
                first = time.monotonic() - started
    return first


async def flood(server: Server, options: argparse.Namespace, asks: bool) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
        await first_token(client, "other", "Warm up", 4)
        started, used = time.monotonic(), server.engine_seconds()
        tasks = [
            asyncio.create_task(first_token(client, "flood", f"Story number {i}: once upon a time", options.tokens))
            for i in range(options.requests)
        ]
        waited: list[float] = []
        await asyncio.sleep(3)
        while asks and len(waited) < QUESTIONS and not all(task.done() for task in tasks):
            waited.append(await first_token(client, "other", f"Question number {len(waited)}: what is", 8))
            await asyncio.sleep(0.5)
        await asyncio.gather(*tasks)
    seconds, used = time.monotonic() - started, server.engine_seconds() - used
    tokens = options.requests * options.tokens + 8 * len(waited)
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_engine_second": round(tokens / used, 1),
        "seconds": round(seconds, 1),
        "load": round(os.getloadavg()[0], 1),
        "first_tokens": [round(each, 2) for each in waited],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--policies", nargs="+", default=["fair", "fcfs"])
    parser.add_argument("--json", type=Path, help="append the results to this file")
    options, flags = parser.parse_known_args()
    model = options.model or str(find_starter_model())
    for policy in options.policies:
        server = Server(model, policy, options.rows, flags)
        try:
            server.wait_until_ready()
            for asks in (False, True):
                result = {
                    "fairness": Path(model).name,
                    "commit": commit(),
                    "policy": policy,
                    "rows": options.rows,
                    "requests": options.requests,
                    "tokens": options.tokens,
                    "flags": flags,
                    "asks": asks,
                    **asyncio.run(flood(server, options, asks)),
                }
                print(json.dumps(result), flush=True)
                if options.json is not None:
                    with options.json.open("a") as file:
                        file.write(json.dumps(result) + "\n")
        finally:
            server.close()


if __name__ == "__main__":
    main()
