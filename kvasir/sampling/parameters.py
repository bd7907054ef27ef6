"""Sampling parameters of the running rows: on the device for the sampler, and on the host to know what a step needs.
Owns the stages that change logits. What no row of a step asks for is not computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.messages import Int32Array, NewRow
from kvasir.sampling.features import FeatureUse, RowFeature, SampledLines, SampledRows
from kvasir.sampling.stages import Stage, Stages, room_for

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True, frozen=True)
class SamplingKey:
    """What the rows of a step ask for beyond temperature and seed."""

    filters: bool = False  # min-p, top-k or top-p
    bans: bool = False  # stop tokens that must not come yet
    stages: tuple[Stage, ...] = ()


NO_SAMPLING_KEY = SamplingKey()
STOP_IDS = 16  # stop tokens of a row that graphs can ban; a row with more makes the table grow


class SamplingParameters(RowFeature):
    # columns of a packed row, before its stop tokens
    COLUMNS = ("top_k", "seed", "banned_until", "temperature", "top_p", "min_p")

    def __init__(self, max_rows: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_rows, dtype=dtype, device=device)

        self.top_k = column(torch.int32)
        self.seed = column(torch.int32)
        self.banned_until = column(torch.int32)
        self.temperature = column(torch.float32)
        self.top_p = column(torch.float32)
        self.min_p = column(torch.float32)
        self.stop_ids = torch.zeros(max_rows, 1, dtype=torch.int32, device=device)
        self.version = 0  # of `stop_ids`, see Stage.version
        self._filters = np.zeros(max_rows, np.bool_)
        self._bans = np.zeros(max_rows, np.bool_)
        self.stages = Stages()

    # ------------------------------------------------------------ rows

    def pack(self, new_rows: list[NewRow]) -> Int32Array:
        bans = [new.sampling.stop_token_ids if new.sampling.banned_until else () for new in new_rows]
        first = len(self.COLUMNS)
        packed = np.zeros((len(new_rows), first + max(1, *map(len, bans))), np.int32)
        floats = packed.view(np.float32)
        for line, (new, stop_ids) in enumerate(zip(new_rows, bans, strict=True)):
            s = new.sampling
            seed = s.seed - (1 << 32) if s.seed >> 31 else s.seed  # the same 32 bits, signed
            packed[line, :3] = s.top_k, seed, s.banned_until if stop_ids else 0
            floats[line, 3:6] = s.temperature, s.top_p, s.min_p
            if stop_ids:  # padded with the first one: banning it twice does no harm
                packed[line, first:] = stop_ids[0]
                packed[line, first : first + len(stop_ids)] = stop_ids
            self._filters[new.row] = s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
            self._bans[new.row] = packed[line, 2] > 0
        return packed

    def open(self, new_rows: list[NewRow], rows: torch.Tensor, packed: torch.Tensor) -> None:
        floats = packed.view(torch.float32)
        for column, target in enumerate((self.top_k, self.seed, self.banned_until)):
            target[rows] = packed[:, column]
        for column, target in enumerate((self.temperature, self.top_p, self.min_p), start=3):
            target[rows] = floats[:, column]
        stop_ids = packed[:, len(self.COLUMNS) :]
        width = room_for([stop_ids.shape[1]], self.stop_ids.shape[1])
        if width > self.stop_ids.shape[1]:
            self.stop_ids = _widened(self.stop_ids, width)
            self.version += 1
        self.stop_ids[rows] = _widened(stop_ids, width)
        self.stages.open(new_rows)

    # ------------------------------------------------------------ a step

    def key_for(self, rows: NDArray[np.int32]) -> SamplingKey:
        filters, bans = bool(self._filters[rows].any()), bool(self._bans[rows].any())
        stages = self.stages.needed(rows)
        return SamplingKey(filters, bans, stages) if filters or bans or stages else NO_SAMPLING_KEY

    def use(self, sampled: SampledLines) -> FeatureUse | None:
        key = self.key_for(sampled.rows)
        if key is NO_SAMPLING_KEY:
            return None
        capturable = all(stage.capturable for stage in key.stages)
        return FeatureUse(key, capturable, observes=bool(key.stages))

    def observe(self, key: SamplingKey, tokens: torch.Tensor, step: SampledRows) -> None:
        for stage in key.stages:
            stage.observe(tokens, step)

    # ------------------------------------------------------------ graphs

    def reserve(self) -> None:
        """Take tables for all rows now, so that graphs which read them stay valid."""
        self.stages.reserve()
        self.stop_ids = _widened(self.stop_ids, STOP_IDS)

    def graph_keys(self, size: int) -> tuple[SamplingKey, ...]:
        """Filters alone, and everything: what no row asks for costs next to nothing."""
        return SamplingKey(filters=True), SamplingKey(filters=True, bans=True, stages=self.stages.in_graphs())

    def graph_key(self, key: SamplingKey, size: int) -> SamplingKey:
        return self.graph_keys(size)[bool(key.bans or key.stages)]

    def versions(self, key: SamplingKey) -> tuple[int, ...]:
        versions = [stage.version for stage in key.stages]
        return (*versions, self.version) if key.bans else tuple(versions)

    def labels(self, key: SamplingKey) -> tuple[str, ...]:
        words: Iterable[tuple[str, Any]] = (("filters", key.filters), ("bans", key.bans), ("stages", key.stages))
        return tuple(word for word, asked in words if asked)


def _widened(stop_ids: torch.Tensor, width: int) -> torch.Tensor:
    """Padded with each line's first."""
    return torch.cat([stop_ids, stop_ids[:, :1].expand(-1, width - stop_ids.shape[1])], dim=1)
