"""What crosses a boundary: API process -> core -> worker -> core -> API process.

Plain slotted dataclasses of ints, strings and numpy arrays; no torch, no transport. Lengths named
"upper bound" may exceed the truth while sampled tokens are still on the device; the device holds the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.float32]

MAX_PREFIX_GROUPS = 16  # groups of rows that share a prefix in one step
MIN_PREFIX_GROUP_ROWS = 16  # rows of such a group
NULL_BLOCK = 0  # never handed out: what unused block-table entries and padding point at


def no_copies() -> Int32Array:
    return np.zeros((0, 2), np.int32)


def no_lines() -> Int32Array:
    return np.zeros(0, np.int32)


class FinishReason(IntEnum):
    """Why a request ended. NONE means that it has not."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4  # something of the request's own failed: Finished.error says what
    TIMEOUT = 5  # its deadline passed

    def __str__(self) -> str:
        return self.name.lower()


# ---------------------------------------------------------------- API process -> core


@dataclass(slots=True, frozen=True)
class Extras:
    """What few rows ask of sampling beyond RowSampling. Each group of fields is read by one stage of the sampler."""

    num_prompt_tokens: int  # of the row's tokens the first so many were given, the rest generated
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    forbidden_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    top_ema_p: float = 0.0  # 0: off
    top_ema_d: int = 0
    ema_key: int = 0  # under this number the moving average survives preemption
    processors: tuple[Any, ...] = ()  # Python callables (output ids, logits) or (prompt ids, output ids, logits)
    extra_args: dict[str, Any] | None = None  # for start-up processors, which the core's process puts in its place
    logprob_token_ids: tuple[int, ...] = ()  # log-probabilities of these in place of the likeliest
    prompt_logprobs: int | None = None  # top-n for each prompt token; None: off


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
    extras: Extras | None = None


@dataclass(slots=True, frozen=True)
class BeamSpec:
    """A request is searched by beams instead of sampled."""

    width: int  # beams in all
    num_groups: int = 1  # the beams are dealt to; groups after the first avoid the tokens of those before them
    diversity_penalty: float = 0.0  # off a token's log-probability for each beam of an earlier group that takes it
    length_penalty: float = 1.0  # a text's score is its log-probability / length ** length_penalty
    early_stopping: bool | str = False  # True: as soon as there are enough texts; "never": only when none can be better
    eos_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class Terms:
    """On what terms a request is served: what queue policies look at. Times are of `time.monotonic`."""

    arrival: float = 0.0
    priority: int = 0  # lower goes first
    tenant: str = ""  # whose request it is, an API key's name for example
    weight: float = 1.0  # the tenant's share against other tenants'
    deadline: float | None = None  # when it must be done


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
    reads_cache: bool = True  # False: compute the whole prompt, whatever is cached
    picked: bool = False  # sampled tokens are proposals: whoever sent it picks (Scheduler.pick), and it waits for that
    beam: BeamSpec | None = None
    least_tokens: int = 1  # it cannot end by itself with fewer
    terms: Terms = field(default_factory=Terms)
    forks: tuple[EngineRequest, ...] = ()  # requests of the same prompt that share what this one computes of it


@dataclass(slots=True)
class Started:
    """A request runs for the first time."""

    key: int
    waited: float  # seconds since its arrival
    num_cached_tokens: int  # of its prompt, found in the cache


@dataclass(slots=True)
class Finished:
    """The last word on a request. `token_ids` is set unless they were streamed."""

    key: int
    reason: FinishReason
    stop_token_id: int | None
    token_ids: Int32Array | None
    error: str | None = None
    first_token: float | None = None  # seconds from its arrival, unless its tokens were streamed


@dataclass(slots=True)
class Part:
    """A named, optional piece of a step's result: columns of numbers, one entry for each of `index`.

    Log-probabilities, hidden states or acceptance counts all travel as parts, so a new kind needs no new message.
    """

    index: Int32Array  # [m] the line of the step, or of the output, that each entry belongs to
    ints: dict[str, Int32Array] = field(default_factory=dict)  # each [m] or [m, n]
    floats: dict[str, FloatArray] = field(default_factory=dict)  # likewise

    def select(self, lines: NDArray[np.int64], num_lines: int) -> Part | None:
        """The entries of `lines`, renumbered by their place among them; None if there are none."""
        place = np.full(num_lines, -1, np.int32)
        place[lines] = np.arange(len(lines))
        index = place[self.index]
        chosen = np.flatnonzero(index >= 0)
        if not len(chosen):
            return None
        ints = {name: column[chosen] for name, column in self.ints.items()}
        return Part(index[chosen], ints, {name: column[chosen] for name, column in self.floats.items()})


# Names of parts, with their columns.
LOGPROBS = "logprobs"  # of sampled tokens. token_ids and values [m, 1 + n]: the token's own, then the top n; ranks [m]
PROMPT_LOGPROBS = "prompt_logprobs"  # the same of prompt tokens; positions [m]


def select_parts(parts: dict[str, Part], lines: NDArray[np.int64], num_lines: int) -> dict[str, Part]:
    """The parts of some of a step's lines."""
    chosen = {name: part.select(lines, num_lines) for name, part in parts.items()}
    return {name: part for name, part in chosen.items() if part is not None}


@dataclass(slots=True)
class Hypothesis:
    """A text that a beam search has found."""

    token_ids: Int32Array
    score: float  # what texts are ranked by
    cumulative_logprob: float
    stop_token_id: int | None = None


@dataclass(slots=True)
class BeamOutput:
    """Where a beam search stands: the best text so far, or all of them, best first, when it is done."""

    key: int
    hypotheses: list[Hypothesis]
    num_agreed: int  # that many tokens of the best will not change any more
    finished: bool


@dataclass(slots=True)
class EngineOutput:
    """What one step gives the API process: arrays for streamed tokens, objects only for starts and finishes."""

    keys: NDArray[np.int64]  # [n] requests with streamed tokens or with entries in a part
    token_ids: Int32Array  # [n, 1 + k]
    counts: Int32Array  # [n] how many of a line's tokens are real
    parts: dict[str, Part] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    beams: Sequence[BeamOutput] = ()
    started: list[Started] = field(default_factory=list)

    @classmethod
    def empty(cls) -> EngineOutput:
        return cls(np.zeros(0, np.int64), np.zeros((0, 1), np.int32), np.zeros(0, np.int32))


# Steps are counted by how many tokens they computed: up to each of these (vLLM's buckets), and more.
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def no_step_sizes() -> list[int]:
    return [0] * (len(STEP_SIZES) + 1)


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
    step_sizes: list[int] = field(default_factory=no_step_sizes)  # steps by STEP_SIZES
    num_waiting_tokens: int = 0  # of prompts
    refused_requests: int = 0  # because the queue was full
    held_back: int = 0  # steps in which the watermark kept a request waiting
    timeouts_waiting: int = 0  # requests that ended at their deadline, or before it, without running at the time ...
    timeouts_running: int = 0  # ... and while they ran
    timeouts_foreseen: int = 0  # of those, ended before their deadline because they could not meet it
    recomputed_tokens: int = 0  # computed before a preemption and again after it
    # the tier in host memory
    host_blocks: int = 0
    host_used_blocks: int = 0  # kept for preempted requests
    host_cached_blocks: int = 0
    swapped_preemptions: int = 0  # whose blocks were kept; the others' are recomputed, or found in the cache
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    offloaded_blocks: int = 0  # evicted on the device, copied out
    restored_blocks: int = 0  # of those, copied in again
    host_evictions: int = 0
    host_cache_hits: int = 0  # tokens of prefix_cache_hits that came from there
    # CUDA graphs
    num_graphs: int = 0
    graph_bytes: int = 0  # of the device's memory
    graphs_deferred: int = 0  # captures postponed because there was no memory
    graphs_dropped: int = 0  # to make way for others


# ---------------------------------------------------------------- core -> worker


@dataclass(slots=True)
class NewRow:
    """A request takes a row. Sent once, before the first step that schedules the row."""

    row: int
    num_computed: int  # tokens whose KV already lies in the cache
    sampling: RowSampling
    token_ids: Int32Array | None = None  # all its tokens, where sampling has extras


@dataclass(slots=True)
class PrefixGroups:
    """Groups of a step's rows whose first tokens lie in the same blocks."""

    tokens: Int32Array  # [groups] how many
    starts: Int32Array  # [groups + 1] where in `members` each group begins, and the last ends
    members: Int32Array  # lines of the plan


def max_prefix_groups(rows: int) -> int:
    """Number of prefix groups that a step of this many rows can have."""
    return min(MAX_PREFIX_GROUPS, max(1, rows // MIN_PREFIX_GROUP_ROWS))


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
    # block-table entries that changed: flat position ((group * rows + row) * width + column) ...
    table_index: Int32Array
    table_block: Int32Array  # ... and block id
    copies: Int32Array  # [c, 2] blocks to copy, (from, to), before this step writes; no block is both
    # [m, 2] before those, blocks to copy (device, host), and then (host, device), each ordered by host block
    to_host: Int32Array = field(default_factory=no_copies)
    from_host: Int32Array = field(default_factory=no_copies)
    wants_logprobs: bool = False
    waits_for_host: bool = False  # sampling waits for the SampleInputs of this step
    shared: PrefixGroups | None = None  # of the rows that run one token; None: none that is worth telling
    step: int = 0

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class SampleInputs:
    """What the core learned after it launched a step's forward pass, for the sampling of that step. Lines are the
    plan's; a line stands in at most one of the three lists."""

    mask_lines: Int32Array = field(default_factory=no_lines)  # [m] lines that may draw only some tokens: ...
    masks: Int32Array = field(default_factory=no_copies)  # [m, words] ... those whose bit is set, 32 to a word
    forced_lines: Int32Array = field(default_factory=no_lines)  # [f] lines that take a given token instead of drawing
    forced_tokens: Int32Array = field(default_factory=no_lines)  # [f]
    dropped_lines: Int32Array = field(default_factory=no_lines)  # lines whose request has ended: they yield no token


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


@dataclass(slots=True)
class DeviceMemory:
    """Where a device's memory went, in bytes; of several devices together."""

    total: int | None  # None: it does not tell
    weights: int
    kv_cache: int
    largest_step: int | None = None  # what it takes beside the weights; None where that was not measured
    outside: int | None = None  # the driver's, and other processes'; likewise
    graphs: int = 0  # measured as they are captured, so that there are none at the start
    graphs_expected: int = 0  # a guess

    def in_words(self) -> str:
        parts = {
            "weights": self.weights,
            "the largest step": self.largest_step,
            "KV cache": self.kv_cache,
            "outside torch": self.outside,
            "graphs": self.graphs,
        }
        words = [f"{_gib(size)} {name}" for name, size in parts.items() if size]
        words += [f"{name} not measured" for name, size in parts.items() if size is None]
        if self.total is None:
            return f"GiB: {', '.join(words)}"
        free = f"{_gib(self.total - sum(size or 0 for size in parts.values()))} free"
        if self.graphs_expected:
            free += f", of which graphs are expected to take {_gib(self.graphs_expected)} as they are captured"
        return f"{_gib(self.total)} GiB: {', '.join(words)}, {free}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"


# ---------------------------------------------------------------- worker -> core


@dataclass(slots=True, frozen=True)
class StepCosts:
    """Measured seconds."""

    copy_block: float  # one block, all its layers, between device and host
    compute_token: float  # one prompt token


@dataclass(slots=True, frozen=True)
class GraphUse:
    """CUDA graphs that there are now."""

    count: int = 0
    bytes: int = 0  # of the device's memory, measured as they were captured; of several devices together
    deferred: int = 0  # captures postponed for want of memory, since the start
    dropped: int = 0  # since the start: to make way for others


@dataclass(slots=True)
class StepResult:
    """Tokens of the rows that sampled, in plan order (rows that did not sample have count 0)."""

    token_ids: Int32Array  # [n, 1 + k]
    counts: Int32Array  # [n]
    parts: dict[str, Part] = field(default_factory=dict)
    failures: dict[int, str] | None = None  # by line: a row's own code failed, and the row must end
    graphs: GraphUse | None = None  # None: steps never run as graphs


class StepFuture(Protocol):
    """A result that is on its way. `done` never blocks."""

    def done(self) -> bool: ...

    def result(self) -> StepResult: ...


# ----------------------------------------------------------------
# A picture of the engine at one moment, for people who watch it. Made by engine/snapshot.py only when asked for.
#
# Any process. Requests are known by their key here: text and ids that clients chose never reach the core.


@dataclass(slots=True)
class RequestPicture:
    """Where one request stands. Lengths are tokens."""

    key: int
    num_prompt: int
    num_computed: int  # prompt and output, with KV in the cache
    num_output: int
    max_output: int
    num_cached: int  # of the prompt, found in the cache when it was first admitted
    num_preemptions: int
    waited: float  # seconds since it arrived


@dataclass(slots=True)
class StepPicture:
    """One step that was planned."""

    step: int
    time: float  # seconds since 1970
    prompt_tokens: int
    decode_tokens: int
    sampled: int  # tokens that the step gives
    num_running: int
    num_waiting: int
    preemptions: int  # since the step before


@dataclass(slots=True)
class Snapshot:
    time: float  # seconds since 1970
    stats: EngineStats
    memory: DeviceMemory
    block_size: int  # tokens
    block_bytes: int
    running: list[RequestPicture]  # first admitted first
    waiting: list[RequestPicture]  # next first; only the first of very many, stats has their number
    held: Int32Array  # the blocks of the running requests, one request after the other, in the order of their text
    num_held: Int32Array  # how many of them are each request's; a block that several share is there several times
    cached: Int32Array  # blocks that nobody holds and whose content can still be hit, next to be evicted first
    steps: list[StepPicture]  # the last ones, oldest first; none from before somebody began to watch
