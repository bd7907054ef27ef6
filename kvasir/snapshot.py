"""A picture of the engine at one moment, for people who watch it. Made by engine/snapshot.py only when asked for.

Any process. Requests are known by their key here: text and ids that clients chose never reach the core.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.messages import DeviceMemory, EngineStats, Int32Array


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
