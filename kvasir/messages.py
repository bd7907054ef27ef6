"""Messages between processes: API process -> core -> worker -> core -> API process.

They are plain slotted dataclasses of ints, strings and numpy arrays; this file knows no torch and no transport. A
length called an "upper bound" may be too high while sampled tokens are still on the device, which has the true one.
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

MAX_PREFIX_GROUPS = 16  # groups of rows with a shared prefix in one step
MIN_GROUP_ROWS = 16  # rows that such a group has at least
NULL_BLOCK = 0  # unused block-table entries and padding point at this block; it is never allocated
# Upper bounds of the histograms of cached blocks' times, in seconds (vLLM's buckets); a last bucket counts longer ones.
BLOCK_AGES = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200),
    1800,
)


def no_block_ages() -> list[int]:
    return [0] * (len(BLOCK_AGES) + 1)


def empty_pairs() -> Int32Array:
    return np.zeros((0, 2), np.int32)


def empty_ints() -> Int32Array:
    return np.zeros(0, np.int32)


class FinishReason(IntEnum):
    """Why a request ended. NONE: it has not ended."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4  # it failed alone, by its logits processor or by logits that are not numbers; see Finished.error
    TIMEOUT = 5  # its deadline passed

    def __str__(self) -> str:
        return self.name.lower()


# ---------------------------------------------------------------- API process -> core


@dataclass(slots=True, frozen=True)
class Extras:
    """Rarely used sampling parameters. Each stage of the sampler reads its own fields."""

    num_prompt_tokens: int  # the row's first tokens, which were not generated
    num_virtual_tokens: int = 0  # the first of them, which stand for a soft prompt: no rule counts their ids
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all tokens are allowed
    forbidden_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be generated
    top_ema_p: float = 0.0  # 0: off
    top_ema_d: int = 0
    ema_key: int = 0  # key of the row's moving average, which survives preemption
    processors: tuple[Any, ...] = ()  # Python callables (output ids, logits) or (prompt ids, output ids, logits)
    extra_args: dict[str, Any] | None = None  # for start-up processors; the core replaces it by their callables
    logprob_token_ids: tuple[int, ...] = ()  # return log-probabilities of these tokens instead of the top n
    prompt_logprobs: int | None = None  # top-n for each prompt token; None: off


@dataclass(slots=True, frozen=True)
class RowSampling:
    """Sampling parameters of one row, as the worker needs them. Stop strings stay in the API process."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 32 bits; the random stream depends on (seed, position) alone
    logprobs: int | None = None  # number of top tokens besides the sampled one; None: off
    banned_until: int = 0  # stop_token_ids cannot be sampled at positions below this (min_tokens)
    stop_token_ids: tuple[int, ...] = ()
    extras: Extras | None = None


@dataclass(slots=True, frozen=True)
class RowPooling:
    """How the vectors of a pooling request are made of its hidden states, as the worker needs it."""

    task: str  # of POOLING_TASKS
    num_tokens: int  # of its prompt
    activate: bool = True  # apply the pooler's last function: normalise an embedding, make probabilities of classes


@dataclass(slots=True, frozen=True)
class BeamSpec:
    """Parameters of a beam search."""

    width: int  # number of beams in all groups together
    num_groups: int = 1  # the beams are split into groups; later groups avoid the tokens of earlier ones
    diversity_penalty: float = 0.0  # subtracted from a token's log-probability for each earlier group's beam with it
    length_penalty: float = 1.0  # the score of a text is its log-probability / length ** length_penalty
    early_stopping: bool | str = False  # True: stop at `width` texts; "never": stop when no beam can score higher
    eos_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class Terms:
    """Scheduling parameters of a request, for queue policies. Times are readings of `time.monotonic`."""

    arrival: float = 0.0
    priority: int = 0  # lower values go first
    tenant: str = ""  # the user it is accounted to, for example the name of an API key
    weight: float = 1.0  # the tenant's share relative to other tenants
    deadline: float | None = None  # time at which the request ends if it is not complete


@dataclass(slots=True, frozen=True)
class Resource:
    """Something that a request needs on the device before it can run, such as an adapter's weights. Requests share it
    if their digests are equal; the core knows nothing else of it."""

    digest: bytes
    source: str  # where and as what the worker finds it


@dataclass(slots=True)
class EngineRequest:
    """A validated request. `key` is the number by which the API process knows it."""

    key: int
    prompt_token_ids: Int32Array
    max_tokens: int  # 0: it samples nothing and ends with the forward pass of its prompt
    sampling: RowSampling = RowSampling()
    stream: bool = True  # send tokens as they are sampled; False: send all of them with Finished
    cache_salt: bytes = b""  # requests share cached prefixes only if their salts are equal
    needs_last_token: bool = False  # schedule it only when the host knows its last token
    reads_cache: bool = True  # False: compute the whole prompt even if it is cached
    external_tokens: bool = False  # sampled tokens are proposals; the request waits for Scheduler.append
    awaited: bool = False  # running requests wait for it, so it is admitted first after a preemption
    num_drafts: int = 0  # tokens that the worker may draft and verify for it in a step
    guide: tuple[str, Any] | None = None  # name and argument of the guide that restricts its tokens (engine/guides.py)
    beam: BeamSpec | None = None
    min_tokens: int = 1  # output tokens before which it cannot stop
    embeddings: FloatArray | None = None  # [tokens, hidden] of the prompt, whose ids then mean nothing
    resource: Resource | None = None  # it waits, alone, until this is on the device
    terms: Terms = Terms()
    forks: tuple[EngineRequest, ...] = ()  # requests with the same prompt, which share the KV blocks computed for it
    pooling: RowPooling | None = None  # set if max_tokens is 0


@dataclass(slots=True)
class Started:
    """A request was admitted for the first time."""

    key: int
    waited: float  # seconds since its arrival
    num_cached_tokens: int  # prompt tokens found in the prefix cache


# How the error of a request begins whose own rules contradict each other.
LEFT_GRAMMAR = "the output can no longer be held to its grammar"


@dataclass(slots=True)
class Finished:
    """A request ended. `token_ids` is None if its tokens were streamed."""

    key: int
    reason: FinishReason
    stop_token_id: int | None
    token_ids: Int32Array | None
    error: str | None = None
    first_token: float | None = None  # seconds from arrival to first token; None if tokens were streamed


@dataclass(slots=True)
class Part:
    """A named, optional part of a step's result: columns of numbers with one entry per element of `index`.

    Log-probabilities, hidden states or acceptance counts are all sent as parts, so a new kind needs no new message.
    """

    index: Int32Array  # [m] line of the step, or of the output, that the entry belongs to
    ints: dict[str, Int32Array] = field(default_factory=dict)  # each [m] or [m, n]
    floats: dict[str, FloatArray] = field(default_factory=dict)  # each [m] or [m, n]

    def select(self, lines: NDArray[np.int64], num_lines: int) -> Part | None:
        """Return the entries of `lines`, with `index` counting within `lines`; None if there are no entries."""
        place = np.full(num_lines, -1, np.int32)
        place[lines] = np.arange(len(lines))
        index = place[self.index]
        chosen = np.flatnonzero(index >= 0)
        if not len(chosen):
            return None
        ints = {name: column[chosen] for name, column in self.ints.items()}
        return Part(index[chosen], ints, {name: column[chosen] for name, column in self.floats.items()})


# Names of parts, with their columns.
LOGPROBS = "logprobs"  # token_ids and values [m, 1 + n]: the sampled token, then the top n; ranks [m]
PROMPT_LOGPROBS = "prompt_logprobs"  # the same columns for prompt tokens, and positions [m]
# One part per pooling task: values [m, n] of whole prompts, or of single tokens, and then positions [m].
POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


def select_parts(parts: dict[str, Part], lines: NDArray[np.int64], num_lines: int) -> dict[str, Part]:
    """Return the parts of a step's result, restricted to `lines`."""
    chosen = {name: part.select(lines, num_lines) for name, part in parts.items()}
    return {name: part for name, part in chosen.items() if part is not None}


@dataclass(slots=True)
class Hypothesis:
    """A text found by a beam search."""

    token_ids: Int32Array
    score: float  # texts are ranked by it
    cumulative_logprob: float
    stop_token_id: int | None = None


@dataclass(slots=True)
class BeamOutput:
    """State of a beam search: the best text so far or, when it has finished, all texts with the best first."""

    key: int
    hypotheses: list[Hypothesis]
    num_agreed: int  # first tokens of the best text that are final
    finished: bool


@dataclass(slots=True)
class EngineOutput:
    """Output of one step for the API process: arrays for streamed tokens, objects only for starts and finishes."""

    keys: NDArray[np.int64]  # [n] requests with streamed tokens or with entries in a part
    token_ids: Int32Array  # [n, 1 + k]
    counts: Int32Array  # [n] number of valid tokens in each line
    parts: dict[str, Part] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    beams: Sequence[BeamOutput] = ()
    started: list[Started] = field(default_factory=list)

    @classmethod
    def empty(cls) -> EngineOutput:
        return cls(np.zeros(0, np.int64), np.zeros((0, 1), np.int32), np.zeros(0, np.int32))


# ---------------------------------------------------------------- core -> worker


@dataclass(slots=True)
class NewRow:
    """A request got a row. Sent once, in the next plan, before or with the first step that runs the row."""

    row: int
    num_computed: int  # tokens whose KV is already in the cache
    sampling: RowSampling
    token_ids: Int32Array | None = None  # all its tokens; only set if sampling has extras, or drafts are made for it
    pooling: RowPooling | None = None
    embeddings: FloatArray | None = None  # of its first tokens, in place of those of their ids
    resource_slot: int = -1  # where its resource lies on the device; -1: it needs none


@dataclass(slots=True)
class PrefixGroups:
    """Groups of a step's rows whose first tokens are in the same blocks."""

    tokens: Int32Array  # [groups] number of shared tokens
    starts: Int32Array  # [groups + 1] first index of each group in `members`, and the end of the last
    members: Int32Array  # lines of the plan


def max_prefix_groups(rows: int) -> int:
    """Number of prefix groups that this many rows can form."""
    return min(MAX_PREFIX_GROUPS, max(1, rows // MIN_GROUP_ROWS))


@dataclass(slots=True)
class StepPlan:
    """One step: the rows that run and their numbers of tokens. Decodes come first, longer chunks after them."""

    rows: Int32Array  # [n]
    num_tokens: Int32Array  # [n] tokens computed this step
    samples: NDArray[np.bool_]  # [n] whether the row samples a token
    # [sum of num_tokens] input ids; -1 where the token is still on the device (sampled by an earlier step)
    token_ids: Int32Array
    bounds: Int32Array  # [n] upper bound of each row's length after this step
    num_decodes: int  # number of first rows that run exactly one token
    new_rows: list[NewRow]
    # changed block-table entries: flat position ((group * rows + row) * width + column) ...
    table_index: Int32Array
    table_block: Int32Array  # ... and block id
    copies: Int32Array  # [c, 2] blocks to copy (from, to) before this step writes; no block is in both columns
    # [m, 2] blocks to copy before `copies`: first (device, host), then (host, device), each sorted by host block
    to_host: Int32Array = field(default_factory=empty_pairs)
    from_host: Int32Array = field(default_factory=empty_pairs)
    wants_logprobs: bool = False
    waits_for_host: bool = False  # sampling waits for the SampleInputs of this step
    shared: PrefixGroups | None = None  # prefix groups among the decodes; None: none is large enough to help
    drafts: Int32Array | None = None  # [n] how many of each row's last tokens are drafts; None: none of any row
    ahead: Int32Array | None = None  # [n] drafts that are wanted for each row's next step; None: none
    step: int = 0

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class SampleInputs:
    """Inputs of a step's sampling that the core learns after it launched the forward pass. Lines are those of the
    plan; a line is in at most one of the three lists."""

    mask_lines: Int32Array = field(default_factory=empty_ints)  # [m] lines that may sample only some tokens: ...
    masks: Int32Array = field(default_factory=empty_pairs)  # [m, words] ... those whose bit is set, 32 per word
    forced_lines: Int32Array = field(default_factory=empty_ints)  # [f] lines that take a given token
    forced_tokens: Int32Array = field(default_factory=empty_ints)  # [f]
    dropped_lines: Int32Array = field(default_factory=empty_ints)  # lines whose request has ended: they sample nothing


@dataclass(slots=True)
class KVSpec:
    """Shape of the KV cache that the model needs. Layers are split into groups with separate block tables. A block
    belongs to one group. All groups have the same number of layers; the last group of a kind may leave some unused."""

    num_layers: int  # layers per group
    block_size: int
    page_bytes: int  # bytes of one block of one layer
    # per group: number of last tokens its layers attend to; None: all. No group: the model has no cache.
    windows: tuple[int | None, ...] = (None,)
    draft_bytes: int = 0  # bytes that a drafter keeps for each block

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers of its group, and with what a drafter keeps for it."""
        return self.num_layers * self.page_bytes + self.draft_bytes


@dataclass(slots=True)
class DeviceMemory:
    """Use of device memory in bytes; several devices are added up."""

    total: int | None  # None: the device does not report it
    weights: int
    kv_cache: int
    largest_step: int | None = None  # peak memory of a step besides weights and KV cache; None: not measured
    outside: int | None = None  # of the driver, other processes and other engines of this one; None: not measured
    graphs: int = 0  # measured at each capture, so 0 at the start
    graphs_expected: int = 0  # estimate for all graphs

    def describe(self) -> str:
        parts = {
            "weights": self.weights,
            "the largest step": self.largest_step,
            "KV cache": self.kv_cache,
            "outside the engine": self.outside,
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
class AdapterTarget:
    """A module of the model that an adapter may change. Sizes are those of the whole model, not of a rank."""

    kind: str  # linear, embedding, head, expert (a matrix of one) or experts (all matrices of a layer's experts)
    outputs: int  # of an embedding: its tokens
    inputs: int  # of an embedding: the size of its vectors
    transposed: bool = False  # the checkpoint has the matrix as [inputs, outputs]
    num_experts: int = 0  # of "experts", whose outputs are the inner size of one


@dataclass(slots=True, frozen=True)
class AdapterTargets:
    """Modules and sizes that an adapter must fit, for the API process, which reads and checks adapters."""

    modules: dict[str, AdapterTarget]  # by the names that the model's checkpoints use
    prefix: str  # of the names of modules; adapters of a bare model lack it
    hidden_size: int
    num_layers: int
    kv_size: int  # numbers of one token's keys in one layer
    takes_prompts: bool  # soft prompts and prefixes can be placed
    max_rank: int
    num_ranks: int  # devices that the model is split over


@dataclass(slots=True, frozen=True)
class StepCosts:
    """Measured costs in seconds, for the choice between swapping and recomputing."""

    copy_block: float  # copy one block with all its layers between device and host
    compute_token: float  # compute one prompt token


@dataclass(slots=True, frozen=True)
class GraphUse:
    """CUDA graphs that exist now, and counts of what was prepared too late, while requests waited."""

    num_graphs: int = 0
    graph_bytes: int = 0  # memory of all devices together, measured at the captures
    late_compilations: int = 0  # kernels that were compiled, or loaded from disk
    late_captures: int = 0


@dataclass(slots=True, frozen=True)
class ExpertTokens:
    """Numbers of tokens that were sent to each range of neighbouring experts since the last result."""

    layers: tuple[int, ...]
    ranges: tuple[str, ...]  # "0-15"
    counts: NDArray[np.int64]  # [layers, ranges]


@dataclass(slots=True)
class StepResult:
    """Sampled tokens of a step, in the order of the plan. Rows that did not sample have count 0."""

    token_ids: Int32Array  # [n, 1 + k]
    counts: Int32Array  # [n]
    parts: dict[str, Part] = field(default_factory=dict)
    failures: dict[int, str] | None = None  # by line: why its request must end, such as NaN logits
    graphs: GraphUse | None = None  # None: steps never run as graphs
    experts: ExpertTokens | None = None  # None: nobody counts
    drafts: Int32Array | None = None  # [n] drafts that wait for each row's next step; None: as many as were wanted


class StepFuture(Protocol):
    """Result of a step that may still run on the device. `done` never blocks."""

    def done(self) -> bool: ...

    def result(self) -> StepResult: ...
