"""Two API keys on a real model: one floods the server, the other is answered at once all the same."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import httpx
import pytest

from tests.server_process import LiveServer

FLOOD = 500
ROWS = 32
# Seconds to the first token; without fair shares it takes half a minute. Tests that run beside this one take cores.
WITHIN = 10.0 if os.environ.get("PYTEST_XDIST_WORKER") else 2.0


async def first_token(client: httpx.AsyncClient, key: str, prompt: str, max_tokens: int) -> float:
    """Seconds until the first token of a stream, which is read to its end."""
    started, first = time.monotonic(), 0.0
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data:") and not first:
                first = time.monotonic() - started
    return first


@pytest.mark.slow
def test_a_flood_of_one_key_keeps_the_other_waiting_two_seconds_at_most(starter_model: Path) -> None:
    async def go(server: LiveServer) -> list[float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
            await first_token(client, "other", "Warm up", 4)
            flood = [
                asyncio.create_task(first_token(client, "flood", f"Story number {i}: once upon a time", 200))
                for i in range(FLOOD)
            ]
            await asyncio.sleep(5)
            asked = [await first_token(client, "other", f"Question number {i}: what is", 8) for i in range(5)]
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            return asked

    flags = ("--api-key", "flood", "--api-key", "other", "--max-num-seqs", str(ROWS))
    with LiveServer.real(starter_model, *flags) as server:
        seconds = asyncio.run(go(server.wait_until_ready()))
    assert max(seconds) < WITHIN, seconds
