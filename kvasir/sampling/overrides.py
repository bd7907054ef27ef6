"""What the host decides about single lines after their forward pass was launched: masks of allowed tokens, and tokens
that a line takes instead of drawing. See messages.SampleInputs; structured output and speculation send them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvasir import kernels
from kvasir.messages import Int32Array, SampleInputs
from kvasir.sampling.features import NO_LINES, FeatureUse, HeadLayout, RowFeature, SampledLines, SampledRows

NOT_SET = -1


@dataclass(slots=True, frozen=True)
class OverrideKey:
    masks: bool
    forces: bool


BOTH = OverrideKey(masks=True, forces=True)


@dataclass(slots=True, kw_only=True)
class OverrideUse(FeatureUse):
    mask_index: Int32Array  # [m] which of the lines that sample have a mask
    masks: Int32Array  # [m, words]
    forced_index: Int32Array  # [f] which of them take a given token
    forced_tokens: Int32Array  # [f]

    def inputs(self, key: OverrideKey, layout: HeadLayout) -> tuple[Int32Array, ...]:
        arrays: list[Int32Array] = []
        if key.masks:
            numbers = np.arange(len(self.mask_index), dtype=np.int32)
            arrays += [_spread(self.mask_index, numbers, layout), self.masks.reshape(-1)]
        if key.forces:
            arrays.append(_spread(self.forced_index, self.forced_tokens, layout))
        return tuple(arrays)


class SampleOverrides(RowFeature):
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, max_lines: int = 0) -> None:
        self.device = device
        self.max_lines = max(max_rows, max_lines)
        self.vocab_size = vocab_size
        self.words = -(-vocab_size // 32)
        self._line_numbers = torch.arange(self.max_lines, device=device)
        # for graphs, taken when a graph first needs them: masks of all lines are some megabytes
        self._mask_numbers: torch.Tensor | None = None  # [lines] which mask is a line's; NOT_SET: none
        self._masks: torch.Tensor | None = None  # [lines * words]
        self._forced: torch.Tensor | None = None  # [lines] the line's token; NOT_SET: it draws

    def use(self, sampled: SampledLines) -> FeatureUse | None:
        given = sampled.inputs
        if given is None or not (len(given.mask_lines) or len(given.forced_lines)):
            return None
        key = OverrideKey(masks=len(given.mask_lines) > 0, forces=len(given.forced_lines) > 0)
        return OverrideUse(
            key,
            mask_index=_index(sampled, given.mask_lines),
            masks=self._checked(given),
            forced_index=_index(sampled, given.forced_lines),
            forced_tokens=given.forced_tokens,
        )

    def _checked(self, given: SampleInputs) -> Int32Array:
        """Masks of the model's whole vocabulary. It may be larger than the tokenizer's; those tokens are forbidden."""
        masks = given.masks
        assert masks.shape[1] <= self.words or not len(masks), f"masks are of {self.vocab_size} tokens at the most"
        missing = self.words - masks.shape[1]
        return np.pad(masks, ((0, 0), (0, missing))) if missing > 0 and len(masks) else masks

    # ------------------------------------------------------------ on the device

    def edits_logits(self, key: OverrideKey) -> bool:
        return key.masks

    def edit_logits(
        self, key: OverrideKey, logits: torch.Tensor, step: SampledRows, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        if key.masks:
            numbers, masks = inputs[:2]
            lines = self._line_numbers[: len(logits)] if step.lines is None else step.lines
            kernels.mask_logits(logits, lines, numbers, masks.view(-1, self.words))

    def replace_tokens(
        self, key: OverrideKey, tokens: torch.Tensor, step: SampledRows, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        if not key.forces:
            return tokens
        forced = inputs[-1] if step.lines is None else inputs[-1][step.lines]
        return torch.where(forced >= 0, forced, tokens)

    # ------------------------------------------------------------ graphs

    def graph_keys(self, size: int) -> tuple[OverrideKey, ...]:
        return (BOTH,)

    def graph_key(self, key: OverrideKey, size: int) -> OverrideKey:
        return BOTH

    def buffers(self, key: OverrideKey, size: int) -> tuple[torch.Tensor, ...]:
        found: list[torch.Tensor] = []
        if key.masks:
            if self._mask_numbers is None or self._masks is None:
                self._mask_numbers = self._buffer(self.max_lines)
                self._masks = self._buffer(self.max_lines * self.words)
            found += [self._mask_numbers[:size], self._masks[: size * self.words]]
        if key.forces:
            if self._forced is None:
                self._forced = self._buffer(self.max_lines)
            found.append(self._forced[:size])
        return tuple(found)

    def clear(self, key: OverrideKey, size: int) -> None:
        for buffer in self.buffers(key, size):
            buffer.fill_(NOT_SET)

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.full((size,), NOT_SET, dtype=torch.int32, device=self.device)

    def labels(self, key: OverrideKey) -> tuple[str, ...]:
        return tuple(word for word, asked in (("masks", key.masks), ("forced", key.forces)) if asked)


def _index(sampled: SampledLines, lines: Int32Array) -> Int32Array:
    """Which of the lines that sample these lines of the plan are."""
    if not len(lines):
        return NO_LINES
    index = np.searchsorted(sampled.lines, lines).astype(np.int32)
    known = index < len(sampled.lines)
    assert known.all() and (sampled.lines[index] == lines).all(), "masks and forced tokens are for lines that sample"
    return index


def _spread(index: Int32Array, values: Int32Array, layout: HeadLayout) -> Int32Array:
    """Values of some lines over all lines of logits."""
    spread = np.full(layout.size, NOT_SET, np.int32)
    spread[layout.places(index)] = values
    return spread
