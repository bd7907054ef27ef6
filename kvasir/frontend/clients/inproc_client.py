"""How LLMEngine talks to an engine core: in its own process here, in others through process_client.py."""

from __future__ import annotations

from typing import Any, Protocol

from kvasir.config.engine import EngineConfig
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.errors import KvasirError, RequestError
from kvasir.messages import EngineOutput, EngineRequest, EngineStats


class EngineClient(Protocol):
    remote: bool  # whether requests go to another process, which Python callables cannot

    def wait(self) -> None:
        """Until requests are taken."""

    def add(self, request: EngineRequest) -> None:
        """Queue it. What the core has against it is raised, or, from another process, found by `refused` later."""

    def abort(self, key: int, num_kept: int | None = None) -> None: ...

    def step(self) -> EngineOutput:
        """Wait for the next output, which may be empty. Only while there is work."""

    def refused(self) -> list[tuple[int, KvasirError]]:
        """Requests that the core has not taken, by key, with its reasons; each is told once."""

    def has_work(self) -> bool: ...

    def reset_prefix_cache(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def call(self, name: str, *args: Any) -> Any:
        """Ask the core: its method of this name. Of several cores, the first."""

    def close(self) -> None: ...


class InprocClient:
    """The core in the caller's process: simple, and easy to debug."""

    remote = False

    def __init__(self, config: EngineConfig) -> None:
        self.core: EngineCore = build_core(config)

    def wait(self) -> None:
        pass

    def add(self, request: EngineRequest) -> None:
        self.core.add(request)

    def abort(self, key: int, num_kept: int | None = None) -> None:
        self.core.abort(key, num_kept)

    def step(self) -> EngineOutput:
        return self.core.run_step()

    def refused(self) -> list[tuple[int, KvasirError]]:
        return []

    def has_work(self) -> bool:
        return self.core.has_work()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def call(self, name: str, *args: Any) -> Any:
        method = None if name.startswith("_") else getattr(self.core, name, None)
        if not callable(method):
            raise RequestError(f"the core has no method {name!r}")
        return method(*args)

    def close(self) -> None:
        self.core.close()
