"""The engine's start-up logits processors: loaded by import path, in the process that runs them. Knows no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from kvasir.errors import ConfigError, RequestError
from kvasir.messages import EngineRequest


class StartupProcessors:
    """Each entry is "module:name", or the thing itself: a callable, or something with a for_request method."""

    def __init__(self, entries: Iterable[Any] | None) -> None:
        self.plugins = [_load(entry) for entry in entries or ()]

    def __len__(self) -> int:
        return len(self.plugins)

    def for_request(self, extra_args: Mapping[str, Any]) -> list[Callable[..., Any]]:
        """What runs for a request that brings these arguments."""
        if extra_args and not any(hasattr(plugin, "for_request") for plugin in self.plugins):
            message = "extra_args are for start-up logits processors with a for_request method; this engine has none."
            raise RequestError(message, "extra_args")
        found = [
            plugin.for_request(extra_args) if hasattr(plugin, "for_request") else plugin for plugin in self.plugins
        ]
        return [three_arguments(each) for each in found if each is not None]


def three_arguments(processor: Callable[..., Any]) -> Callable[..., Any]:
    """Processors may take (output ids, logits) or (prompt ids, output ids, logits)."""
    try:
        kinds = [p.kind for p in inspect.signature(processor).parameters.values()]
    except (TypeError, ValueError):  # builtins may have no signature
        return processor
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in positional for kind in kinds) != 2:
        return processor
    return lambda prompt, output, logits: processor(output, logits)


def _load(entry: Any) -> Any:
    """Of a class, one instance."""
    found = entry
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        try:
            found = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            message = f"logits_processors: {entry!r} cannot be loaded ({error}); write it as 'module:name'."
            raise ConfigError(message) from error
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as error:
            raise ConfigError(f"logits_processors: {entry!r} must be made without arguments ({error}).") from error
    if not callable(found) and not hasattr(found, "for_request"):
        raise ConfigError(f"logits_processors: {entry!r} is neither callable nor has it a for_request method.")
    return found


# ----------------------------------------------------------------
# Start-up logits processors in the core's process: what requests that come from another one cannot bring. No torch.


def with_processors(request: EngineRequest, startup: StartupProcessors) -> EngineRequest:
    """The request with the processors that its `extra_args` stand for; most have none and come back as they are."""
    extras = request.sampling.extras
    if extras is None or extras.extra_args is None:
        return request
    extras = replace(extras, processors=tuple(startup.for_request(extras.extra_args)), extra_args=None)
    forks = tuple(with_processors(fork, startup) for fork in request.forks)
    sampling = replace(request.sampling, extras=extras)
    return replace(request, sampling=sampling, forks=forks, needs_last_token=bool(extras.processors))
