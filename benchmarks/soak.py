"""A long mixed load on a real model by HTTP: beams, forks, swaps, clients that leave, deadlines, two API processes.

    python benchmarks/soak.py [MODEL] [--minutes 30] [--clients 12] [--json benchmarks/soak.jsonl]

The model is the starter model unless one is given. Blocks are few, so that requests are preempted and swapped. Answers
without sampling are compared with those of the same prompts asked alone before, token by token. Every half minute the
memory of each process is read. The script fails if an answer is an error, a process ends, something is left behind, or
memory grows in the second half. The result is one line of JSON, with the memory over time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # run it from a checkout without installing

from kvasir.bench.report import commit
from kvasir.models.hub import find_starter_model

ROOT = Path(__file__).parent.parent
KEYS = ["alpha", "beta", "gamma"]
PROMPTS = 24
LONGEST = 48  # tokens of an answer that is compared
EVERY = 30.0  # seconds between two readings of memory
SETTINGS = {
    "max_num_seqs": 24,
    "max_model_len": 512,
    "num_gpu_blocks_override": 100,
    "swap_space": 0.05,
    "preemption_mode": "swap",
    "watermark": 0,
    "api_server_count": 2,
}
_WORDS = ["river", "stone", "lamp", "garden", "winter", "letter", "engine", "table", "music", "harbour", "forest"]
_NOTHING_LEFT = ("api_requests_in_flight", "num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")


class Server:
    def __init__(self, model: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        flags += [word for key in KEYS for word in ("--api-key", key)]
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)  # noqa: SIM115
        command = [sys.executable, "-m", "kvasir", "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment)

    def wait_until_ready(self) -> None:
        while True:
            assert self.process.poll() is None, f"the server ended: see {self.log.name}"
            try:
                if httpx.get(f"{self.url}/ready", timeout=10).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)

    def processes(self) -> dict[str, psutil.Process]:
        """Its processes by what they do."""
        found = {"supervisor": psutil.Process(self.process.pid)}
        numbers: Counter[str] = Counter()
        for child in sorted(found["supervisor"].children(recursive=True), key=lambda each: each.pid):
            line = " ".join(child.cmdline())
            kind = "engine" if "engine.process" in line else "api" if "api_process" in line else "other"
            numbers[kind] += 1
            found[kind if kind == "engine" else f"{kind} {numbers[kind]}"] = child
        return found

    def metric(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60).text
        values = re.findall(rf"^kvasir:{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, values))

    def close(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


class Soak:
    def __init__(self, server: Server, seconds: float, clients: int) -> None:
        self.server, self.end, self.clients = server, time.monotonic() + seconds, clients
        self.rng = random.Random(7)
        self.done: Counter[str] = Counter()  # by what clients did
        self.compared = self.equal = 0
        self.wrong: list[str] = []
        self.memory: list[dict[str, float]] = []
        self.prompts = [" ".join(self.rng.choices(_WORDS, k=self.rng.randrange(4, 90))) for _ in range(PROMPTS)]
        self.texts: list[list[int]] = []

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=600, limits=limits) as self.http:
            for prompt in self.prompts:
                answer = await self.ask(KEYS[0], self.body(prompt, LONGEST))
                self.texts.append(answer["choices"][0]["token_ids"])
            watcher = asyncio.create_task(self.watch())
            await asyncio.gather(*(self.client(number) for number in range(self.clients)))
            watcher.cancel()

    async def client(self, number: int) -> None:
        key = KEYS[number % len(KEYS)]
        ways = [self.plain] * 5 + [self.streams] * 4 + [self.forks] * 3 + [self.beams] * 3
        ways += [self.leaves] * 2 + [self.leaves_beams, self.times_out]
        while time.monotonic() < self.end:
            way = self.rng.choice(ways)
            await way(key)
            self.done[way.__name__] += 1

    async def watch(self) -> None:
        started = time.monotonic()
        while True:
            row = {"s": round(time.monotonic() - started), "load": round(os.getloadavg()[0], 1)}
            for name, process in self.server.processes().items():
                row[name] = round(process.memory_info().rss / 2**20, 1)
            self.memory.append({**row, "requests": sum(self.done.values())})
            print(self.memory[-1], flush=True)
            await asyncio.sleep(EVERY)

    # ------------------------------------------------------------ what clients do

    def body(self, prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
        fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"prompt": prompt, "max_tokens": max_tokens, **fixed, **fields}

    async def ask(self, key: str, body: dict[str, Any], *allowed: int) -> Any:
        answer = await self.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        if answer.status_code not in (200, *allowed):
            self.wrong.append(f"{answer.status_code}: {answer.text[:200]}")
        return answer.json()

    def compare(self, which: int, tokens: list[int], count: int) -> None:
        self.compared += 1
        self.equal += tokens == self.texts[which][:count]

    async def plain(self, key: str) -> None:
        which, count = self.rng.randrange(PROMPTS), self.rng.randrange(1, LONGEST)
        answer = await self.ask(key, self.body(self.prompts[which], count))
        self.compare(which, answer["choices"][0]["token_ids"], count)

    async def streams(self, key: str) -> None:
        which, count = self.rng.randrange(PROMPTS), self.rng.randrange(1, LONGEST)
        tokens: list[int] = []
        async for chunk in self.events(key, self.body(self.prompts[which], count, stream=True)):
            tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids") or []]
        self.compare(which, tokens, count)

    async def events(self, key: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        self.wrong.append(line[:200])
                        return
                    yield chunk

    async def forks(self, key: str) -> None:
        n, count = self.rng.choice([2, 3, 4]), self.rng.randrange(2, 60)
        seed = self.rng.randrange(100)
        answer = await self.ask(key, self.body(self.rng.choice(self.prompts), count, n=n, temperature=1.0, seed=seed))
        if [len(choice["token_ids"]) for choice in answer["choices"]] != [count] * n:
            self.wrong.append("a fork is missing or short")

    async def beams(self, key: str) -> None:
        n, count = self.rng.choice([2, 4]), self.rng.choice([4, 24, 100])
        fields = {"timeout": self.rng.choice([0.3, 1.0, 3.0])} if self.rng.random() < 0.5 else {}
        body = self.body(self.rng.choice(self.prompts), count, n=n, use_beam_search=True, **fields)
        await self.ask(key, body, *([504] if fields else []))

    async def leaves(self, key: str) -> None:
        seen, n = self.rng.randrange(1, 20), self.rng.choice([1, 2])
        body = self.body(self.rng.choice(self.prompts), 200, stream=True, n=n, temperature=1.0)
        async for _ in self.events(key, body):
            seen -= 1
            if not seen:
                break

    async def leaves_beams(self, key: str) -> None:
        body = self.body(self.rng.choice(self.prompts), 150, n=4, use_beam_search=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ask(key, body), self.rng.random() * 2)

    async def times_out(self, key: str) -> None:
        await self.ask(
            key, self.body(self.rng.choice(self.prompts), 300, timeout=self.rng.choice([0.05, 0.5, 2.0])), 504
        )


def check(soak: Soak, server: Server, first: dict[str, psutil.Process]) -> list[str]:
    """What went wrong, in sentences."""
    found = [f"an answer was wrong: {each}" for each in soak.wrong[:5]]
    if soak.equal < soak.compared:
        found.append(f"{soak.compared - soak.equal} of {soak.compared} answers differ from those asked alone")
    if {name: each.pid for name, each in server.processes().items()} != {
        name: each.pid for name, each in first.items()
    }:
        found.append("a process was replaced")
    deadline = time.monotonic() + 60
    while any(server.metric(name) for name in _NOTHING_LEFT) and time.monotonic() < deadline:
        time.sleep(1)
    found += [f"{name} is not 0 at the end" for name in _NOTHING_LEFT if server.metric(name)]
    if not server.metric("num_preemptions_swapped_total"):
        found.append("nothing was swapped")
    half = soak.memory[len(soak.memory) // 2 :]
    for name in first:
        if half and half[-1][name] > 1.05 * half[0][name] + 8:
            found.append(f"the memory of {name} grew from {half[0][name]} to {half[-1][name]} MiB in the second half")
    if "Traceback" in Path(server.log.name).read_text(errors="replace"):
        found.append(f"the log has a traceback: {server.log.name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--json", type=Path, help="append the result to this file")
    options = parser.parse_args()
    model = options.model or str(find_starter_model())
    server = Server(model)
    try:
        server.wait_until_ready()
        first = server.processes()
        soak = Soak(server, 60 * options.minutes, options.clients)
        started = time.monotonic()
        asyncio.run(soak.run())
        seconds = time.monotonic() - started
        problems = check(soak, server, first)
        counted = ("num_preemptions_swapped_total", "kv_blocks_swapped_in_total", "generation_tokens_total")
        counts = {name: server.metric(name) for name in counted}
    finally:
        status = server.close()
    if status:
        problems.append(f"the server's exit status is {status}")
    result = {
        "soak": Path(model).name,
        "commit": commit(),
        "minutes": round(seconds / 60, 1),
        "clients": options.clients,
        "settings": SETTINGS,
        "problems": problems,
        "done": dict(soak.done),
        "compared": soak.compared,
        "equal": soak.equal,
        **counts,
        "memory_mib": soak.memory,
    }
    print(json.dumps({name: value for name, value in result.items() if name != "memory_mib"}, indent=1))
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
