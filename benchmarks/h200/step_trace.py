"""Reads a trace of torch's profiler into the times of device and host in each step. Plain Python, no torch.

Steps are separated by annotations "kvasir.<phase>#<step>" that profile_gaps.py puts around the engine's phases; a
kernel belongs to the step in whose launches its own launch falls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

PREFIX = "kvasir."
PHASES = ("schedule", "execute", "sample", "wait", "update")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")

Event = Mapping[str, Any]


@dataclass
class Span:
    """Microseconds on the trace's clock."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass
class Step:
    number: int
    phases: dict[str, Span] = field(default_factory=dict)
    device: list[Span] = field(default_factory=list)  # by start
    num_kernels: int = 0

    @property
    def busy(self) -> float:
        """Time in which the device did something for this step."""
        total, until = 0.0, 0.0
        for span in self.device:
            total += max(0.0, span.end - max(span.start, until))
            until = max(until, span.end)
        return total

    @property
    def device_start(self) -> float:
        return self.device[0].start

    @property
    def device_end(self) -> float:
        return max(span.end for span in self.device)


def read_steps(events: Iterable[Event]) -> list[Step]:
    """The steps that were planned and launched within the trace, in order."""
    complete = [event for event in events if event.get("ph") == "X"]
    steps: dict[int, Step] = {}
    for event in complete:
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX) and "#" in event["name"]:
            phase, _, number = event["name"].removeprefix(PREFIX).partition("#")
            steps.setdefault(int(number), Step(int(number))).phases[phase] = _span(event)
    launched = sorted((step for step in steps.values() if "execute" in step.phases), key=lambda step: step.number)
    _place_kernels(complete, launched)
    return launched


def _place_kernels(events: Sequence[Event], steps: Sequence[Step]) -> None:
    launch_at = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    starts = [step.phases["execute"].start for step in steps]
    for event in events:
        at = launch_at.get(event.get("args", {}).get("correlation")) if event.get("cat") in DEVICE else None
        if at is not None and (index := bisect_right(starts, at)) > 0:
            steps[index - 1].device.append(_span(event))
            steps[index - 1].num_kernels += event["cat"] == "kernel"
    for step in steps:
        step.device.sort(key=lambda span: span.start)


def _span(event: Event) -> Span:
    return Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]))


# ---------------------------------------------------------------- figures


def summarise(steps: Sequence[Step]) -> dict[str, Any]:
    """Medians over neighbouring steps. The last step is there only for the gap before it."""
    pairs = list(pairwise(steps))
    figures: dict[str, Any] = {"steps": len(pairs), "host_us": _host(pairs), "ahead": _ahead(pairs)}
    on_device = [(a, b) for a, b in pairs if a.device and b.device]
    if on_device:
        periods = [b.device_start - a.device_start for a, b in on_device]
        gaps = sorted(b.device_start - a.device_end for a, b in on_device)
        figures["device_us"] = {
            "period": median(periods),
            "busy": median(a.busy for a, _ in on_device),
            "gap": median(gaps),  # last kernel of a step to the first of the next
            "gap_p90": gaps[int(0.9 * (len(gaps) - 1))],
            "idle_within": median((a.device_end - a.device_start) - a.busy for a, _ in on_device),
        }
        figures["kernels"] = median(a.num_kernels for a, _ in on_device)
        figures["copies"] = median(len(a.device) - a.num_kernels for a, _ in on_device)
    return figures


def _host(pairs: Sequence[tuple[Step, Step]]) -> dict[str, float]:
    """Microseconds of each phase, and of all that lies between the beginnings of two steps."""
    found = {}
    for phase in PHASES:
        lengths = [step.phases[phase].length for step, _ in pairs if phase in step.phases]
        found[phase] = median(lengths) if lengths else 0.0
    begun = "schedule" if all("schedule" in s.phases for pair in pairs for s in pair) else "execute"
    found["period"] = median(b.phases[begun].start - a.phases[begun].start for a, b in pairs) if pairs else 0.0
    return found


def _ahead(pairs: Sequence[tuple[Step, Step]]) -> dict[str, Any]:
    """Whether step N+1 was on its way before N was known, and before N was done on the device."""
    read = [(a, b) for a, b in pairs if "wait" in a.phases]
    leads = [a.device_end - b.phases["execute"].start for a, b in pairs if a.device]
    return {
        "launched_before_result_was_read": sum(b.phases["execute"].start < a.phases["wait"].start for a, b in read),
        "of": len(read),
        "launched_before_device_was_done": sum(lead > 0 for lead in leads),
        "of_on_device": len(leads),
        "lead_us": median(leads) if leads else None,  # how long before the device was done
    }


def render(figures: Mapping[str, Any]) -> str:
    """The figures in a few lines."""
    lines = []
    if "device_us" in figures:
        d = figures["device_us"]
        lines.append(
            f"device  period {_ms(d['period'])}, busy {_ms(d['busy'])} ({d['busy'] / d['period']:.0%}), "
            f"idle within a step {_ms(d['idle_within'])}, gap to the next {_ms(d['gap'])} (p90 {_ms(d['gap_p90'])}), "
            f"{figures['kernels']:.0f} kernels, {figures['copies']:.0f} copies and fills"
        )
    host = figures["host_us"]
    rest = host["period"] - sum(host[phase] for phase in PHASES)
    phases = ", ".join(f"{phase} {_ms(host[phase])}" for phase in PHASES)
    lines.append(f"host    period {_ms(host['period'])}: {phases}, rest {_ms(rest)}")
    ahead = figures["ahead"]
    early = ahead["launched_before_result_was_read"]
    lines.append(f"ahead   step N+1 launched before N's result was read: {early} of {ahead['of']} steps")
    if ahead["lead_us"] is not None:
        early = ahead["launched_before_device_was_done"]
        lines.append(
            f"        and before the device was done with N: {early} of {ahead['of_on_device']}, "
            f"median {_ms(ahead['lead_us'])} before"
        )
    return "\n".join(lines)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3f} ms"
