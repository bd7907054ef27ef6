"""On what terms a caller wants a request served: checked here, for all faces alike. API process."""

from __future__ import annotations

import math
import time
from typing import Any

from kvasir.errors import RequestError
from kvasir.messages import Terms

_WITHOUT_PRIORITIES = ("fcfs", "wrr", "deadline")
WEIGHTS = 1e-3, 1e3  # the least and the most: further apart, what tenants were served could no longer be added up
_LARGEST_PRIORITY = 2**53  # beyond it, numbers that differ would be the same to the queue


def make_terms(
    policy: str,
    *,
    arrival_time: float | None = None,  # of time.time, as callers know it; None: now
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    timeout: float | None = None,  # seconds from its arrival
) -> Terms:
    """`policy`: the engine's scheduling_policy. A request that asks for what has no effect there is refused."""
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > _LARGEST_PRIORITY:
        raise RequestError(f"priority must be a whole number of at most 53 bits, not {priority!r}.", "priority")
    if priority and policy in _WITHOUT_PRIORITIES:
        raise RequestError(
            f"priority={priority} has no effect under scheduling_policy={policy}; leave it out, or start the engine "
            f"with scheduling_policy=priority.",
            "priority",
        )
    if not isinstance(tenant, str):
        raise RequestError(f"tenant must be a string, not {type(tenant).__name__}.", "tenant")
    now = time.monotonic()
    arrival = now if arrival_time is None else min(now, now - (time.time() - arrival_time))
    deadline = None if timeout is None else arrival + _positive("timeout", timeout)
    return Terms(arrival, priority, tenant, _weight(weight), deadline)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
        raise RequestError(f"{name} must be a number above 0, not {value!r}.", name)
    return float(value)


def _weight(value: Any) -> float:
    least, most = WEIGHTS
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RequestError(f"weight must be a number from {least:g} to {most:g}, not {value!r}.", "weight")
    return float(value)
