"""Rules about tokens: penalties, bias, allowed and forbidden ids, and bad words. Each is a stage of the sampler.

Histories of rows (counts, recent tokens) are kept on the device and updated there with every token, so that such rows
run as asynchronously as others. Worker process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir import kernels
from kvasir.messages import Extras, NewRow
from kvasir.sampling.features import SampledRows
from kvasir.sampling.stages import Stage, bits, mark, padded, ragged, room_for


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
