"""A step of fixed size gives the model what the same step of its own size would."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir.kernels.layout import find_tiles
from kvasir.messages import StepPlan
from kvasir.worker.graph_keys import ForwardGraphKey
from kvasir.worker.step_inputs import DeviceRows, eager_inputs, host_inputs, mixed_graph_inputs

MAX_ROWS, BLOCK = 12, 4


def device_rows(seed: int, groups: int) -> DeviceRows:
    state = DeviceRows(MAX_ROWS, 64, BLOCK, torch.device("cpu"), groups)
    rng = np.random.default_rng(seed)
    state._all_tables.copy_(torch.from_numpy(rng.integers(1, 99, state._all_tables.shape)))
    state.num_computed[:MAX_ROWS] = torch.from_numpy(rng.integers(0, 30, MAX_ROWS)).int()
    state.next_token[:MAX_ROWS] = torch.arange(100, 100 + MAX_ROWS, dtype=torch.int32)
    return state


def plan_of(rows: list[int], counts: list[int], rng: np.random.Generator) -> StepPlan:
    ids = rng.integers(0, 90, sum(counts)).astype(np.int32)
    ids[: counts.count(1)] = -1  # what decodes are fed is on the device
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        rows=np.array(rows, np.int32),
        num_tokens=np.array(counts, np.int32),
        samples=np.ones(len(rows), np.bool_),
        token_ids=ids,
        bounds=np.full(len(rows), 64, np.int32),
        num_decodes=counts.count(1),
        new_rows=[],
        table_index=nothing,
        table_block=nothing,
        copies=nothing.reshape(0, 2),
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("counts", [[1, 1, 1, 5, 2, 9], [20], [1, 2], [2, 2, 2, 2, 2], [1, 31]], ids=str)
def test_inputs_equal_those_of_the_step_itself(counts: list[int], groups: int) -> None:
    rng = np.random.default_rng(len(counts))
    rows = rng.permutation(MAX_ROWS)[: len(counts)].tolist()
    plan = plan_of(rows, counts, rng)
    own, padded = device_rows(0, groups), device_rows(0, groups)
    cpu = torch.device("cpu")
    wanted = eager_inputs(own, plan, host_inputs(plan, (), None, own.padding).to_device(cpu))

    key = ForwardGraphKey(tokens=32, rows=8, bound=64)
    given = host_inputs(plan, (), key, padded.padding).to_device(cpu)
    got = mixed_graph_inputs(padded, given.rows.long(), given.num_tokens, given.token_ids, bound=64)
    count = sum(counts)
    for name in ("input_ids", "positions"):
        assert torch.equal(getattr(got, name)[:count], getattr(wanted, name)), name
    for ours, theirs in zip(
        (got.batch, *got.batch.other_groups), (wanted.batch, *wanted.batch.other_groups), strict=True
    ):
        assert torch.equal(ours.slots[:count], theirs.slots) and (ours.slots[count:] == -1).all()
        assert torch.equal(ours.tables, theirs.tables)
    assert torch.equal(got.batch.seq_lens[: len(rows)], wanted.batch.seq_lens)
    assert (got.batch.seq_lens[len(rows) :] == 0).all()
    assert torch.equal(got.batch.query_start[: len(rows) + 1], wanted.batch.query_start)
    assert torch.equal(own.num_computed, padded.num_computed)


@pytest.mark.parametrize("size", [64, 256])
def test_every_tile_of_every_chunk_is_there_once(size: int) -> None:
    counts = torch.tensor([1, 1, 2, 17, 1, 33, 0, 0], dtype=torch.int32)
    tiles, height = find_tiles(counts, counts + 5, size), 16 if size <= 64 else 64
    cut = tiles.cut(height)
    listed = slice(int(cut.count))
    found = [(int(s), int(n)) for s, n in zip(cut.sequence[listed], cut.number[listed], strict=True)]
    of = {i: -(-int(c) // height) for i, c in enumerate(counts) if c > 1}
    assert found == [(i, n) for i, count in of.items() for n in range(count)]
    assert tiles.decode_lens.tolist() == [6, 6, 0, 0, 6, 0, 5, 5]


def test_there_is_room_for_the_most_tiles() -> None:
    tiles = find_tiles(torch.full((32,), 2, dtype=torch.int32), torch.full((32,), 2, dtype=torch.int32), 64).cut(16)
    assert int(tiles.count) == 32 == len(tiles.sequence)
    long_and_short = torch.tensor([960, *[2] * 32], dtype=torch.int32)
    tiles = find_tiles(long_and_short, long_and_short, 1024).cut(64)
    assert int(tiles.count) == 15 + 32 <= len(tiles.sequence)
