"""What a streamed token costs the API process: it must not grow unseen, as every token of every stream costs it."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.executor.fake import fake_config
from kvasir.frontend.clients.engine_client import EngineClient
from kvasir.messages import EngineOutput, EngineRequest
from kvasir.server.state import READY
from tests.grammars import small_tokenizer, token_id
from tests.unit.server.test_connections import run, running

MAX_CALLS = 44  # of our own functions and coroutines for one token, from the engine's output to the socket
BODY = b'{"messages": [{"role": "user", "content": "Hello"}], "stream": true, "max_tokens": 40}'
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Client:
    """Stands in for an EngineClient. Its engine says what the test says for it."""

    closed, dead, listener = False, None, cast(AsyncLLM, None)

    def __init__(self, tokenizer: Path) -> None:
        self.config = fake_config(vocab_size=400, tokenizer=str(tokenizer))
        self.keys = itertools.count()
        self.asked = asyncio.Event()

    def wait_ready(self) -> None: ...

    def bind_event_loop(self) -> None: ...

    def abort(self, keys: list[tuple[int, int | None]]) -> None: ...

    def add(self, request: EngineRequest, engine: int | None) -> None:
        self.key = request.key
        self.asked.set()

    def say(self, token: str) -> None:
        key, line = np.array([self.key]), np.array([[token_id(token)]], np.int32)
        self.listener.on_output(EngineOutput(key, line, np.ones(1, np.int32)))


def test_a_token_takes_few_calls(tmp_path: Path) -> None:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    calls: list[Counter[str]] = []  # of each token

    def count(frame: FrameType, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("kvasir."):
            calls[-1][f"{module}.{frame.f_code.co_qualname}"] += 1

    async def test() -> None:
        async with running() as server:
            client = Client(tmp_path)
            server.state.set_engine(AsyncLLM(client.config, client=cast(EngineClient, client)))
            server.state.phase.enter(READY)
            head = (
                "POST /v1/chat/completions HTTP/1.1",
                "Content-Type: application/json",
                f"Content-Length: {len(BODY)}",
            )
            reader, writer = await server.ask(*head, body=BODY)
            await client.asked.wait()
            for letter in "abcdefgh":
                calls.append(Counter())
                sys.setprofile(count)
                client.say(letter)
                await reader.readuntil(json.dumps({"content": letter}, separators=(",", ":")).encode())
                sys.setprofile(None)
            writer.close()

    run(test)
    least = min(calls, key=Counter.total)  # the others may be the first, or have seen the server look around
    assert 20 < least.total() <= MAX_CALLS, f"{least.total()} calls: {dict(least)}"
