"""On what terms a request is served, as a caller says it. API process."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from kvasir.errors import RequestError
from kvasir.messages import EngineRequest, Terms


def make_terms(priority: int = 0, tenant: str = "", weight: float = 1.0, timeout: float | None = None) -> Terms:
    """Of a request that comes now; `timeout` is in seconds."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority must be a whole number, not {priority!r}", "priority")
    if not isinstance(tenant, str):
        raise RequestError(f"tenant must be a string, not {tenant!r}", "tenant")
    for name, value in (("weight", weight), ("timeout", timeout)):
        if value is not None and not (_is_number(value) and 0 < value < math.inf):
            raise RequestError(f"{name} must be a number above 0, not {value!r}", name)
    now = time.monotonic()
    return Terms(now, priority, tenant, float(weight), None if timeout is None else now + timeout)


def with_terms(request: EngineRequest, terms: Terms) -> EngineRequest:
    """All branches of a request are served on the same terms."""
    return replace(request, terms=terms, forks=tuple(replace(fork, terms=terms) for fork in request.forks))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
