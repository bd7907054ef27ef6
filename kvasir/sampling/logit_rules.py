"""Rules about logits: penalties, bias, allowed and forbidden ids, bad words, Top-EMA and Python callables.

Each is a stage of the sampler. Histories of rows (counts, recent tokens) are kept on the device and updated there with
every token, so that such rows run as asynchronously as others. Python callables read the row's tokens, so a row that
has any waits until its last token is on the host; other rows of the same steps do not wait. Worker process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir import kernels
from kvasir.messages import Extras, NewRow
from kvasir.sampling.features import SampledRows
from kvasir.sampling.stages import FORBIDDEN, Stage, bits, mark, padded, ragged, room_for

BETA = 0.9  # of the moving average of Top-EMA ...
UNSET = -1.0  # ... before its first token
MAX_DROPPED = 2  # steps of a row whose results may be dropped at once; wrong drafts are dropped, too


class Penalties(Stage):
    """Presence, frequency and repetition penalties."""

    capturable = True
    tables = ("counts", "in_prompt", "presence", "frequency", "repetition")

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, device)
        self.counts = self.table(vocab_size, dtype=torch.int32)  # how often each token was generated
        self.in_prompt = self.table(vocab_size, dtype=torch.bool)
        self.presence, self.frequency, self.repetition = self.table(), self.table(), self.table()

    def asks(self, extras: Extras) -> bool:
        return bool(extras.presence_penalty or extras.frequency_penalty or extras.repetition_penalty != 1)

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        given, generated, parameters = [], [], []
        for new in new_rows:
            extras, tokens = new.sampling.extras, new.token_ids
            assert extras is not None and tokens is not None, "a row with extras comes with its tokens"
            given.append(tokens[extras.num_virtual_tokens : extras.num_prompt_tokens])
            generated.append(tokens[extras.num_prompt_tokens :])
            parameters += [extras.presence_penalty, extras.frequency_penalty, extras.repetition_penalty]
        prompt_slots, prompt, output_slots, output, own, floats = self.upload(
            *ragged(given, slots), *ragged(generated, slots), np.array(slots, np.int32), bits(parameters)
        )
        own = own.long()
        values = floats.view(torch.float32).view(-1, 3)
        self.presence[own], self.frequency[own], self.repetition[own] = values[:, 0], values[:, 1], values[:, 2]
        self.counts.index_fill_(0, own, 0)
        self.in_prompt.index_fill_(0, own, False)
        mark(self.in_prompt, prompt_slots, prompt, True)
        ones = torch.ones_like(output)
        self.counts.index_put_((output_slots.long(), output.long()), ones, accumulate=True)

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        kernels.penalize(
            logits, step.rows, self.device_slots, self.counts, self.in_prompt,
            self.presence, self.frequency, self.repetition,
        )  # fmt: skip

    def observe(self, tokens: torch.Tensor, step: SampledRows) -> None:
        kernels.count_tokens(tokens, step.rows, self.device_slots, self.counts)


# Sizes that tables have from the start where graphs read them; a longer list makes its table grow.
BIASED_TOKENS, BAD_WORDS, BAD_WORD_TOKENS = 64, 32, 4
NO_WORD, NO_TOKEN = -2, -3  # beside kernels.ANY_TOKEN in the beginnings of bad words: matches none; no token yet


def _extras(new_rows: Sequence[NewRow]) -> list[Extras]:
    return [new.sampling.extras for new in new_rows if new.sampling.extras is not None]


class Bias(Stage):
    """Adds numbers to the logits of some tokens."""

    capturable = True
    tables = ("ids", "values")

    def __init__(self, max_rows: int, device: torch.device) -> None:
        super().__init__(max_rows, device)
        self.ids, self.values = self.table(1, dtype=torch.int32), self.table(1)

    def reserve(self) -> None:
        super().reserve()
        self.widen("ids", BIASED_TOKENS, 0)
        self.widen("values", BIASED_TOKENS, 0)

    def asks(self, extras: Extras) -> bool:
        return bool(extras.logit_bias)

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        pairs = [extras.logit_bias for extras in _extras(new_rows)]
        width = room_for(map(len, pairs), self.ids.shape[1])
        self.widen("ids", width, 0)
        self.widen("values", width, 0)
        values = [[value for _, value in each] + [0.0] * (width - len(each)) for each in pairs]
        own, ids, floats = self.upload(
            np.array(slots, np.int32),
            padded([[token for token, _ in each] for each in pairs], 0, width),
            bits(list(chain.from_iterable(values))),
        )
        self.ids[own.long()] = ids.view(-1, width)
        self.values[own.long()] = floats.view(torch.float32).view(-1, width)

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        kernels.add_bias(logits, step.rows, self.device_slots, self.ids, self.values)


class Bans(Stage):
    """Allowed and forbidden token ids, as one bit per token."""

    capturable = True
    tables = ("allowed",)

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, device)
        self.allowed = self.table(-(-vocab_size // 32), dtype=torch.int32)

    def asks(self, extras: Extras) -> bool:
        return bool(extras.allowed_token_ids or extras.forbidden_token_ids)

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        words = np.stack([self._bits_of(extras) for extras in _extras(new_rows)])
        own, packed = self.upload(np.array(slots, np.int32), words)
        self.allowed[own.long()] = packed.view(words.shape)

    def _bits_of(self, extras: Extras) -> NDArray[np.int32]:
        may: NDArray[np.bool_] = np.full(32 * self.allowed.shape[1], not extras.allowed_token_ids)
        may[list(extras.allowed_token_ids)] = True
        may[list(extras.forbidden_token_ids)] = False
        return np.packbits(may, bitorder="little").view(np.int32)

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        kernels.mask_logits(logits, step.rows, self.device_slots, self.allowed)


class BadWords(Stage):
    """Token sequences that must not be completed: the last token is banned where the output ends with the others."""

    capturable = True
    tables = ("beginnings", "ends", "recent")

    def __init__(self, max_rows: int, device: torch.device) -> None:
        super().__init__(max_rows, device)
        self.beginnings = self.table(1, 1, dtype=torch.int32)  # [slots, words, tokens], to the right
        self.ends = self.table(1, dtype=torch.int32)  # [slots, words]
        self.recent = self.table(1, dtype=torch.int32)  # [slots, tokens] generated last

    def reserve(self) -> None:
        super().reserve()
        self._make_room(BAD_WORDS, BAD_WORD_TOKENS)

    def asks(self, extras: Extras) -> bool:
        return bool(extras.bad_words)

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        asked = _extras(new_rows)
        words = room_for((len(extras.bad_words) for extras in asked), self.beginnings.shape[1])
        lengths = (len(word) - 1 for extras in asked for word in extras.bad_words)
        length = room_for(lengths, self.recent.shape[1])
        self._make_room(words, length)
        beginnings = np.full((len(asked), words, length), NO_WORD, np.int32)
        ends = np.zeros((len(asked), words), np.int32)
        recent = np.full((len(asked), length), NO_TOKEN, np.int32)
        for line, (new, extras) in enumerate(zip(new_rows, asked, strict=True)):
            assert new.token_ids is not None, "a row with extras comes with its tokens"
            output = new.token_ids[extras.num_prompt_tokens :][-length:]
            recent[line, length - len(output) :] = output
            for i, word in enumerate(extras.bad_words):
                beginnings[line, i] = kernels.ANY_TOKEN
                beginnings[line, i, length - len(word) + 1 :] = word[:-1]
                ends[line, i] = word[-1]
        own, *parts = self.upload(np.array(slots, np.int32), beginnings, ends, recent)
        self.beginnings[own.long()] = parts[0].view(beginnings.shape)
        self.ends[own.long()] = parts[1].view(ends.shape)
        self.recent[own.long()] = parts[2].view(recent.shape)

    def _make_room(self, words: int, length: int) -> None:
        self.widen("beginnings", words, NO_WORD)
        self.widen("ends", words, 0)
        missing = length - self.recent.shape[1]
        if missing:  # to the left: words end at the right edge. What was written is still right, and just as short
            slots = len(self.recent)
            first = self.beginnings[:, :, :1]
            more = torch.where(first == NO_WORD, NO_WORD, kernels.ANY_TOKEN).to(torch.int32).expand(-1, -1, missing)
            unknown = torch.full((slots, missing), NO_TOKEN, dtype=torch.int32, device=self.device)
            longer, recent = torch.cat([more, self.beginnings], dim=2), torch.cat([unknown, self.recent], dim=1)
            self.beginnings, self.recent = longer, recent
            self.version += 1

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        kernels.ban_words(logits, step.rows, self.device_slots, self.beginnings, self.ends, self.recent)

    def observe(self, tokens: torch.Tensor, step: SampledRows) -> None:
        kernels.push_tokens(tokens, step.rows, self.device_slots, self.recent)


class TopEma(Stage):
    """A nucleus that widens when the distribution is flatter than it lately was. docs/sampling.md has a picture.

    H_t is the mass of the `top_ema_d` likeliest tokens, m_t its moving average. The nucleus kept is the smallest set
    with mass >= top_ema_p * m_t / H_t, clipped to [top_ema_p, 1].

    A slot belongs to a request and not to a row, because the average must survive preemption. New requests take the
    slots of the least recent ones.
    """

    narrows = True
    tables = ("share", "depth", "averages", "position")

    def __init__(self, max_rows: int, temperature: torch.Tensor, device: torch.device, num_drafts: int = 0) -> None:
        super().__init__(max_rows, device)
        self.temperature = temperature  # [rows]
        self.share, self.depth = self.table(), self.table(dtype=torch.int32)
        # The average at `position`, where a token was drawn last, and the averages before it. Those count if tokens are
        # drawn again: steps in flight are dropped when their request is preempted or a step runs out of memory.
        self.max_dropped = MAX_DROPPED * (1 + num_drafts) + num_drafts
        self.averages, self.position = self.table(1 + self.max_dropped), self.table(dtype=torch.int32)
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # by the request's key, least recent first
        self._most = 4 * max_rows
        self._new_slots: set[int] = set()  # taken, and not filled yet

    def asks(self, extras: Extras) -> bool:
        return extras.top_ema_p > 0 and extras.top_ema_d > 0

    def take(self, new: NewRow) -> int:
        assert new.sampling.extras is not None, "only rows with extras ask"
        key = new.sampling.extras.ema_key
        if key not in self._slot_of and len(self._slot_of) >= self._most:
            in_use = set(self.slots.tolist())
            oldest = next(old for old, slot in self._slot_of.items() if slot not in in_use)
            self._free.append(self._slot_of.pop(oldest))
        slot = self._slot_of.pop(key, None)
        if slot is None:
            slot = super().take(new)
            self._new_slots.add(slot)
        self._slot_of[key] = slot
        return slot

    def close(self, row: int) -> None:
        self.slots[row] = -1

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        asked = [extras for new in new_rows if (extras := new.sampling.extras) is not None]
        own, share, depth = self.upload(
            np.array(slots, np.int32),
            bits([extras.top_ema_p for extras in asked]),
            np.array([extras.top_ema_d for extras in asked], np.int32),
        )
        self.share[own.long()] = share.view(torch.float32)
        self.depth[own.long()] = depth
        fresh = [
            slot
            for new, extras, slot in zip(new_rows, asked, slots, strict=True)
            if slot in self._new_slots
            or new.token_ids is None
            or len(new.token_ids) == extras.num_prompt_tokens  # it has no output yet
        ]
        if fresh:
            begins = self.upload(np.array(fresh, np.int32))[0].long()
            self.averages.index_fill_(0, begins, UNSET)
            self.position.index_fill_(0, begins, -1)
        self._new_slots.clear()  # last: memory may run out before

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        lines, slots = self.lines(step)
        heat, position = self.temperature[step.rows[lines], None], step.positions[lines].to(torch.int32)
        ordered = (logits[lines] / torch.where(heat > 0, heat, 1.0)).sort(dim=-1, descending=True)
        probs = torch.softmax(ordered.values, dim=-1)
        sums = probs.cumsum(dim=-1)
        depth = self.depth[slots].clamp(max=logits.shape[-1]).long()
        mass = sums.gather(1, depth[:, None] - 1).squeeze(1)
        dropped = (self.position[slots] + 1 - position).clamp(0, self.max_dropped).long()
        ages = torch.arange(self.max_dropped, device=self.device)
        past = self.averages[slots].gather(1, (dropped[:, None] + ages).clamp(max=self.max_dropped))
        base = past[:, 0]
        average = torch.where(base < 0, mass, BETA * base + (1 - BETA) * mass)
        self.averages[slots], self.position[slots] = torch.cat([average[:, None], past], dim=1), position
        share = self.share[slots]
        goal = torch.minimum(torch.maximum(share * average / mass, share), torch.ones_like(share))
        kept = sums - probs < torch.where(goal < 1, goal, 2.0)[:, None]
        kept[:, 0] = True
        logits[lines] = logits[lines].masked_fill(~torch.zeros_like(kept).scatter(1, ordered.indices, kept), FORBIDDEN)


@dataclass(slots=True, eq=False)
class History:
    """The processors of one row, and the tokens that they are called with."""

    processors: tuple[Any, ...]  # called with (prompt, output, logits)
    prompt: list[int]
    output: list[int]


class Processors(Stage):
    """Python callables that change one row's logits."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        super().__init__(max_rows, device)
        self._histories: dict[int, History] = {}  # by slot

    def asks(self, extras: Extras) -> bool:
        return bool(extras.processors)

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        for new, slot in zip(new_rows, slots, strict=True):
            extras, tokens = new.sampling.extras, new.token_ids
            assert extras is not None and tokens is not None, "a row with extras comes with its tokens"
            virtual, given = extras.num_virtual_tokens, extras.num_prompt_tokens
            self._histories[slot] = History(extras.processors, tokens[virtual:given].tolist(), tokens[given:].tolist())

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        held = self.slots[step.host_rows]
        for line in np.flatnonzero(held >= 0).tolist():
            history = self._histories[int(held[line])]
            try:
                logits[line] = _processed(history, logits[line])
            except Exception as error:  # user code may raise anything; only its own request ends
                step.failures[line] = f"a logits processor failed: {type(error).__name__}: {error}"
            # bound to the history and not to the row, which another request may have by then
            step.on_host.append(partial(_append, history.output, line))


def _processed(history: History, logits: torch.Tensor) -> torch.Tensor:
    changed = logits.clone()
    for process in history.processors:
        changed = process(history.prompt, history.output, changed)
        if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
            kind = f"shape {tuple(changed.shape)}" if isinstance(changed, torch.Tensor) else type(changed).__name__
            raise TypeError(f"it must return logits of shape {tuple(logits.shape)}, not {kind}")
    if not bool((changed > -torch.inf).any()):  # nor is NaN
        raise ValueError("no token is left that could be drawn")
    return changed


def _append(output: list[int], line: int, tokens: NDArray[np.int32]) -> None:
    output.append(int(tokens[line]))
