"""Sampling parameters of the running rows: on the device for the sampler, and on the host to know which stages a
step needs at all. A stage that no row of a step asks for is not run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.messages import NewRow
from kvasir.sampling.stages import Stage, Stages, room_for

NO_LINES: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(slots=True)
class Needs:
    """What the rows of one step ask for."""

    filters: bool
    bans: bool
    logprob_lines: NDArray[np.int32]  # which of the sampled lines want log-probabilities
    num_logprobs: int  # of the likeliest tokens
    stages: tuple[Stage, ...] = ()  # what the rows ask for beyond that
    named: bool = False  # some want log-probabilities of tokens that they name


class SamplingState:
    # columns of the packed description of a new row, before its stop ids
    COLUMNS = ("row", "num_computed", "top_k", "seed", "banned_until", "temperature", "top_p", "min_p")

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
        self._logprobs = np.full(max_rows, -1, np.int32)
        self.stages = Stages()

    def pack(self, new_rows: list[NewRow]) -> NDArray[np.int32]:
        """New rows as one int32 matrix [rows, columns + stop ids]; floats travel as their bits."""
        bans = [new.sampling.stop_token_ids if new.sampling.banned_until else () for new in new_rows]
        width = len(self.COLUMNS) + max(1, *map(len, bans))
        packed = np.zeros((len(new_rows), width), np.int32)
        floats = packed.view(np.float32)
        for line, (new, stop_ids) in enumerate(zip(new_rows, bans, strict=True)):
            s = new.sampling
            seed = s.seed - (1 << 32) if s.seed >> 31 else s.seed  # the same 32 bits, signed
            packed[line, :5] = new.row, new.num_computed, s.top_k, seed, s.banned_until if stop_ids else 0
            floats[line, 5:8] = s.temperature, s.top_p, s.min_p
            if stop_ids:  # padded with the first one: banning it twice does no harm
                packed[line, 8:] = stop_ids[0]
                packed[line, 8 : 8 + len(stop_ids)] = stop_ids
            self._filters[new.row] = s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
            self._bans[new.row] = packed[line, 4] > 0
            self._logprobs[new.row] = -1 if s.logprobs is None else s.logprobs
        return packed

    def write(self, rows: torch.Tensor, packed: torch.Tensor) -> None:
        """Put what `pack` made, now on the device, into the rows."""
        floats = packed.view(torch.float32)
        for column, target in enumerate((self.top_k, self.seed, self.banned_until), start=2):
            target[rows] = packed[:, column]
        for column, target in enumerate((self.temperature, self.top_p, self.min_p), start=5):
            target[rows] = floats[:, column]
        stop_ids = packed[:, len(self.COLUMNS) :]
        width = room_for([stop_ids.shape[1]], self.stop_ids.shape[1])
        if width > self.stop_ids.shape[1]:
            self.stop_ids = _widened(self.stop_ids, width)
            self.version += 1
        self.stop_ids[rows] = _widened(stop_ids, width)

    def needs(self, rows: NDArray[np.int32], wants_logprobs: bool) -> Needs:
        """Of the rows that sample in this step."""
        lines, count = NO_LINES, 0
        if wants_logprobs:
            lines = np.flatnonzero(self._logprobs[rows] >= 0).astype(np.int32)
            count = int(self._logprobs[rows].max())
        return Needs(
            filters=bool(self._filters[rows].any()),
            bans=bool(self._bans[rows].any()),
            logprob_lines=lines,
            num_logprobs=count,
            stages=self.stages.needed(rows),
        )


def _widened(stop_ids: torch.Tensor, width: int) -> torch.Tensor:
    """Padded with each line's first."""
    return torch.cat([stop_ids, stop_ids[:, :1].expand(-1, width - stop_ids.shape[1])], dim=1)
