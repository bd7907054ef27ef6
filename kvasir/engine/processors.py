"""Start-up logits processors in the core's process: what requests that come from another one cannot bring. No torch."""

from __future__ import annotations

from dataclasses import replace

from kvasir.logits_processors import StartupProcessors
from kvasir.messages import EngineRequest


def with_processors(request: EngineRequest, startup: StartupProcessors) -> EngineRequest:
    """The request with the processors that its `extra_args` stand for; most have none and come back as they are."""
    extras = request.sampling.extras
    if extras is None or extras.extra_args is None:
        return request
    extras = replace(extras, processors=tuple(startup.for_request(extras.extra_args)), extra_args=None)
    forks = tuple(with_processors(fork, startup) for fork in request.forks)
    sampling = replace(request.sampling, extras=extras)
    return replace(request, sampling=sampling, forks=forks, needs_last_token=bool(extras.processors))
