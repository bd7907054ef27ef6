"""From logits to tokens and what features make of them, on the device, without a host sync.

`SamplingParameters` has what the running rows ask for: on the device for the sampler, and on the host to know what a
step needs. It owns the stages that change logits. Stages and features run only if some row of the step asks for them;
the last of all draws (kernels.draw). A row's token depends on its own logits, history, seed and position, and never on
its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir import kernels
from kvasir.messages import Int32Array, NewRow
from kvasir.sampling.features import Drawn, FeatureUse, HeadWork, RowFeature, SampledLines, SampledRows
from kvasir.sampling.stages import FORBIDDEN, Stage, Stages, room_for


@dataclass(slots=True, frozen=True)
class SamplingKey:
    """Which rules the rows of a step ask for beyond temperature and seed."""

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
        """Return two keys: filters alone, and everything. In the second, rules that no row asks for cost next to
        nothing."""
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
    """Pad each line to `width` with its first entry."""
    return torch.cat([stop_ids, stop_ids[:, :1].expand(-1, width - stop_ids.shape[1])], dim=1)


@dataclass(slots=True)
class Processed:
    """The logits to draw from, before temperature."""

    logits: torch.Tensor  # [lines, vocabulary]
    threshold: torch.Tensor | None = None  # [lines] float32: the lowest logit that min-p, top-k and top-p keep

    def filtered(self) -> torch.Tensor:
        """The logits, without those that the filters drop."""
        if self.threshold is None:
            return self.logits
        return self.logits.masked_fill(self.logits < self.threshold[:, None], FORBIDDEN)


class Sampler:
    """`next_token` [rows] int32 is where the next step finds its inputs."""

    def __init__(
        self, parameters: SamplingParameters, next_token: torch.Tensor, features: Sequence[RowFeature] = ()
    ) -> None:
        self.parameters = parameters
        self.next_token = next_token
        self.features = list(features) or [parameters]

    def sample(
        self, logits: torch.Tensor, step: SampledRows, work: Sequence[HeadWork] = ()
    ) -> tuple[torch.Tensor, tuple[tuple[torch.Tensor, ...], ...]]:
        """Tokens [n] int32 from logits [n, vocab], and the output tensors of each piece of work. A line whose logits
        are not numbers has NOT_A_TOKEN; features see a valid token in its place. Waits for nothing, and reads nothing
        of the host's that differs from step to step, so that a graph can capture it."""
        if step.turns:
            tokens, heated = self._draw_in_turns(logits, step, work)
        else:
            processed = self.process(logits, step, work)
            tokens, heated = self.draw(processed, step, work), partial(self.heated, processed, step)
        drawn = Drawn(logits, heated, tokens.clamp(min=0) if work else tokens, step)
        return tokens, tuple(each.feature.outputs(each.key, drawn, each.inputs) for each in work)

    def _draw_in_turns(
        self, logits: torch.Tensor, step: SampledRows, work: Sequence[HeadWork]
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """Draw as if each row's lines were steps of their own. A line whose draft was wrong is drawn, but nothing
        learns from it."""
        assert step.expected is not None, "lines in turns follow drafts"
        tokens = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        counts = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        padding_row = len(self.parameters.temperature) - 1
        parts: list[tuple[torch.Tensor, Processed, SampledRows]] = []
        for number, turn in enumerate(step.turns):
            own, lines = step.select(turn), turn.lines
            if number:
                before = lines - 1
                counts[lines] = counts[before] & (tokens[before] == step.expected[before])
                own.observed_rows = torch.where(counts[lines], own.rows, padding_row)
            processed = self.process(logits[lines], own, work)
            tokens[lines] = self.draw(processed, own, work)
            parts.append((lines, processed, own))
            step.failures |= {int(turn.host_lines[line]): reason for line, reason in own.failures.items()}
            step.on_host += [partial(_tell, call, turn.host_lines) for call in own.on_host]

        def heated() -> torch.Tensor:
            whole = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            for lines, processed, own in parts:
                whole[lines] = self.heated(processed, own)
            return whole

        return tokens, heated

    def process(self, logits: torch.Tensor, step: SampledRows, work: Sequence[HeadWork]) -> Processed:
        """The given logits are left as they are. Masks come after the rules that may raise a logit, and before what
        narrows a distribution."""
        key = self._key(work)
        editing = [each for each in work if each.feature.edits_logits(each.key)]
        if key.stages or editing:
            logits = logits.to(torch.float32, copy=True)
        for stage in key.stages:
            if not stage.narrows:
                stage.apply(logits, step)
        if key.bans:
            logits = self._ban_stop_ids(logits, step.rows, step.positions)
        for each in editing:
            each.feature.edit_logits(each.key, logits, step, each.inputs)
        for stage in key.stages:
            if stage.narrows:
                stage.apply(logits, step)
        return Processed(logits, self._threshold(logits, step.rows) if key.filters else None)

    def draw(self, processed: Processed, step: SampledRows, work: Sequence[HeadWork]) -> torch.Tensor:
        """Draw, and let features replace tokens and learn which were taken. NOT_A_TOKEN stays what it is."""
        parameters = self.parameters
        drawn = kernels.draw(
            processed.logits, step.rows, step.positions, parameters.temperature, parameters.seed, self.next_token,
            processed.threshold,
        )  # fmt: skip
        if not (self._key(work).stages or any(each.feature is not parameters for each in work)):
            return drawn
        tokens = valid = drawn.clamp(min=0)
        for each in work:
            tokens = each.feature.replace_tokens(each.key, tokens, step, each.inputs)
        if tokens is not valid:
            self.next_token[step.rows] = tokens
        for each in work:
            each.feature.observe(each.key, tokens, step.as_observed())
        return torch.where(drawn < 0, drawn, tokens)

    def heated(self, processed: Processed, step: SampledRows) -> torch.Tensor:
        """Divided by the rows' temperatures, as `draw` does it; greedy rows have none."""
        heat = self.parameters.temperature[step.rows, None]
        return processed.filtered().float() / torch.where(heat > 0, heat, 1.0)

    def _key(self, work: Sequence[HeadWork]) -> SamplingKey:
        for each in work:
            if each.feature is self.parameters:
                key: SamplingKey = each.key
                return key
        return NO_SAMPLING_KEY

    def _ban_stop_ids(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        stop_ids = self.parameters.stop_ids[rows].long()
        banned = (positions < self.parameters.banned_until[rows])[:, None]
        values = torch.where(banned, FORBIDDEN, logits.gather(1, stop_ids))
        return logits.scatter(1, stop_ids, values)

    def _threshold(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        parameters = self.parameters
        return kernels.filter_threshold(
            logits, rows, parameters.temperature, parameters.min_p, parameters.top_k, parameters.top_p
        )


def _tell(call: Callable[[NDArray[np.int32]], None], lines: Int32Array, tokens: NDArray[np.int32]) -> None:
    """Pass the tokens of some lines on."""
    call(tokens[lines])
