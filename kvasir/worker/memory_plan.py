"""How a device's memory is shared out before there is a KV cache: arithmetic on what was measured. Worker process."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.errors import ConfigError

GIB = 1 << 30
LARGEST_GRAPH = 1024  # tokens


@dataclass(slots=True, frozen=True)
class Profile:
    """What running the largest step once has shown, in bytes."""

    peak: int  # the most that torch held, weights included
    largest_step: int  # of that, what is not weights
    outside: int  # the driver's, and other processes'


def kv_share(total: int, utilization: float, profile: Profile, graphs: int) -> int:
    """What the KV cache may take of the engine's share. Graphs go where the rest of the device is free; what they are
    expected to take beyond that is set aside."""
    ours = int(total * utilization)
    return ours - profile.peak - profile.outside - max(0, graphs - (total - ours))


def expected_graphs(largest_step: int, num_tokens: int) -> int:
    """A guess at what graphs come to take, in bytes: what their largest step needs while it runs, which they share, and
    as much again for what each keeps. `num_tokens` are the largest step's."""
    return 2 * largest_step * min(num_tokens, LARGEST_GRAPH) // num_tokens


def refuse_more_than_is_free(kv_bytes: int, setting: str, value: int, free: int | None, steps: int) -> None:
    """A cache of a size that somebody chose must leave room for what steps take beside it (0 where that was not
    measured). Of the host's memory more can be had than there is, until it is written to."""
    if free is None or kv_bytes + steps <= free:
        return
    what = f"{setting}={value} ({kv_bytes / GIB:.1f} GiB)"
    there = f"the {free / GIB:.1f} GiB of memory that are free beside the weights"
    if kv_bytes > free and not steps:
        raise ConfigError(f"{what} is more than {there}; lower it.")
    fits = (free - steps) * value // kv_bytes
    lower = f"lower {setting} to {fits}, or max_num_batched_tokens" if fits > 0 else "lower max_num_batched_tokens"
    raise ConfigError(f"{what} and what the largest step takes ({steps / GIB:.1f} GiB) are more than {there}; {lower}.")
