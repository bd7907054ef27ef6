"""Many clients with one text each against an embedding server, beside the same texts offline.

    python benchmarks/cpu/embed_clients.py MODEL [--clients 200] [--texts 1000]

Starts `kvasir serve MODEL`, lets the clients send one text after another over HTTP, stops the server, and embeds the
same texts by LLM.embed. Prints texts per second of both and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time

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
        served = asyncio.run(serve_rate(url, texts, args.clients))
    finally:
        server.terminate()
        server.wait()
    with LLM(args.model, dtype=args.dtype) as llm:
        llm.embed(texts[:50], truncate_prompt_tokens=-1, use_tqdm=False)
        started = time.perf_counter()
        llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        offline = len(texts) / (time.perf_counter() - started)
    print(json.dumps({"served texts/s": served, "offline texts/s": offline, "ratio": served / offline}, indent=1))


if __name__ == "__main__":
    main()
