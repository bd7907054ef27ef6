"""Many clients with one text each against an embedding server, beside the same texts offline.

    python benchmarks/cpu/embed_clients.py MODEL [--clients 200] [--texts 1000]

Starts `kvasir serve MODEL`, lets the clients send one text after another over HTTP, stops the server, and embeds the
same texts by LLM.embed. Prints texts per second of both and their ratio; and, for machines that others use, the CPU
time of each process. The rate of a quiet machine with a core for each follows from the busiest process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
from embed import make_texts

from kvasir import LLM

READY_SECONDS = 300


async def serve_rate(url: str, texts: list[str], clients: int) -> float:
    waiting = list(reversed(texts))
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one() -> None:
            while waiting:
                body = {"input": waiting.pop(), "encoding_format": "base64", "truncate_prompt_tokens": -1}
                (await client.post("/v1/embeddings", json=body)).raise_for_status()

        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        return len(texts) / (time.perf_counter() - started)


def wait_for(url: str) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    sys.exit("the server did not become ready")


def family(root: int) -> list[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(entry.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(entry.parent.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    logging.getLogger("kvasir").setLevel(logging.WARNING)
    texts = make_texts(args.texts)
    url = f"http://127.0.0.1:{args.port}"
    flags = ["--port", str(args.port), "--dtype", args.dtype]
    server = subprocess.Popen([sys.executable, "-m", "kvasir", "serve", args.model, *flags])
    try:
        wait_for(url)
        asyncio.run(serve_rate(url, texts[:100], args.clients))
        own = time.process_time()
        before = {process: cpu_seconds(process) for process in family(server.pid)}
        served = asyncio.run(serve_rate(url, texts, args.clients))
        busy = sorted((cpu_seconds(process) - used for process, used in before.items()), reverse=True)
        clients = time.process_time() - own
    finally:
        server.terminate()
        server.wait()
    with LLM(args.model, dtype=args.dtype) as llm:
        llm.embed(texts[:50], truncate_prompt_tokens=-1, use_tqdm=False)
        started, own = time.perf_counter(), time.process_time()
        llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        offline, alone = len(texts) / (time.perf_counter() - started), time.process_time() - own
    rates = {"served texts/s": served, "offline texts/s": offline, "ratio": served / offline}
    used = {"CPU s of the server's processes": busy, "CPU s of the clients": clients, "CPU s offline": alone}
    print(json.dumps(rates | used | {"ratio of the CPU times": alone / busy[0]}, indent=1))


if __name__ == "__main__":
    main()
