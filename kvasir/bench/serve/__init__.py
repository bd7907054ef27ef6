"""`kvasir bench serve`: a load test of a server, with open or closed loop, as its clients see it.

It chooses the model, makes the prompts, sends them and returns the record.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from kvasir import __version__
from kvasir.bench import report
from kvasir.bench.serve import load, results
from kvasir.bench.serve.client import Endpoint, LoadClient, ServedModel, TimedAnswer, find_tokenizer
from kvasir.bench.serve.datasets import Prompt, PromptMaker, Trace
from kvasir.bench.serve.load import Arrivals, from_trace
from kvasir.errors import ConfigError


class Dataset(Protocol):
    def prompts(self, maker: PromptMaker, count: int) -> list[Prompt]: ...


@dataclass(frozen=True, slots=True)
class ServeOptions:
    endpoint: Endpoint
    dataset_name: str
    dataset: Callable[[ServedModel], Dataset]
    model: str | None = None  # directory or Hub name, for the tokenizer
    served_model_name: str | None = None
    tokenizer: str | None = None
    num_prompts: int = 1000
    arrivals: Arrivals = field(default_factory=Arrivals)
    use_trace_times: bool = False
    trace_speedup: float = 1.0
    max_concurrency: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # additional fields of every request
    num_warmups: int = 1
    ready_seconds: float = 600.0
    seed: int = 0
    metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el")
    percentiles: Sequence[float] = (50, 95, 99)
    goodput: results.Goodput | None = None
    keep_details: bool = False
    progress: bool = True


def run(options: ServeOptions) -> dict[str, Any]:
    served = _choose(options)
    tokenizer = find_tokenizer(options.tokenizer, options.model, served)
    maker = PromptMaker(tokenizer, options.seed, as_text=options.endpoint.is_chat)
    dataset = options.dataset(served)
    prompts = dataset.prompts(maker, options.num_prompts)
    bodies = [options.endpoint.body(served.name, prompt, options.fields) for prompt in prompts]
    planned = load.LoadPlan(bodies, _times(options, prompts), options.max_concurrency)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        outcome = runner.run(_drive(options, planned))
    record = _conditions(options, served, prompts)
    record["left_out"] = len(dataset.entries) - len(dataset.fitting) if isinstance(dataset, Trace) else 0
    record |= results.measure(outcome, prompts, options.metrics, options.percentiles, options.goodput)
    if options.keep_details:
        record |= results.detailed(outcome, prompts)
    return record


def _choose(options: ServeOptions) -> ServedModel:
    """The model to test: by its served name, by its directory or Hub name, or the first of the server."""
    served = options.endpoint.served(options.ready_seconds)
    wanted = options.served_model_name or options.model
    found = [each for each in served if wanted is None or wanted in (each.name, each.root)]
    if not found:
        names = ", ".join(each.name for each in served)
        raise ConfigError(f"{options.endpoint.base_url} does not serve {wanted}; it serves {names}.")
    return found[0]


def _times(options: ServeOptions, prompts: Sequence[Prompt]) -> list[float]:
    stamps = [prompt.at for prompt in prompts if prompt.at is not None]
    if options.use_trace_times:
        return from_trace(stamps, options.trace_speedup)
    return options.arrivals.times(len(prompts), options.seed)


async def _drive(options: ServeOptions, planned: load.LoadPlan) -> load.Outcome:
    client = LoadClient(options.endpoint.target)
    bar = _bar(len(planned.bodies), options.progress)
    try:
        await _warm_up(client, planned.bodies[0], options.num_warmups)
        return await load.run(client, planned, options.keep_details, lambda answer: bar.update(1))
    finally:
        bar.close()
        client.close()


async def _warm_up(client: LoadClient, body: bytes, count: int) -> None:
    """Send warm-up requests, and raise if one of them fails."""
    answers = [TimedAnswer() for _ in range(count)]
    await asyncio.gather(*(client.ask(body, answer) for answer in answers))
    for answer in answers:
        if not answer.ok:
            raise ConfigError(f"The first request to {client.target.url} failed: {answer.error}")


def _conditions(options: ServeOptions, served: ServedModel, prompts: Sequence[Prompt]) -> dict[str, Any]:
    rate = options.arrivals.rate
    return {
        "benchmark": "serve",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": options.endpoint.target.url,
        "backend": "openai-chat" if options.endpoint.is_chat else "openai",
        "model_id": served.name,
        "tokenizer_id": options.tokenizer or options.model or served.root or served.name,
        "dataset": options.dataset_name,
        "num_prompts": len(prompts),
        "request_rate": "trace" if options.use_trace_times else "inf" if rate == math.inf else rate,
        "trace_speedup": options.trace_speedup if options.use_trace_times else None,
        "burstiness": options.arrivals.burstiness,
        "ramp_up_strategy": options.arrivals.ramp,
        "ramp_up_end_rps": options.arrivals.end_rate,
        "max_concurrency": options.max_concurrency,
        "goodput": None if options.goodput is None else _limits(options.goodput.limits),
        "fields": dict(options.fields),
        "seed": options.seed,
        "client_kvasir": __version__,
        "client_commit": report.commit(),
        "client_hardware": report.hardware("cpu"),
    }


def _limits(limits: Mapping[str, float]) -> str:
    return " ".join(f"{name}:{value:g}" for name, value in limits.items())


def _bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Requests", unit="req", dynamic_ncols=True, disable=not shown)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop
