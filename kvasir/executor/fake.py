"""Executors without a model, for tests and benchmarks.

EchoExecutor writes tokens where a model writes keys and values, and samples a hash of the tokens that it reads back
through the block tables. So a block that is lost, wrongly shared or written too late changes the output.
DelayExecutor only takes time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir.config.args import EngineArgs
from kvasir.config.engine import EngineConfig
from kvasir.messages import (
    NULL_BLOCK,
    AdapterTargets,
    DeviceMemory,
    KVSpec,
    Resource,
    SampleInputs,
    StepCosts,
    StepPlan,
    StepResult,
)


@dataclass(slots=True)
class FakeFuture:
    """A StepFuture whose result is ready at time `at`; 0: at once."""

    value: StepResult
    at: float = 0.0

    def done(self) -> bool:
        return time.perf_counter() >= self.at

    def result(self) -> StepResult:
        left = self.at - time.perf_counter() if self.at else 0.0
        if left > 0:
            time.sleep(left)
        return self.value


FAILS = "fails"  # source of a resource that cannot be loaded


def echo_shift(digest: bytes) -> int:
    """Return a number by which the fake model's keys differ under a resource."""
    return 1 + int.from_bytes(digest[:3], "little")


def echo_next(tokens: Iterable[int], vocab: int, shift: int = 0) -> int:
    """Return the token that the fake model samples after `tokens`, under a resource with this shift."""
    state = 1469598103934665603 + shift
    for token in tokens:
        state = ((state ^ int(token)) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return (state >> 20) % vocab


class EchoExecutor:
    """Samples a hash of the sequence, and asserts that plans are consistent."""

    overlaps = True

    def __init__(
        self,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        vocab: int = 50,
        windows: tuple[int | None, ...] = (None,),  # the first group must have no window
    ) -> None:
        self.vocab = vocab
        self.block_size = block_size
        width = -(-max_model_len // block_size)
        self.windows = windows
        self.tables = np.full((len(windows), max_rows + 1, width), NULL_BLOCK, np.int32)
        self.computed = np.zeros(max_rows, np.int64)
        self.next_token = np.full(max_rows, -7, np.int64)
        self.loaded: dict[int, bytes] = {}  # digests of resources by slot
        self.slot_of = np.full(max_rows, -1, np.int64)
        self.load_steps = 0  # steps that a load takes
        self._loads: list[tuple[int, int, Resource]] = []  # steps left, slot, resource
        self.pages = np.zeros((0, block_size), np.int64)
        self.host_pages = np.zeros((0, block_size), np.int64)
        self._plan: StepPlan | None = None

    def kv_spec(self) -> KVSpec:
        return KVSpec(num_layers=1, block_size=self.block_size, page_bytes=1, windows=self.windows)

    def available_kv_bytes(self) -> int:
        return 1 << 20

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.pages = np.full((num_blocks, self.block_size), -9, np.int64)
        self.host_pages = np.full((num_host_blocks, self.block_size), -8, np.int64)

    def measure_costs(self) -> StepCosts:
        return StepCosts(1e-6, 1e-6)

    def measure_steps(self) -> list[tuple[int, float]]:
        return []

    def memory(self) -> DeviceMemory:
        return DeviceMemory(None, 0, 0)

    def execute(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self.computed[new.row] = new.num_computed
            self.slot_of[new.row] = new.resource_slot
        assert len(set(plan.table_index.tolist())) == len(plan.table_index), "a table entry is set twice in one step"
        self.tables.reshape(-1)[plan.table_index] = plan.table_block
        self._copy(plan)
        self._plan = plan
        at = 0
        written: dict[tuple[int, int], int] = {}
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            for offset in range(count):
                token = int(plan.token_ids[at + offset])
                position = int(self.computed[row]) + offset
                for table in self.tables:
                    slot = int(table[row, position // self.block_size]), position % self.block_size
                    assert slot[0] != NULL_BLOCK, f"row {row} writes to the null block"
                    assert slot not in written, f"rows {written.get(slot)} and {row} write the same slot in one step"
                    written[slot] = row
                    key = self.next_token[row] if token < 0 else token
                    self.pages[slot] = key + self._shift(row)
            self.computed[row] += count
            at += count

    def _shift(self, row: int) -> int:
        """Return what the resource of a row adds to its keys. A stale or missing resource changes the output."""
        slot = int(self.slot_of[row])
        return 0 if slot < 0 else echo_shift(self.loaded[slot])

    def adapter_targets(self) -> AdapterTargets | None:
        return None

    def load(self, slot: int, resource: Resource) -> None:
        self.loaded.pop(slot, None)  # a row that still reads it fails
        self._loads.append((self.load_steps, slot, resource))

    def finished_loads(self, seconds: float = 0.0) -> list[tuple[int, str | None]]:
        done = [load for load in self._loads if load[0] <= 0]
        self._loads = [(left - 1, slot, resource) for left, slot, resource in self._loads if left > 0]
        self.loaded |= {slot: resource.digest for _, slot, resource in done if resource.source != FAILS}
        return [(slot, "it fails" if resource.source == FAILS else None) for _, slot, resource in done]

    def _copy(self, plan: StepPlan) -> None:
        for pairs in (plan.to_host, plan.from_host, plan.copies):
            assert len(set(pairs[:, 1].tolist())) == len(pairs), "a block is copied to twice in one step"
        assert not set(plan.copies[:, 0].tolist()) & set(plan.copies[:, 1].tolist()), "a copy is copied in one step"
        self.host_pages[plan.to_host[:, 1]] = self.pages[plan.to_host[:, 0]]
        self.pages[plan.from_host[:, 1]] = self.host_pages[plan.from_host[:, 0]]
        self.pages[plan.copies[:, 1]] = self.pages[plan.copies[:, 0]]

    def sample(self, inputs: SampleInputs | None = None) -> FakeFuture:
        plan = self._plan
        assert plan is not None, "sample must follow execute"
        assert plan.waits_for_host == (inputs is not None), "exactly the steps that wait for the host get inputs"
        inputs = inputs or SampleInputs()
        masks = dict(zip(inputs.mask_lines.tolist(), inputs.masks, strict=True))
        forced = dict(zip(inputs.forced_lines.tolist(), inputs.forced_tokens.tolist(), strict=True))
        samples = plan.samples.copy()
        samples[inputs.dropped_lines] = False
        tokens = np.zeros((len(plan.rows), 1), np.int32)
        for i in np.flatnonzero(samples):
            row = int(plan.rows[i])
            length = int(self.computed[row])
            text = self._read(0, row, length)
            for group, window in enumerate(self.windows):
                if window is not None:
                    seen = self._read(group, row, length)[-window:]
                    assert np.array_equal(seen, text[-window:]), f"group {group} of row {row} lost tokens in its window"
            token = forced[i] if i in forced else echo_next(text - self._shift(row), self.vocab, self._shift(row))
            while i in masks and not masks[i][token // 32] >> token % 32 & 1:  # take the next allowed token
                token = (token + 1) % self.vocab
            tokens[i, 0] = self.next_token[row] = token
        return FakeFuture(StepResult(tokens, samples.astype(np.int32)))

    def _read(self, group: int, row: int, length: int) -> NDArray[np.int64]:
        used = self.tables[group, row, : -(-length // self.block_size)]
        return self.pages[used].reshape(-1)[:length]

    def close(self) -> None:
        self.pages = self.pages[:0]


class DelayExecutor:
    """Samples the same token for every row after a fixed time, and logs the times of its steps."""

    overlaps = True

    def __init__(self, block_size: int, delay: float = 0.0, token: int = 7) -> None:
        self.block_size = block_size
        self.delay = delay
        self.token = token
        self.free_at = 0.0  # time at which all launched steps are done
        self.log: list[tuple[str, int, float]] = []  # (event, step, time)
        self._loaded: list[tuple[int, str | None]] = []
        self._plan: StepPlan | None = None

    def kv_spec(self) -> KVSpec:
        return KVSpec(num_layers=1, block_size=self.block_size, page_bytes=1)

    def available_kv_bytes(self) -> int:
        return 1 << 30

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        pass

    def measure_costs(self) -> StepCosts:
        return StepCosts(1e-6, 1e-6)

    def measure_steps(self) -> list[tuple[int, float]]:
        return []

    def memory(self) -> DeviceMemory:
        return DeviceMemory(None, 0, 0)

    def adapter_targets(self) -> AdapterTargets | None:
        return None

    def load(self, slot: int, resource: Resource) -> None:
        self._loaded.append((slot, None))

    def finished_loads(self, seconds: float = 0.0) -> list[tuple[int, str | None]]:
        done, self._loaded = self._loaded, []
        return done

    def execute(self, plan: StepPlan) -> None:
        self._plan = plan
        now = time.perf_counter()
        self.free_at = max(self.free_at, now) + self.delay
        if self.delay:
            self.log.append(("execute", plan.step, now))
            self.log.append(("done", plan.step, self.free_at))

    def sample(self, inputs: SampleInputs | None = None) -> FakeFuture:
        plan = self._plan
        assert plan is not None, "sample must follow execute"
        tokens = np.full((len(plan.rows), 1), self.token, np.int32)
        return FakeFuture(StepResult(tokens, plan.samples.astype(np.int32)), self.free_at if self.delay else 0.0)

    def close(self) -> None:
        pass


# ---------------------------------------------------------------- engines without a model


def fake_config(vocab_size: int = 50, max_model_len: int = 64, **settings: Any) -> EngineConfig:
    """Return a resolved configuration for `echo` and `delayed`: without a model, and without a tokenizer unless one is
    given."""
    settings = {
        **{"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "async_scheduling": True},
        **{"device": "cpu", "attention_backend": "torch", "distributed_executor_backend": "uni"},
        **{"skip_tokenizer_init": "tokenizer" not in settings, "generation_config": "kvasir"},
        **settings,
    }
    config = EngineArgs("fake", max_model_len=max_model_len, **settings).create_engine_config()
    return replace(config, model=replace(config.model, path="fake", vocab_size=vocab_size))


def echo(config: EngineConfig) -> EchoExecutor:
    """Make an EchoExecutor for a configuration."""
    return EchoExecutor(
        config.cache.block_size, config.scheduler.max_num_seqs, config.model.max_model_len, config.model.vocab_size
    )


def delayed(config: EngineConfig, delay: float = 0.0, token: int = 7) -> DelayExecutor:
    """Make a DelayExecutor for a configuration, for example with `functools.partial(delayed, delay=0.01)`."""
    return DelayExecutor(config.cache.block_size, delay, token)
