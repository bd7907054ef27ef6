"""What an engine tells about itself when it is asked: statistics, and a snapshot of its requests. API and core process.

Requests are identified by their key: texts and request ids of clients never reach the core.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir.messages import DeviceMemory, Int32Array, no_block_ages

# Upper bounds of the histogram of tokens per step (vLLM's buckets); a last bucket counts larger steps.
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


ALIKE = {"alike": True}  # of a field: all engines of a server have the same value


def no_step_sizes() -> list[int]:
    return [0] * (len(STEP_SIZES) + 1)


@dataclass(slots=True)
class EngineStats:
    """Gauges of the core and counters since its start, read on request."""

    num_running: int
    num_waiting: int
    num_blocks: int  # blocks that requests can hold
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
    freed_blocks: int  # blocks of running requests that fell out of their layers' attention window
    generated_tokens: int = 0  # kept for requests; a beam search generates one per beam in each of its steps
    step_tokens: int = 0  # prompt tokens computed and tokens generated
    step_sizes: list[int] = field(default_factory=no_step_sizes)  # steps by their step_tokens, per bucket of STEP_SIZES
    num_waiting_tokens: int = 0  # prompt tokens of waiting requests
    refused_requests: int = 0  # requests refused because the queue was full
    held_back: int = 0  # steps in which the watermark kept a request waiting
    timeouts_waiting: int = 0  # requests that timed out while they waited ...
    timeouts_running: int = 0  # ... and while they ran
    timeouts_foreseen: int = 0  # of those, requests ended before their deadline because they could not meet it
    recomputed_tokens: int = 0  # tokens computed before a preemption and again after it
    # resources that requests need on the device: adapters
    resource_slots: int = 0
    resource_slots_used: int = 0  # held by requests
    resource_loads: int = 0
    resource_evictions: int = 0
    resource_hits: int = 0  # requests whose resource was on the device already
    # host memory: swapped and offloaded blocks
    host_blocks: int = 0
    host_used_blocks: int = 0  # kept for preempted requests
    host_cached_blocks: int = 0
    swapped_preemptions: int = 0  # preemptions whose blocks were kept; other requests recompute or hit the cache
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    offloaded_blocks: int = 0  # blocks evicted on the device and copied to the host
    restored_blocks: int = 0  # of those, blocks copied back to the device
    host_evictions: int = 0
    host_lost_blocks: int = 0  # blocks evicted on the device that found no room on the host
    host_cache_hits: int = 0  # tokens of prefix_cache_hits that came from the host
    # times of cached KV blocks: numbers per bucket of BLOCK_AGES, and seconds in total
    block_lifetimes: list[int] = field(default_factory=no_block_ages)  # from allocation to eviction
    block_lifetime_seconds: float = 0.0
    block_idle_times: list[int] = field(default_factory=no_block_ages)  # from the last use to eviction
    block_idle_seconds: float = 0.0
    block_reuse_gaps: list[int] = field(default_factory=no_block_ages)  # from the last use to the next
    block_reuse_seconds: float = 0.0
    # guided requests, such as those with structured outputs
    guided_tokens: int = 0  # their output tokens
    guided_passes: int = 0  # times that one ran in a step that computed its next token
    guided_steps: int = 0  # steps whose sampling waited for guides
    lenient_guides: int = 0  # their guides that do not enforce everything that was asked for
    jumps: int = 0  # times that tokens which had to follow were appended without being sampled
    jumped_tokens: int = 0
    mask_seconds: float = 0.0  # of steps that went to guides
    # number of last tokens that every layer attends to; None: some attend to all
    sliding_window: int | None = field(default=None, metadata=ALIKE)
    # speculative decoding
    drafts: int = 0  # times that a row verified drafts
    draft_tokens: int = 0  # drafts that were verified ...
    accepted_tokens: int = 0  # ... and accepted
    accepted_by_position: list[int] = field(default_factory=list)  # accepted first drafts, second drafts, ...
    rows_without_drafts: int = 0  # times that a row sampled and had no draft
    rows_paused: int = 0  # of those, times because drafts would not have paid
    # how many tokens were sent to ranges of neighbouring experts: {layer: {"0-15": tokens}}
    expert_tokens: dict[int, dict[str, int]] = field(default_factory=dict)
    # CUDA graphs
    num_graphs: int = 0
    graph_bytes: int = 0  # device memory
    late_compilations: int = 0  # kernels compiled or loaded while requests waited
    late_captures: int = 0  # CUDA graphs captured while requests waited


@dataclass(slots=True)
class SchedulerStats:
    """What the scheduler counts since the start, under the names of EngineStats."""

    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0  # kept for requests
    step_tokens: int = 0  # prompt tokens computed and tokens generated
    step_sizes: list[int] = field(default_factory=no_step_sizes)  # steps by their step_tokens, per bucket of STEP_SIZES
    preemptions: int = 0
    partial_prefills: int = 0  # times a prompt was scheduled with fewer tokens than it still needed
    dropped_tokens: int = 0  # tokens sampled for a request that had ended, was preempted or got external tokens
    held_back: int = 0  # steps in which the watermark kept a request waiting
    timeouts_waiting: int = 0  # requests that timed out before they ran or while they were preempted ...
    timeouts_running: int = 0  # ... and while they ran
    drafts: int = 0  # times that a row verified drafts
    draft_tokens: int = 0  # drafts that were verified ...
    accepted_tokens: int = 0  # ... and accepted
    accepted_by_position: list[int] = field(default_factory=list)  # accepted first drafts, second drafts, ...
    rows_without_drafts: int = 0  # times that a row sampled and had no draft
    rows_paused: int = 0  # of those, times because drafts would not have paid


@dataclass(slots=True)
class RequestSnapshot:
    """Progress of one request, in tokens."""

    key: int
    num_prompt: int
    num_computed: int  # prompt and output tokens whose KV is in the cache
    num_output: int
    max_output: int
    num_cached: int  # prompt tokens found in the prefix cache at its first admission
    num_preemptions: int
    waited: float  # seconds since its arrival


@dataclass(slots=True)
class StepSnapshot:
    """One planned step."""

    step: int
    time: float  # seconds since 1970
    prompt_tokens: int
    decode_tokens: int
    sampled: int  # tokens that the step samples
    num_running: int
    num_waiting: int
    preemptions: int  # since the previous step


@dataclass(slots=True)
class Snapshot:
    """The engine view's picture of the core; engine/snapshot.py takes it."""

    time: float  # seconds since 1970
    stats: EngineStats
    memory: DeviceMemory
    block_size: int  # tokens
    block_bytes: int
    running: list[RequestSnapshot]  # first admitted first
    waiting: list[RequestSnapshot]  # next to be admitted first; cut off if there are many (stats has the number)
    held: Int32Array  # blocks of the running requests, one request after the other, in token order
    num_held: Int32Array  # number of blocks of each request in `held`; a shared block is listed for each of them
    cached: Int32Array  # unreferenced blocks whose content can still be hit, next to be evicted first
    steps: list[StepSnapshot]  # the latest steps, oldest first; recorded only while snapshots are requested
