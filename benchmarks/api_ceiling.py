"""Measures how many streamed tokens per second one API process can carry, with an engine that costs almost nothing.

The engine's process runs the real scheduler over an executor without a model. The server and its tokenizer are real;
clients are bare sockets in another process that only look for the end of each stream. Figures are per second and, more
reliable on a busy machine, per second of the API process's CPU time. Tokens of a chunk that is still unsent are merged
into it: `tokens per chunk` shows how often that happened.

usage: api_ceiling.py [--tokenizer MODEL.gguf] [--clients 1 64 256] [--tokens 400] [--step-ms 0] [--seconds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = str(Path(__file__).parent.parent)
sys.path.insert(0, ROOT)  # run it from a checkout without installing

HOST = "127.0.0.1"
TICKS = os.sysconf("SC_CLK_TCK")

SERVER = """
import sys
from functools import partial
from kvasir.executor.fake import delayed, fake_config
from kvasir.server.config import ServerConfig
from kvasir.server.launch import serve
tokenizer, port, delay, token = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
config = fake_config(max_num_seqs=1024, max_model_len=4096, vocab_size=49152, tokenizer=tokenizer)
executor = partial(delayed, delay=delay, token=token)
sys.exit(serve(config, ServerConfig(host="127.0.0.1", port=port, disable_log_stats=True), executor))
"""


def main() -> None:
    options = _arguments()
    for step_ms in options.step_ms:
        rows = _measure(options, step_ms / 1000)
        print(f"\nengine step {step_ms:g} ms")
        print(f"{'clients':>8} {'tokens/s':>10} {'per API core':>13} {'tokens/chunk':>13} {'API cpu':>8} {'engine':>8}")
        for row in rows:
            print(
                f"{row['clients']:>8} {row['rate']:>10,.0f} {row['per_core']:>13,.0f} {row['tokens_per_chunk']:>13.2f} "
                f"{row['api_cpu']:>7.0%} {row['engine_cpu']:>8.0%}"
            )
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps({"step_ms": step_ms, **row}) + "\n")


def _measure(options: argparse.Namespace, delay: float) -> list[dict[str, float]]:
    from kvasir.frontend.text.tokenizer_files import load_tokenizer

    token = load_tokenizer(options.tokenizer).encode(" the", add_special_tokens=False)[0]
    server, port = _start(options, [str(delay), str(token)])
    try:
        engine = _children(server.pid)[0]
        return [_run(options, port, clients, server.pid, engine) for clients in options.clients]
    finally:
        server.terminate()
        server.wait(60)


def _start(options: argparse.Namespace, arguments: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    paths = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "KVASIR_LOG_LEVEL": "WARNING", "PYTHONPATH": paths}
    for _ in range(1 if options.port else 10):  # somebody may take a free port before the server does
        port = options.port or _free_port()
        command = [sys.executable, "-c", SERVER, options.tokenizer, str(port), *arguments]
        server = subprocess.Popen(command, env=environment)
        if asyncio.run(_is_ready(server, port)):
            return server, port
    raise SystemExit("the server did not become ready")


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _run(options: argparse.Namespace, port: int, clients: int, api: int, engine: int) -> dict[str, float]:
    asyncio.run(_load(options, port, clients, 1.0))  # what is made on first use is there now
    before, started = (_cpu(api), _cpu(engine)), time.perf_counter()
    tokens, chunks = asyncio.run(_load(options, port, clients, options.seconds))
    took = time.perf_counter() - started
    api_cpu, engine_cpu = max(1 / TICKS, _cpu(api) - before[0]), _cpu(engine) - before[1]
    return {
        "clients": clients,
        "rate": tokens / took,
        "per_core": tokens / api_cpu,
        "tokens_per_chunk": tokens / max(1, chunks),
        "api_cpu": api_cpu / took,
        "engine_cpu": engine_cpu / took,
    }


# ---------------------------------------------------------------- the clients


async def _load(options: argparse.Namespace, port: int, clients: int, seconds: float) -> tuple[int, int]:
    """Streams one after the other on each of so many connections; at least one."""
    end = time.perf_counter() + seconds
    counts = await asyncio.gather(*(_client(options, port, end) for _ in range(clients)))
    return sum(tokens for tokens, _ in counts), sum(chunks for _, chunks in counts)


async def _client(options: argparse.Namespace, port: int, end: float) -> tuple[int, int]:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": options.tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    ) + body
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    tokens = chunks = 0
    while tokens == 0 or time.perf_counter() < end:
        writer.write(request)
        tail = b""
        while b"[DONE]" not in tail:
            data = await reader.read(1 << 16)
            assert data, f"the connection was closed: {tail!r}"
            chunks += data.count(b'"content":" the')
            tail = tail[-16:] + data
        while not tail.endswith(b"0\r\n\r\n"):
            tail += await reader.read(1 << 16)
        tokens += options.tokens
    writer.close()
    return tokens, chunks


async def _is_ready(server: subprocess.Popen[bytes], port: int) -> bool:
    """Once it is; False if it has ended."""
    while server.poll() is None:
        try:
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            line = await reader.readline()
            writer.close()
            if b" 200 " in line:
                return True
        except OSError:
            pass
        await asyncio.sleep(0.1)
    return False


# ---------------------------------------------------------------- processes


def _cpu(pid: int) -> float:
    """Seconds of CPU time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or _of_threads(pid)


def _of_threads(pid: int) -> list[int]:
    """The engine is started by a thread, whose child it is."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default=None)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0, 10])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--json", default=None, help="append a line for each figure to this file")
    options = parser.parse_args()
    if options.tokenizer is None:
        from kvasir.models.hub import find_starter_model

        options.tokenizer = str(find_starter_model())
    return options


if __name__ == "__main__":
    main()
