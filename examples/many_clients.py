"""Sends requests from many clients at once and prints the time to first token and the total throughput.

usage: python examples/many_clients.py [--url http://127.0.0.1:8000/v1] [--clients 16] [--requests 2]
Start a server first: kvasir serve
"""

import argparse
import asyncio
import json
import statistics
import time

import httpx

QUESTIONS = [
    "Name a river.",
    "What do bees make?",
    "Write a line about the sea.",
    "What is 7 times 6?",
    "Tell me a joke.",
]


class Figures:
    def __init__(self) -> None:
        self.first: list[float] = []  # seconds to the first token
        self.tokens = 0


async def ask(client: httpx.AsyncClient, question: str, max_tokens: int, figures: Figures) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    started, waiting = time.perf_counter(), True
    async with client.stream("POST", "chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if waiting and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                figures.first.append(time.perf_counter() - started)
                waiting = False
            figures.tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)


async def run_client(client: httpx.AsyncClient, number: int, options: argparse.Namespace, figures: Figures) -> None:
    for turn in range(options.requests):
        await ask(client, QUESTIONS[(number + turn) % len(QUESTIONS)], options.max_tokens, figures)


async def run(options: argparse.Namespace) -> Figures:
    figures = Figures()
    limits = httpx.Limits(max_connections=options.clients)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(run_client(client, number, options, figures) for number in range(options.clients)))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2, help="requests of each client, one after the other")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    started = time.perf_counter()
    try:
        figures = asyncio.run(run(options))
    except httpx.HTTPStatusError as error:
        raise SystemExit(
            f"The server at {options.url} answered {error.response.status_code}; its log says why."
        ) from None
    except httpx.TransportError:
        raise SystemExit(f"No server answers at {options.url}: start one with `kvasir serve`, or set --url.") from None
    seconds = time.perf_counter() - started
    print(f"{len(figures.first)} answers for {options.clients} clients in {seconds:.1f} s")
    print(f"{figures.tokens} tokens, {figures.tokens / seconds:.1f} tokens/s in total")
    print(f"median time to first token: {1000 * statistics.median(figures.first):.0f} ms")


if __name__ == "__main__":
    main()
