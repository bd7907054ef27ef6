"""What graphs have taken of a device's memory, and whether there is room for another. Numbers only. Worker process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GraphMemory:
    """In bytes. What a failed capture had taken would stay with the graphs' pool and be lost to other steps, so whether
    there is room is asked beforehand."""

    kept_free: int = 0  # for the largest step, which is launched kernel by kernel
    taken: int = 0  # by all graphs, measured
    idle: int = 0  # of that, what the next graph can use: graphs run one at a time

    def growth(self, need: int) -> int:
        """What another graph takes beyond what is idle, if its step needs so much while it runs."""
        return max(need - self.idle, 0)

    def has_room(self, need: int, free: int) -> bool:
        """`free` is all but what is idle here."""
        return self.growth(need) <= free - self.kept_free
