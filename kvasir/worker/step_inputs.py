"""The inputs of a step: the arrays that the host sends, the rows' state on the device, and the only builder of
attention batches, for steps that run kernel by kernel and for steps that become graphs. Worker process.

The device's `num_computed` is exact, while the host plans with upper bounds. A step therefore sends only what changed,
and positions, slots and lengths are computed on the device from the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir import kernels
from kvasir.attention.base import UNBOUNDED, AttentionBatch
from kvasir.kernels.layout import SharedPrefixes, Tiles, find_tiles, max_unshared_tokens, pack_prefix_groups, upload
from kvasir.messages import Int32Array, StepPlan
from kvasir.worker.speculative.drafter import make_draft_rows

if TYPE_CHECKING:
    from kvasir.worker.graph_keys import ForwardGraphKey

Array = TypeVar("Array", Int32Array, torch.Tensor)
EMPTY: Int32Array = np.zeros(0, np.int32)
NO_LINE = -1  # among the lines that sample: padding
NO_ROWS: Int32Array = np.zeros((0, 2), np.int32)


@dataclass(slots=True)
class HostInputs(Generic[Array]):
    """All that the host sends for the forward pass of a step, int32. `to_device` copies every field in one transfer.

    Fields that a step does not need are empty. `rows`, `num_tokens` and `token_ids` are padded for a graph.
    """

    rows: Array  # [sequences]
    num_tokens: Array  # [sequences]; empty for a graph whose rows all run one token
    token_ids: Array  # [tokens], -1 where the row's next token is meant; empty for such a graph if all are
    # Of a graph whose rows may run several tokens: lines that sample, or where rows may have drafts, the tokens that
    # do; padded with NO_LINE.
    lines: Array
    order: Array  # [sequences] decoding sequences, the longest first; empty where the order does not matter
    prefix_tokens: Array  # these three are the fields of SharedPrefixes; empty where nothing is shared
    prefix_members: Array
    prefix_starts: Array
    new_rows: Array  # [n, 2] each new row and the number of its tokens whose KV is in the cache
    table_index: Array  # changed entries of the block tables: flat positions ...
    table_block: Array  # ... and block numbers
    copies: Array  # [c, 2] blocks to copy on the device, (from, to)
    leaving: Array  # blocks to copy to host memory
    arriving: Array  # blocks to copy from host memory
    drafts: Array  # [3, d] of a step without a graph: for each draft its token, its row, and which draft it is
    prompts: Array  # of an encoder's graph, which needs none of the first five: see whole_prompts
    features: tuple[Array, ...] = ()  # one per feature: what RowFeature.pack made of the new rows

    def to_device(self: HostInputs[Int32Array], device: torch.device) -> HostInputs[torch.Tensor]:
        empty = _empty(device)
        columns: list[Any] = [getattr(self, name) for name in _COLUMNS]
        columns += self.features
        sent = [at for at, array in enumerate(columns) if array.size]  # most columns of most steps are empty
        for at, tensor in zip(sent, upload([columns[at] for at in sent], device), strict=True):
            columns[at] = tensor if columns[at].ndim == 1 else tensor.view(columns[at].shape)
        columns = [each if isinstance(each, torch.Tensor) else empty for each in columns]
        inputs: HostInputs[torch.Tensor] = HostInputs(*columns[: len(_COLUMNS)])
        inputs.features = tuple(columns[len(_COLUMNS) :])
        return inputs

    def shared(self: HostInputs[torch.Tensor]) -> SharedPrefixes | None:
        if not len(self.prefix_starts):
            return None
        return SharedPrefixes(self.prefix_tokens, self.prefix_members, self.prefix_starts)


@cache
def _empty(device: torch.device) -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int32, device=device)


_COLUMNS = [field.name for field in fields(HostInputs) if field.name != "features"]


def host_inputs(
    plan: StepPlan, features: tuple[Int32Array, ...], key: ForwardGraphKey | None, padding_row: int
) -> HostInputs[Int32Array]:
    """What the device needs for this plan; with a key, for the graph of that key."""
    rows, num_tokens, token_ids, lines, order = plan.rows, plan.num_tokens, plan.token_ids, EMPTY, EMPTY
    prompts = EMPTY
    if key is not None and key.longest:
        rows = num_tokens = token_ids = EMPTY
        prompts = whole_prompts(plan, key)
    elif key is not None:
        rows = padded(rows, key.rows, padding_row)
        if key.is_mixed:
            num_tokens, token_ids = padded(num_tokens, key.rows, 0), padded(token_ids, key.tokens, 0)
            lines = padded(_sampling_tokens(plan) if key.drafts else np.flatnonzero(plan.samples), key.lines, NO_LINE)
        else:
            num_tokens = EMPTY
            # Decodes usually continue from tokens that are still on the device.
            token_ids = padded(token_ids, key.rows, -1) if bool((token_ids >= 0).any()) else EMPTY
            order = longest_first(plan.bounds, key.rows) if key.is_ordered else EMPTY
    return HostInputs(
        rows,
        num_tokens,
        token_ids,
        lines,
        order,
        *pack_prefix_groups(plan.shared, len(rows)),
        new_rows=NO_ROWS if len(prompts) else _columns(plan),
        table_index=plan.table_index,
        table_block=plan.table_block,
        copies=plan.copies,
        leaving=plan.to_host[:, 0],
        arriving=plan.from_host[:, 1],
        drafts=EMPTY if key is not None else _draft_places(plan),
        prompts=prompts,
        features=features,
    )


def whole_prompts(plan: StepPlan, key: ForwardGraphKey) -> Int32Array:
    """Where each sequence of an encoder's step begins, and the end [rows + 1]; then the tokens' positions [tokens] and
    ids [tokens]. Sequences and tokens that fill up the graph have no length and belong to none."""
    total, count, first = plan.total_tokens, len(plan.rows), key.rows + 1
    packed = np.zeros(first + 2 * key.tokens, np.int32)
    np.cumsum(plan.num_tokens, out=packed[1 : count + 1])
    packed[count + 1 : first] = total
    packed[first : first + total] = within(plan.num_tokens)
    packed[first + key.tokens : first + key.tokens + total] = plan.token_ids
    return packed


def _draft_places(plan: StepPlan) -> Int32Array:
    drafts = plan.drafts
    if drafts is None:
        return EMPTY
    number = within(drafts)
    tokens = np.repeat(np.cumsum(plan.num_tokens) - drafts, drafts) + number
    return np.stack([tokens, np.repeat(plan.rows, drafts), number]).astype(np.int32)


def _sampling_tokens(plan: StepPlan) -> Int32Array:
    """The tokens of a step at which its rows sample: each row's last one, and those before its drafts."""
    counts = plan.samples.astype(np.int32)
    if plan.drafts is not None:
        counts += np.where(plan.samples, plan.drafts, 0)
    return np.repeat(np.cumsum(plan.num_tokens, dtype=np.int32) - counts, counts) + within(counts)


def within(counts: Int32Array) -> Int32Array:
    """0, 1, ... for each of these counts, one after the other."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(counts.sum(), dtype=np.int32) - np.repeat(ends - counts, counts)


def _columns(plan: StepPlan) -> Int32Array:
    return np.array([(new.row, new.num_computed) for new in plan.new_rows], np.int32) if plan.new_rows else NO_ROWS


def padded(values: NDArray[np.integer[Any]], size: int, value: int) -> Int32Array:
    array = np.full(size, value, np.int32)  # np.pad takes six times as long
    array[: len(values)] = values
    return array


def longest_first(bounds: NDArray[np.int32], size: int) -> Int32Array:
    """A permutation of a step's sequences by length; padding comes last."""
    order = np.arange(size, dtype=np.int32)
    order[: len(bounds)] = np.argsort(-bounds, kind="stable")
    return order


# ---------------------------------------------------------------- the rows on the device


class DeviceRows:
    """State of the running requests, one row each: block tables, tokens computed, next input token and drafts."""

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        num_drafts: int = 0,
    ) -> None:
        self.block_size = block_size
        self.padding = max_rows  # an additional row that no request has, for steps that are padded to a fixed size
        width = -(-max_model_len // block_size)
        # A model without a cache has no groups; its slots are never read.
        self._all_tables = torch.zeros(max(1, num_groups), max_rows + 1, width, dtype=torch.int32, device=device)
        self.tables, *self.other_tables = self._all_tables  # of the first group of layers, and of the others
        self.num_computed = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.next_token = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.drafts = make_draft_rows(max_rows + 1, num_drafts, device)

    def set_tables(self, index: torch.Tensor, block: torch.Tensor) -> None:
        """Write changed block-table entries, given by their flat positions."""
        self._all_tables.view(-1)[index.long()] = block


@dataclass(slots=True)
class StepInputs:
    """What a model's forward pass takes."""

    input_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    batch: AttentionBatch
    rows: torch.Tensor | None = None  # [tokens] int64: the row of each token, where it is needed


# ---------------------------------------------------------------- the builder
#
# Each of the three functions computes tokens in its own way and counts them as computed; `_assemble` does the rest.


@dataclass(slots=True)
class _Tokens:
    ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [tokens] int64
    rows: torch.Tensor | None  # [tokens] int64: the row of each token; None where layers have one group
    query_start: torch.Tensor  # [sequences + 1] int32
    seq_lens: torch.Tensor  # [sequences] int32


@dataclass(slots=True)
class _Bounds:
    """What the host knows of the sequences."""

    num_decodes: int
    query_lens: Int32Array
    seq_bounds: Int32Array
    own_bound: int


def eager_inputs(
    state: DeviceRows, plan: StepPlan, inputs: HostInputs[torch.Tensor], with_rows: bool = False
) -> StepInputs:
    """Inputs of a step that is launched kernel by kernel, in its own size."""
    rows = inputs.rows.long()
    ids, positions, slots, query_start, seq_lens = kernels.step_inputs(
        rows, inputs.num_tokens, inputs.token_ids, state.num_computed, state.next_token, state.tables, state.block_size
    )
    if len(inputs.drafts):
        places, draft_rows, number = inputs.drafts.long()
        ids[places] = state.drafts.tokens[draft_rows, number].long()
    token_rows = None
    if state.other_tables or with_rows:
        token_rows = torch.repeat_interleave(rows, inputs.num_tokens.long(), output_size=plan.total_tokens)
    tokens = _Tokens(ids, positions, slots, token_rows, query_start, seq_lens)
    bounds = _Bounds(plan.num_decodes, plan.num_tokens, plan.bounds, max_unshared_tokens(plan))
    return _assemble(state, rows, tokens, bounds, inputs.shared())


def mixed_graph_inputs(
    state: DeviceRows,
    rows: torch.Tensor,  # [rows] int64: decodes, then chunks, then padding; fewer than tokens
    num_tokens: torch.Tensor,  # [rows] int32, 0 for padding
    token_ids: torch.Tensor,  # [tokens] int32, -1 where the row's next token is meant; padded with any number
    bound: int,  # of the unshared tokens of a decoding sequence
    shared: SharedPrefixes | None = None,
) -> StepInputs:
    """Inputs of a step of fixed size in which rows may run several tokens. The same operations serve every such step,
    so a graph can capture them."""
    device, size = rows.device, len(token_ids)
    before = state.num_computed[rows]
    seq_lens = before + num_tokens
    state.num_computed[rows] = seq_lens  # the padding row stays at 0
    query_start = torch.zeros(len(rows) + 1, dtype=torch.int32, device=device)
    torch.cumsum(num_tokens, 0, dtype=torch.int32, out=query_start[1:])
    at = torch.arange(size, dtype=torch.int32, device=device)
    real = at < query_start[-1]
    line = torch.searchsorted(query_start[1:], at, right=True).clamp(max=len(rows) - 1)
    token_rows = torch.where(real, rows[line], state.padding)
    positions = torch.where(real, before[line] + at - query_start[line], 0).long()
    block = state.tables[token_rows, positions // state.block_size].long()
    slots = torch.where(real, block * state.block_size + positions % state.block_size, -1)
    ids = torch.where(token_ids >= 0, token_ids, state.next_token[token_rows]).long()
    if state.drafts.size:  # a token that the host does not know is a draft unless it is the row's first
        number = (at - query_start[line]).clamp(max=state.drafts.size) - 1
        drafts = state.drafts.tokens[token_rows, number.clamp(min=0)]
        ids = torch.where((token_ids < 0) & (number >= 0), drafts, ids)
    tokens = _Tokens(ids, positions, slots, token_rows, query_start, seq_lens)
    # Only the device knows which sequences run one token: see AttentionBatch.tiles.
    bounds = _Bounds(0, np.zeros(len(rows), np.int32), np.full(len(rows), UNBOUNDED, np.int32), bound)
    return _assemble(state, rows, tokens, bounds, shared, tiles=find_tiles(num_tokens, seq_lens, size))


def decode_graph_inputs(
    state: DeviceRows,
    rows: torch.Tensor,  # [rows] int64, padded
    lengths: torch.Tensor,  # [rows] int32: where lengths after the step are written
    bound: int,  # of the unshared tokens of a sequence
    shared: SharedPrefixes | None = None,
    order: torch.Tensor | None = None,
) -> StepInputs:
    """Inputs of a step of fixed size in which every row runs one token, by one kernel."""
    from kvasir.kernels.triton.cache_update import decode_inputs  # there is no Triton where there are no graphs

    ids, positions, slots = decode_inputs(
        rows, lengths, state.padding, state.num_computed, state.next_token, state.tables, state.block_size
    )
    count = len(rows)
    query_start = torch.arange(count + 1, dtype=torch.int32, device=rows.device)
    tokens = _Tokens(ids, positions, slots, rows, query_start, lengths)
    bounds = _Bounds(count, np.ones(count, np.int32), np.full(count, UNBOUNDED, np.int32), bound)
    return _assemble(state, rows, tokens, bounds, shared, order=order)


def encoder_graph_inputs(state: DeviceRows, prompts: torch.Tensor, key: ForwardGraphKey) -> StepInputs:
    """Inputs of an encoder's step of fixed size, from what `whole_prompts` packs. Nothing is cached, so there are no
    slots and no rows."""
    starts, positions, ids = prompts[: key.rows + 1 + 2 * key.tokens].split((key.rows + 1, key.tokens, key.tokens))
    none = state.num_computed[:0].long()
    bounds = np.full(key.rows, key.longest, np.int32)
    batch = AttentionBatch(
        slots=none,
        query_start=starts,
        seq_lens=starts[1:] - starts[:-1],
        tables=state.tables,
        rows=none,
        num_decodes=0,
        query_lens=bounds,
        seq_bounds=bounds,
        block_size=state.block_size,
    )
    return StepInputs(ids.long(), positions.long(), batch)


def _assemble(
    state: DeviceRows,
    rows: torch.Tensor,
    tokens: _Tokens,
    bounds: _Bounds,
    shared: SharedPrefixes | None,
    tiles: Tiles | None = None,
    order: torch.Tensor | None = None,
) -> StepInputs:
    batch = AttentionBatch(
        slots=tokens.slots,
        query_start=tokens.query_start,
        seq_lens=tokens.seq_lens,
        tables=state.tables,
        rows=rows,
        num_decodes=bounds.num_decodes,
        query_lens=bounds.query_lens,
        seq_bounds=bounds.seq_bounds,
        block_size=state.block_size,
        shared=shared,
        own_bound=bounds.own_bound,
        order=order,
        tiles=tiles,
    )
    if state.other_tables:
        assert tokens.rows is not None, "the other groups' slots are found by each token's row"
        batch.other_groups = other_group_batches(state, batch, tokens.rows, tokens.positions)
    return StepInputs(tokens.ids, tokens.positions, batch, tokens.rows)


def other_group_batches(
    state: DeviceRows, batch: AttentionBatch, token_rows: torch.Tensor, positions: torch.Tensor
) -> tuple[AttentionBatch, ...]:
    """The same step for the other groups of layers, which have their own block tables; padding rows store nothing."""
    found = []
    for tables in state.other_tables:
        block = tables[token_rows, positions // state.block_size].long()
        slots = block * state.block_size + positions % state.block_size
        slots = torch.where(token_rows == state.padding, -1, slots)
        found.append(replace(batch, slots=slots, tables=tables, step_cache={}, other_groups=()))
    return tuple(found)
