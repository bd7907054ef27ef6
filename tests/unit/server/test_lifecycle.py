"""What the lifecycle of a server reports while its engine runs."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import fields
from types import SimpleNamespace

import pytest

from kvasir.engine.stats import EngineStats
from kvasir.server import lifecycle
from kvasir.server.config import ServerConfig
from kvasir.server.engine_metrics import engine_metrics
from kvasir.server.lifecycle import ServerLifecycle, TokenRate
from kvasir.server.metrics import Metrics
from kvasir.server.state import ServerState


def stats(generated: int) -> EngineStats:
    numbers = {each.name: 0 for each in fields(EngineStats) if each.type == "int"}
    return EngineStats(**{**numbers, "generated_tokens": generated, "num_running": 1})  # type: ignore[arg-type]


def test_a_rate_is_smoothed_and_survives_a_new_count() -> None:
    rate, seen = TokenRate(0.0), []
    for now, count in ((1.0, 100), (2.0, 200), (4.0, 400), (5.0, 10), (6.0, 10)):
        rate.update(now, count)
        seen.append(rate.value)
    assert seen == [50.0, 75.0, 87.5, 43.75, 21.875], "a counter that starts again is no negative rate"


def test_the_log_tells_of_tokens_that_no_output_has_brought(
    log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is not streamed: nothing is tallied before its end."""
    counts = iter([60, 120])
    clock = iter([0.0, 20.0, 40.0])
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = Metrics("m")

    async def found() -> EngineStats:
        return stats(next(counts))

    state = SimpleNamespace(
        metrics=metrics, stats=found, requests={"one"}, config=SimpleNamespace(disable_log_stats=False)
    )

    async def work() -> None:
        server = ServerLifecycle(state, lambda phase: None, lambda: None)  # type: ignore[arg-type, return-value]
        await server._flush()
        await server._flush()

    asyncio.run(work())
    shown = [line for line in log_lines if "tokens/s" in line]
    assert ["1 running, 0 waiting, 1.5 tokens/s" in line for line in shown] == [True, False]
    assert "1 running, 0 waiting, 2.2 tokens/s" in shown[1]
    assert 'tokens_per_second{engine="0",model_name="m"} 2.25' in metrics.page([], vllm_names=False).decode()


def test_the_garbage_collector_skips_what_was_there_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection of what a server is made of takes a tenth of a second or more, in which no stream moves."""
    engine = SimpleNamespace(startup_seconds={}, errored=True, dead_error="the end of this test")

    async def nothing(*ignored: object) -> None:
        pass

    async def start() -> None:
        state = ServerState(ServerConfig(), "m")
        state.adapters = SimpleNamespace(start=nothing, watch=nothing)  # type: ignore[assignment]
        monkeypatch.setattr(state, "set_engine", lambda engine: None)
        server = ServerLifecycle(state, lambda phase: engine, lambda: None)  # type: ignore[arg-type, return-value]
        await server._start_and_watch()
        assert server.error == "the end of this test"

    monkeypatch.setattr(lifecycle, "_first_token", nothing)
    before = gc.get_freeze_count()
    asyncio.run(start())
    assert gc.get_freeze_count() > before


def test_every_engine_counts_its_own_tokens() -> None:
    further = engine_metrics([stats(5), stats(7)], "m")
    page = Metrics("m").page(further, vllm_names=True).decode()
    for prefix in ("kvasir", "vllm"):
        lines = [line for line in page.splitlines() if line.startswith(f"{prefix}:generation_tokens")]
        series = f'{prefix}:generation_tokens_total{{engine="%d",model_name="m"}} %.1f'
        assert sorted(lines) == [series % (0, 5), series % (1, 7)]
