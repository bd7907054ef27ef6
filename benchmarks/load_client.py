"""Measures the highest rate of `kvasir bench serve`'s client: chunks per second of its CPU time, with canned streams.

The server is a process that answers every request with the same chunks, one write each, as fast as they are read. It
may be the slower of the two; the figure per second of the client's CPU time is valid anyway, also on a busy machine.

usage: load_client.py [--clients 1 64 256] [--chunks 400] [--requests 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvasir.bench.serve import load
from kvasir.bench.serve.client import LoadClient, Target

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps({"prompt": "x", "stream": True}).encode()


def frame(event: bytes) -> bytes:
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunk(**more: object) -> bytes:
    """As large as a server's."""
    choice = {"index": 0, "text": " the", "logprobs": None, "finish_reason": None, "stop_reason": None}
    body = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1700000000, "model": "a-model-of-mine"}
    return frame(json.dumps({**body, "system_fingerprint": "kvasir-0.1.0", "choices": [choice], **more}).encode())


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunks: int) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": chunks, "total_tokens": chunks + 1}
    last = chunk(usage=usage) + frame(b"[DONE]") + b"0\r\n\r\n"
    one = chunk()
    while await reader.read(1 << 16):
        writer.write(HEAD)
        for _ in range(chunks - 1):
            writer.write(one)
            await asyncio.sleep(0)  # the next client's turn
            await writer.drain()
        writer.write(last)
    writer.close()


def serve(pipe: Connection, chunks: int) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: answer(r, w, chunks), "127.0.0.1", 0, backlog=1024)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def measure(port: int, clients: int, requests: int) -> load.Outcome:
    client = LoadClient(Target(f"http://127.0.0.1:{port}/v1/completions", {}))
    try:
        count = clients * requests
        return await load.run(client, load.LoadPlan([BODY] * count, [0.0] * count, clients))
    finally:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--chunks", type=int, default=400)
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    options = parser.parse_args()
    import uvloop

    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, options.chunks), daemon=True)
    server.start()
    try:
        port = ours.recv()
        print(f"{'clients':>8} {'chunks/s':>10} {'client cpu':>11} {'chunks per client core':>23}")
        for clients in options.clients:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                outcome = runner.run(measure(port, clients, options.requests))
            assert all(each.ok and each.num_tokens == options.chunks for each in outcome.answers)
            rate = sum(len(each.times) for each in outcome.answers) / outcome.seconds
            print(f"{clients:>8} {rate:>10,.0f} {outcome.client_cpu:>10.0%} {rate / outcome.client_cpu:>23,.0f}")
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
