"""What a server says whose engine has died, in the moment before its process ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from kvasir.errors import EngineDeadError
from kvasir.server.app import make_app
from kvasir.server.config import ServerConfig
from kvasir.server.state import READY, ServerState


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
def test_probes(path: str) -> None:
    async def ask(is_dead: bool) -> httpx.Response:
        async def check_health() -> None:
            pass

        engine = SimpleNamespace(
            errored=is_dead,
            dead_error=EngineDeadError("it was killed"),
            check_health=check_health,
            check_stall=lambda limit, setting: None,
        )
        state = ServerState(ServerConfig(), "m")
        state._engine = engine  # type: ignore[assignment]
        state.phase.enter(READY)
        transport = httpx.ASGITransport(make_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path)

    assert asyncio.run(ask(is_dead=False)).status_code == 200
    dead = asyncio.run(ask(is_dead=True))
    assert dead.status_code == 503 and dead.json()["reason"] == "it was killed"
