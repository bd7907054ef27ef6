"""Whether anybody watches the steps. Core process.

Nobody, usually: then a step costs one call of a method that does nothing. Whoever asks for a snapshot turns the log on,
and it turns itself off when nobody has asked for some seconds.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from kvasir.messages import StepPlan
from kvasir.snapshot import StepPicture

if TYPE_CHECKING:
    from kvasir.engine.core import EngineCore

NUM_STEPS = 600  # that are remembered
PATIENCE = 10.0  # seconds without a question after which nobody is watching


class Unwatched:
    def planned(self, plan: StepPlan) -> None:
        pass

    def steps_since(self, step: int) -> list[StepPicture]:
        return []


class StepLog:
    """Remembers the last steps. `asked` is when somebody last looked."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._steps: deque[StepPicture] = deque(maxlen=NUM_STEPS)
        self._preemptions = core.scheduler.stats.preemptions
        self.asked = time.monotonic()

    def planned(self, plan: StepPlan) -> None:
        if time.monotonic() - self.asked > PATIENCE:
            self._core.watch = Unwatched()
            return
        scheduler = self._core.scheduler
        total = scheduler.stats.preemptions
        self._steps.append(
            StepPicture(
                step=plan.step,
                time=time.time(),
                prompt_tokens=plan.total_tokens - plan.num_decodes,
                decode_tokens=plan.num_decodes,
                sampled=int(plan.samples.sum()),
                num_running=len(scheduler.rows),
                num_waiting=len(scheduler.waiting),
                preemptions=total - self._preemptions,
            )
        )
        self._preemptions = total

    def steps_since(self, step: int) -> list[StepPicture]:
        return [picture for picture in self._steps if picture.step > step]


def steps_for_a_watcher(core: EngineCore, since: int) -> list[StepPicture]:
    """The steps after number `since`; from now on they are remembered."""
    if not isinstance(core.watch, StepLog):
        core.watch = StepLog(core)
    core.watch.asked = time.monotonic()
    return core.watch.steps_since(since)
