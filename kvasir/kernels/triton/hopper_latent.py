"""Attention of single tokens over a latent cache for GPUs like the H200, in Gluon: some warps load, others compute.

The tokens of all sequences are tiles of 64. Each program takes a range of them, all ranges equally long, so that every
multiprocessor reads as much as the others whatever the lengths are. A range may begin and end within sequences; what it
finds of those is a part, and a second launch merges the parts. A program has two parts at most: of the sequence it
begins within, and of the one it ends within.

One warp keeps tiles coming, each of which is read once and is keys and values. With 16 or 32 heads one warp group
computes scores and sums with their sides exchanged: tokens, and then the numbers of a vector, are the rows of the
product, so that tensor cores need not pretend that there are 64 heads. With 64, two warp groups compute all scores
each, and half of each vector's sums, because a whole row of sums does not fit into the registers of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvasir.kernels.triton.launch import await_previous, cdiv, early
from kvasir.kernels.triton.paged_decode import Workspace

KEYS = gl.constexpr(64)  # of a tile; the cache's blocks are multiples of it
LATENT = gl.constexpr(512)
ROTARY = gl.constexpr(64)
STAGES = gl.constexpr(2)  # tiles being loaded or read: with 64 heads' queries, no more fit
CHUNK = gl.constexpr(512)  # lengths that are added up at once
LEAST = gl.constexpr(2)  # tiles of a range: fewer are not worth a part
MANY = gl.constexpr(64)  # heads of a program that has two computing warp groups
SHORT = 256  # tokens: longer sequences are worth parts
FEW_TOKENS = 8192  # of all sequences: their tiles are few enough to be read again for every 16 of many heads
FEW = 132  # programs that merge a whole head each; of more, each has work enough
SLICE = gl.constexpr(64)  # numbers of a vector that are cleared at once

_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name since Triton 3.9, and before


@dataclass(frozen=True, slots=True)
class Plan:
    """How a launch is shaped."""

    heads: int  # of a program: 16 or 32 for one computing warp group, 64 for two
    whole: bool = False  # a program for each sequence, and no parts

    @property
    def query_stages(self) -> int:
        return 1 if self.heads == MANY.value else 2


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _count_tiles(length_ptr, sequences, first):
    """Tiles of CHUNK sequences from `first` on."""
    seq = first + gl.arange(0, CHUNK, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    lengths = gl.load(length_ptr + seq, mask=seq < sequences, other=0, cache_modifier=".cg")
    return (lengths + KEYS - 1) // KEYS


@gluon.jit
def _skip(tiles, count, begin, seq, before, passed):
    """Of `count` further sequences with these tiles, how many end before the tile `begin`, and with how many tiles."""
    i = gl.arange(0, CHUNK, layout=tiles.type.layout)
    ended = (passed + gl.associative_scan(tiles, 0, _add) <= begin) & (i < count)
    seq += gl.sum(ended.to(gl.int32), 0)
    return seq, before + gl.sum(gl.where(ended, tiles, 0), 0), passed + gl.sum(tiles, 0)


@gluon.jit
def _find_range(length_ptr, sequences, ranges, index):
    """The first sequence of a range, the range's first tile of it, and how many tiles the range has."""
    tiles = _count_tiles(length_ptr, sequences, 0)
    total = gl.sum(tiles, 0)
    for first in range(CHUNK, sequences, CHUNK):
        total += gl.sum(_count_tiles(length_ptr, sequences, first), 0)
    ranges = gl.minimum(ranges, (total + LEAST - 1) // LEAST)
    some = gl.maximum(ranges, 1)
    begin = total * gl.minimum(index, ranges) // some
    end = total * gl.minimum(index + 1, ranges) // some
    seq, before, passed = _skip(tiles, sequences, begin, 0, 0, 0)
    for first in range(CHUNK, sequences, CHUNK):
        tiles = _count_tiles(length_ptr, sequences, first)
        seq, before, passed = _skip(tiles, sequences - first, begin, seq, before, passed)
    return seq, begin - before, end - begin


@gluon.jit
def _load(
    queries, rotated, vectors, turned, table_ptr, row_ptr, length_ptr, table_stride, seq, first, left, q_ring, ring,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, Q_STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    q, q_turned, q_here, q_free = q_ring
    k, k_turned, k_here, k_free = ring
    head = gl.program_id(0) * HEADS
    turn = 0
    step = 0
    if PDL:
        gdc_wait()
    while left > 0:
        length = gl.load(length_ptr + seq, cache_modifier=".cg")
        table = table_ptr + gl.load(row_ptr + seq, cache_modifier=".cg").to(gl.int64) * table_stride
        tiles = gl.minimum((length + KEYS - 1) // KEYS - first, left)
        for j in range(tiles):
            at = (first + j) * KEYS
            page = gl.load(table + at // BLOCK_SIZE) * BLOCK_SIZE + at % BLOCK_SIZE
            stage = step % STAGES
            mbarrier.wait(k_free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(k_here.index(stage), KEYS * (LATENT + ROTARY) * 2)
            _copy_in(vectors, [page, 0], k_here.index(stage), k.index(stage))
            _copy_in(turned, [page, LATENT], k_here.index(stage), k_turned.index(stage))
            step += 1
            if j == 0:  # the queries come second, since the last ones may still be needed
                place = turn % Q_STAGES
                mbarrier.wait(q_free.index(place), ((turn // Q_STAGES) & 1) ^ 1)
                mbarrier.expect(q_here.index(place), HEADS * (LATENT + ROTARY) * 2)
                _copy_in(queries, [seq, head, 0], q_here.index(place), q.index(place))
                _copy_in(rotated, [seq, head, 0], q_here.index(place), q_turned.index(place))
                turn += 1
        left -= tiles
        first = 0
        seq += 1


@gluon.jit
def _clear(k, valid, FROM: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros in place of values past the sequence's end: they may belong to another request, and a weight of 0 does not
    undo a NaN."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    own = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LINES)) < valid
    for i in gl.static_range(COLUMNS // SLICE):
        part = k.slice(FROM + i * SLICE, SLICE, 1)
        part.store(gl.where(own[:, None], part.load(LINES), 0.0))
    fence_async_shared()


@gluon.jit
def _place(out_ptr, part_ptr, index, seq, first, HEADS: gl.constexpr, ALL: gl.constexpr):
    """Line of the first head, in the output and among the parts."""
    head = gl.program_id(0) * HEADS
    slot = 2 * index + gl.where(first == 0, 1, 0)
    return seq.to(gl.int64) * ALL + head, slot.to(gl.int64) * (gl.num_programs(0) * HEADS) + head


@gluon.jit
def _compute_exchanged(
    out_ptr, part_ptr, lse_ptr, length_ptr, scale, unit, seq, first, left, q_ring, ring,
    HEADS: gl.constexpr, ALL: gl.constexpr, Q_STAGES: gl.constexpr, PDL: gl.constexpr, weights,
):  # fmt: skip
    """Scores are [tokens, heads] and sums [numbers, heads]: a product has 64 rows, but as many columns as heads."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    q, q_turned, q_here, q_free = q_ring
    k, k_turned, k_here, k_free = ring
    index = gl.program_id(1)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, LAYOUT))
    d = gl.arange(0, LATENT, layout=gl.SliceLayout(1, LAYOUT))
    turn = 0
    step = 0
    if PDL:
        gdc_wait()
    while left > 0:
        length = gl.load(length_ptr + seq, cache_modifier=".cg")
        tiles = gl.minimum((length + KEYS - 1) // KEYS - first, left)
        if tiles > 0:
            place = turn % Q_STAGES
            mbarrier.wait(q_here.index(place), (turn // Q_STAGES) & 1)
            query = q.index(place).reshape([HEADS, LATENT]).permute((1, 0))
            query_turned = q_turned.index(place).reshape([HEADS, ROTARY]).permute((1, 0))
            top = gl.full([HEADS], -1.0e30, gl.float32, gl.SliceLayout(0, LAYOUT))
            norm = gl.zeros([KEYS, HEADS], gl.float32, LAYOUT)  # added up over the tokens at the end
            acc = gl.zeros([LATENT, HEADS], gl.float32, LAYOUT)
            for j in range(tiles):
                stage = step % STAGES
                mbarrier.wait(k_here.index(stage), (step // STAGES) & 1)
                vectors = k.index(stage)
                valid = length - (first + j) * KEYS
                if valid < KEYS:
                    _clear(vectors, valid, 0, LATENT)
                s = gl.zeros([KEYS, HEADS], gl.float32, LAYOUT)
                s = warpgroup_mma(vectors, query, s, use_acc=False, is_async=True)
                s = warpgroup_mma(k_turned.index(stage), query_turned, s, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                s = gl.where((key < valid)[:, None], s, -float("inf"))
                new_top = gl.maximum(top, gl.max(s, 0) * scale)
                p = gl.exp2(s * scale - new_top[None, :])
                shrink = gl.exp2(top - new_top)
                norm = norm * shrink[None, :] + p
                top = new_top
                weights.store(gl.permute(p.to(weights.dtype), (1, 0)))
                fence_async_shared()
                acc = acc * shrink[None, :]
                acc = warpgroup_mma(vectors.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(k_free.index(stage))
                step += 1
            mbarrier.arrive(q_free.index(place))
            turn += 1
            total = gl.sum(norm, 0)
            acc = acc * (unit / total)[None, :]
            line, slot = _place(out_ptr, part_ptr, index, seq, first, HEADS, ALL)
            there = gl.program_id(0) * HEADS + head < ALL
            if (first == 0) & (tiles * KEYS >= length):
                to = (line + head)[None, :] * LATENT + d[:, None]
                gl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=there[None, :])
            else:
                gl.store(part_ptr + (slot + head)[None, :] * LATENT + d[:, None], acc)
                gl.store(lse_ptr + slot + head, top + gl.log2(total))
        left -= tiles
        first = 0
        seq += 1


@gluon.jit
def _compute(
    out_ptr, part_ptr, lse_ptr, length_ptr, scale, unit, seq, first, left, q_ring, ring,
    HEADS: gl.constexpr, ALL: gl.constexpr, Q_STAGES: gl.constexpr, PDL: gl.constexpr,
    FROM: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Columns `FROM` and following of the sums [heads, numbers]; the weights stay in registers."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    q, q_turned, q_here, q_free = q_ring
    k, k_turned, k_here, k_free = ring
    index = gl.program_id(1)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, O_LAYOUT))
    d = FROM + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, O_LAYOUT))
    turn = 0
    step = 0
    if PDL:
        gdc_wait()
    while left > 0:
        length = gl.load(length_ptr + seq, cache_modifier=".cg")
        tiles = gl.minimum((length + KEYS - 1) // KEYS - first, left)
        if tiles > 0:
            place = turn % Q_STAGES
            mbarrier.wait(q_here.index(place), (turn // Q_STAGES) & 1)
            query = q.index(place).reshape([HEADS, LATENT])
            query_turned = q_turned.index(place).reshape([HEADS, ROTARY])
            top = gl.full([HEADS], -1.0e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
            norm = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
            acc = gl.zeros([HEADS, COLUMNS], gl.float32, O_LAYOUT)
            for j in range(tiles):
                stage = step % STAGES
                mbarrier.wait(k_here.index(stage), (step // STAGES) & 1)
                vectors = k.index(stage)
                valid = length - (first + j) * KEYS
                s = gl.zeros([HEADS, KEYS], gl.float32, S_LAYOUT)
                s = warpgroup_mma(query, vectors.permute((1, 0)), s, use_acc=False, is_async=True)
                s = warpgroup_mma(query_turned, k_turned.index(stage).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                if valid < KEYS:
                    s = gl.where((key < valid)[None, :], s, -float("inf"))
                    _clear(vectors, valid, FROM, COLUMNS)
                new_top = gl.maximum(top, gl.max(s, 1) * scale)
                p = gl.exp2(s * scale - new_top[:, None])
                shrink = gl.exp2(top - new_top)
                norm = norm * shrink + gl.sum(p, 1)
                top = new_top
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
                weights = gl.convert_layout(p.to(vectors.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
                acc = warpgroup_mma(weights, vectors.slice(FROM, COLUMNS, 1), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(k_free.index(stage))
                step += 1
            mbarrier.arrive(q_free.index(place))
            turn += 1
            acc = acc * gl.convert_layout(unit / norm, gl.SliceLayout(1, O_LAYOUT))[:, None]
            line, slot = _place(out_ptr, part_ptr, index, seq, first, HEADS, ALL)
            there = gl.program_id(0) * HEADS + head < ALL
            if (first == 0) & (tiles * KEYS >= length):
                to = (line + head)[:, None] * LATENT + d[None, :]
                gl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=there[:, None])
            else:
                gl.store(part_ptr + (slot + head)[:, None] * LATENT + d[None, :], acc)
                if FROM == 0:
                    lse = gl.convert_layout(top + gl.log2(norm), gl.SliceLayout(1, O_LAYOUT))
                    gl.store(lse_ptr + slot + head, lse)
        left -= tiles
        first = 0
        seq += 1


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(do_not_specialize=["sequences", "ranges"], do_not_specialize_on_alignment=["row_ptr", "length_ptr"])
def _hopper_latent_kernel(
    queries, rotated, vectors, turned, table_ptr, row_ptr, length_ptr, out_ptr, part_ptr, lse_ptr, scale, unit,
    sequences, ranges, table_stride,
    HEADS: gl.constexpr, ALL: gl.constexpr, BLOCK_SIZE: gl.constexpr, Q_STAGES: gl.constexpr,
    WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    PARTNERS: gl.constexpr = 2 if HEADS == MANY else 1  # warp groups that compute
    DTYPE: gl.constexpr = vectors.dtype
    q = gl.allocate_shared_memory(DTYPE, [Q_STAGES, 1, HEADS, LATENT], queries.layout)
    q_turned = gl.allocate_shared_memory(DTYPE, [Q_STAGES, 1, HEADS, ROTARY], rotated.layout)
    k = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, LATENT], vectors.layout)
    k_turned = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, ROTARY], turned.layout)
    q_ring = (q, q_turned, _barriers(Q_STAGES, 1), _barriers(Q_STAGES, PARTNERS))
    ring = (k, k_turned, _barriers(STAGES, 1), _barriers(STAGES, PARTNERS))
    if WHOLE:
        seq = gl.program_id(1)
        first = 0
        left = (gl.load(length_ptr + seq, cache_modifier=".cg") + KEYS - 1) // KEYS
    else:
        seq, first, left = _find_range(length_ptr, sequences, ranges, gl.program_id(1))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # The last two numbers are registers of a computing thread and of a loading one. They are written here because a
    # constant inside a named tuple would not stay a constant.
    if HEADS == MANY:
        gl.warp_specialize([
            (_compute, (out_ptr, part_ptr, lse_ptr, length_ptr, scale, unit, seq, first, left, q_ring, ring,
                        HEADS, ALL, Q_STAGES, PDL, 0, LATENT // 2)),
            (_compute, (out_ptr, part_ptr, lse_ptr, length_ptr, scale, unit, seq, first, left, q_ring, ring,
                        HEADS, ALL, Q_STAGES, PDL, LATENT // 2, LATENT // 2)),
            (_load, (queries, rotated, vectors, turned, table_ptr, row_ptr, length_ptr, table_stride, seq, first, left,
                     q_ring, ring, HEADS, BLOCK_SIZE, Q_STAGES, PDL)),
        ], [4, 4], [240, 24])  # fmt: skip
    else:
        weights = gl.allocate_shared_memory(DTYPE, [HEADS, KEYS], vectors.layout)
        gl.warp_specialize([
            (_compute_exchanged, (out_ptr, part_ptr, lse_ptr, length_ptr, scale, unit, seq, first, left, q_ring, ring,
                                  HEADS, ALL, Q_STAGES, PDL, weights)),
            (_load, (queries, rotated, vectors, turned, table_ptr, row_ptr, length_ptr, table_stride, seq, first, left,
                     q_ring, ring, HEADS, BLOCK_SIZE, Q_STAGES, PDL)),
        ], [4], [40])  # fmt: skip


# ---------------------------------------------------------------- merging


@triton.jit(do_not_specialize=["sequences", "ranges", "least"], do_not_specialize_on_alignment=["length_ptr"])
def _latent_merge_kernel(
    part_ptr, lse_ptr, length_ptr, out_ptr, sequences, ranges, least,
    HEADS: tl.constexpr, LINES: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The parts of a sequence, weighted by their log-sum-exp. Each range has LINES lines for each of its two parts."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, CHUNK)
    own = tl.cdiv(tl.load(length_ptr + seq, cache_modifier=".cg"), KEYS)
    total = 0
    before = 0
    for at in range(0, sequences, CHUNK):
        lengths = tl.load(length_ptr + at + i, mask=at + i < sequences, other=0, cache_modifier=".cg")
        tiles = (lengths + KEYS - 1) // KEYS
        total += tl.sum(tiles, 0)
        before += tl.sum(tl.where(at + i < seq, tiles, 0), 0)
    await_previous(PDL)
    if own == 0:
        return
    ranges = tl.minimum(ranges, tl.cdiv(total, least))
    first = ((before + 1) * ranges - 1) // total
    last = ((before + own) * ranges - 1) // total
    if first == last:  # written directly
        return
    top = -1.0e30
    norm = 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for at in range(first, last + 1, SLOTS):
        j = at + tl.arange(0, SLOTS)
        slot = 2 * j + tl.where(total * j // ranges <= before, 1, 0)
        line = slot.to(tl.int64) * LINES + head
        lse = tl.load(lse_ptr + line, mask=j <= last, other=-float("inf"))
        x = tl.load(part_ptr + line[:, None] * LATENT + d[None, :], mask=(j <= last)[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(x * weight[:, None], 0)
        top = new_top
    to = out_ptr + (seq * HEADS + head).to(tl.int64) * LATENT + d
    tl.store(to, (acc / norm).to(out_ptr.dtype.element_ty))


# ---------------------------------------------------------------- launching


def takes(query: torch.Tensor, rotated: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Whether this kernel can take these tensors on their device."""
    return (
        query.dtype == rotated.dtype == kv_cache.dtype
        and query.element_size() == 2
        and (query.shape[2], rotated.shape[2]) == (LATENT.value, ROTARY.value)
        and kv_cache.shape[1] % KEYS.value == 0
        and kv_cache.is_contiguous()
        and _can_be_copied(query)
        and _can_be_copied(rotated)
    )


def _can_be_copied(x: torch.Tensor) -> bool:
    """Whether lines begin at multiples of 16 bytes, as bulk copies want."""
    return x.stride(2) == 1 and all(n % 8 == 0 for n in (x.stride(0), x.stride(1), x.storage_offset()))


def choose_plan(sequences: int, heads: int, longest: int | None) -> Plan:
    """Every plan is compiled before the first request, by steps of a few short sequences and of long ones: so there is
    none for many short ones alone."""
    short = longest is not None and longest <= SHORT
    few = longest is not None and sequences * longest <= FEW_TOKENS
    if heads <= 32:
        return Plan(16 if heads <= 16 else 32, short)
    return Plan(16, short) if few else Plan(MANY.value)


def hopper_latent(
    query: torch.Tensor,
    rotated: torch.Tensor,
    kv_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    scale: float,  # in units of log2(e)
    unit: float,
    longest: int | None,
    plan: Plan | None = None,
) -> None:
    """See latent.latent_decode."""
    sequences, heads, latent = query.shape
    plan = plan or choose_plan(sequences, heads, longest)
    pages, block_size, width = kv_cache.shape
    blocks = cdiv(heads, plan.heads)
    ranges = max(1, torch.cuda.get_device_properties(query.device).multi_processor_count // blocks)
    lines = blocks * plan.heads
    part, lse = workspace.get(1 if plan.whole else 2 * ranges * lines, latent, query.device)
    flat, deep = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 16, 3)
    copies = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, plan.heads, x.shape[2]], deep)
        for x in (query, rotated)
    ]
    copies += [
        TensorDescriptor(kv_cache, [pages * block_size, width], [width, 1], [KEYS.value, columns], flat)
        for columns in (latent, width - latent)
    ]
    _hopper_latent_kernel[(blocks, sequences if plan.whole else ranges)](
        *copies, tables, rows, lengths, out, part, lse, scale, unit, sequences, ranges, tables.stride(0),
        HEADS=plan.heads, ALL=heads, BLOCK_SIZE=block_size, Q_STAGES=plan.query_stages,
        WHOLE=plan.whole, num_warps=4, **early(query),
    )  # fmt: skip
    if plan.whole:
        return
    columns, slots = (128, 32) if heads * sequences <= FEW else (latent, 8)
    _latent_merge_kernel[(heads, sequences, latent // columns)](
        part, lse, lengths, out, sequences, ranges, LEAST.value,
        HEADS=heads, LINES=lines, LATENT=latent, COLUMNS=columns, KEYS=KEYS.value, CHUNK=CHUNK.value, SLOTS=slots,
        num_warps=4, **early(query),
    )  # fmt: skip
