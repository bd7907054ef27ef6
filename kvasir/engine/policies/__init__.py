"""Queue policies by name. A user's own policy is given as 'module:Class'."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvasir.engine.policies.base import Context, Policy, RankedPolicy, TokenCountingPolicy
from kvasir.engine.policies.fair import FairShare
from kvasir.engine.policies.orders import EarliestDeadlineFirst, FirstComeFirstServed, Priority, WeightedRoundRobin
from kvasir.errors import ConfigError

__all__ = [
    "POLICIES",
    "Context",
    "EarliestDeadlineFirst",
    "FairShare",
    "FirstComeFirstServed",
    "Policy",
    "Priority",
    "RankedPolicy",
    "TokenCountingPolicy",
    "WeightedRoundRobin",
    "make_policy",
]

POLICIES: dict[str, type[Policy]] = {
    "fair": FairShare,
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "wrr": WeightedRoundRobin,
    "deadline": EarliestDeadlineFirst,
}


def make_policy(name: str, context: Context) -> Policy:
    """Make the policy with this name; 'module:Class' names a user's own."""
    kind: Any = POLICIES.get(name) or _load(name)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise ConfigError(f"scheduling_policy={name!r} is not a class derived from kvasir.engine.policies.Policy.")
    try:
        policy: Policy = kind(context)
    except TypeError as error:
        raise ConfigError(
            f"scheduling_policy={name!r} cannot be created: its __init__ must accept a single Context ({error})."
        ) from error
    if getattr(policy, "context", None) is not context:
        raise ConfigError(
            f"scheduling_policy={name!r} has not stored its context: call super().__init__(context) in __init__."
        )
    return policy


def _load(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(POLICIES)
        raise ConfigError(
            f"scheduling_policy={name!r} cannot be loaded ({error}); use one of {known}, or 'module:Class'."
        ) from error
    return found
