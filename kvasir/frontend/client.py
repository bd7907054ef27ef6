"""How the API side talks to an engine core. In-process here; the same calls can cross a process boundary."""

from __future__ import annotations

from typing import Protocol

from kvasir.config import EngineConfig
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.messages import EngineOutput, EngineRequest, EngineStats


class EngineClient(Protocol):
    def add(self, request: EngineRequest) -> None: ...

    def abort(self, key: int, num_kept: int | None = None) -> None: ...

    def step(self) -> EngineOutput:
        """Wait for the next output. Only while there is work."""

    def has_work(self) -> bool: ...

    def reset_prefix_cache(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class InprocClient:
    """The core in the caller's process: simple, and easy to debug."""

    def __init__(self, config: EngineConfig) -> None:
        self.core: EngineCore = build_core(config)

    def add(self, request: EngineRequest) -> None:
        self.core.add(request)

    def abort(self, key: int, num_kept: int | None = None) -> None:
        self.core.abort(key, num_kept)

    def step(self) -> EngineOutput:
        return self.core.run_step()

    def has_work(self) -> bool:
        return self.core.has_work()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def close(self) -> None:
        self.core.close()
