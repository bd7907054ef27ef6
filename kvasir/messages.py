"""What crosses a boundary: API process -> core -> worker -> core -> API process.

Plain slotted dataclasses of ints, strings and numpy arrays; no torch, no transport. Lengths named
"upper bound" may exceed the truth while sampled tokens are still on the device; the device holds the truth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.float32]

NULL_BLOCK = 0  # never handed out: what unused block-table entries and padding point at


class FinishReason(IntEnum):
    """Why a request ended. NONE means that it has not."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3

    def __str__(self) -> str:
        return self.name.lower()


# ---------------------------------------------------------------- API process -> core


@dataclass(slots=True, frozen=True)
class RowSampling:
    """What a worker must know to sample for one row. Everything textual stays in the API process."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 32 bits; the random stream depends on (seed, position) alone
    logprobs: int | None = None  # top-n beside the sampled token's own; None: off
    banned_until: int = 0  # stop_token_ids cannot be sampled at positions below this (min_tokens)
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class EngineRequest:
    """A validated request. `key` is the number the API process knows it by."""

    key: int
    prompt_token_ids: Int32Array
    max_tokens: int
    sampling: RowSampling = field(default_factory=RowSampling)
    stream: bool = True  # send tokens as they come; otherwise all of them with the finish
    cache_salt: bytes = b""  # requests share cached prefixes only within one salt
    needs_last_token: bool = False  # leave it out of a step until its last token is known to the host


@dataclass(slots=True)
class Finished:
    """The last word on a request. `token_ids` is set unless they were streamed."""

    key: int
    reason: FinishReason
    stop_token_id: int | None
    num_cached_tokens: int
    token_ids: Int32Array | None


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of some sampled tokens. Column 0 is the sampled token, the rest the top n by rank."""

    index: Int32Array  # [m] which entry of the step's tokens each line belongs to
    token_ids: Int32Array  # [m, 1 + n]
    values: FloatArray  # [m, 1 + n]
    ranks: Int32Array  # [m] rank of the sampled token, 1 = most likely


@dataclass(slots=True)
class EngineOutput:
    """What one step gives the API process: arrays for streamed tokens, objects only for finishes."""

    keys: NDArray[np.int64]  # [n]
    token_ids: Int32Array  # [n, 1 + k]
    counts: Int32Array  # [n] how many of a line's tokens are real
    logprobs: Logprobs | None = None
    finished: list[Finished] = field(default_factory=list)


@dataclass(slots=True)
class EngineStats:
    """The core's gauges and, since its start, counters. Snapshot, taken when asked for."""

    num_running: int
    num_waiting: int
    num_blocks: int  # that requests can hold
    num_used_blocks: int
    num_cached_blocks: int
    steps: int
    scheduled_tokens: int
    preemptions: int
    partial_prefills: int
    dropped_tokens: int
    prefix_cache_queries: int  # tokens
    prefix_cache_hits: int  # tokens
    evictions: int
    copied_blocks: int
    shared_blocks: int
    freed_blocks: int  # given back by rows that go on, because no layer of their group sees them any more


# ---------------------------------------------------------------- core -> worker


@dataclass(slots=True)
class NewRow:
    """A request takes a row. Sent once, before the first step that schedules the row."""

    row: int
    num_computed: int  # tokens whose KV already lies in the cache
    sampling: RowSampling


@dataclass(slots=True)
class StepPlan:
    """One step: which rows run, and how many tokens each. Decodes stand first, then longer chunks."""

    rows: Int32Array  # [n]
    num_tokens: Int32Array  # [n] tokens computed this step
    samples: NDArray[np.bool_]  # [n] whether the row yields a token
    # [sum of num_tokens] input ids; -1 where the token is still on the device (sampled by an earlier step)
    token_ids: Int32Array
    bounds: Int32Array  # [n] upper bound of each row's length after this step
    num_decodes: int  # the first so many rows run exactly one token
    new_rows: list[NewRow]
    table_index: Int32Array  # changed table entries: flat position ((group * rows + row) * width + column) ...
    table_block: Int32Array  # ... and block id
    copies: Int32Array  # [c, 2] blocks to copy, (from, to), before this step writes
    wants_logprobs: bool = False
    step: int = 0

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class KVSpec:
    """What the worker needs of the KV cache. Layers are in groups that have block tables of their own; a block is one
    group's, and every group has as many layers (the last of a kind may leave some unused)."""

    num_layers: int  # of a group
    block_size: int
    page_bytes: int  # one block of one layer
    windows: tuple[int | None, ...] = (None,)  # per group: how many last tokens its layers see, None: all

    @property
    def block_bytes(self) -> int:
        """One block of all layers of a group."""
        return self.num_layers * self.page_bytes


# ---------------------------------------------------------------- worker -> core


@dataclass(slots=True)
class StepResult:
    """Tokens of the rows that sampled, in plan order (rows that did not sample have count 0)."""

    token_ids: Int32Array  # [n, 1 + k]
    counts: Int32Array  # [n]
    logprobs: Logprobs | None = None  # `index` counts lines of token_ids


class StepFuture(Protocol):
    """A result that is on its way. `done` never blocks."""

    def done(self) -> bool: ...

    def result(self) -> StepResult: ...
