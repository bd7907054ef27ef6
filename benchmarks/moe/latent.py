"""Checks and times the kernels for single tokens over a latent cache on a GPU like the H200:

    PYTHONPATH=. python benchmarks/moe/latent.py

Every plan of hopper_latent and the kernel for all devices (`plain`) is compared with float64: random lengths, tables
shuffled, NaN wherever no token lies. Then all are timed, also those that are wrong, which are marked. `chosen` is what
the code picks, and `read` loads the tiles and computes nothing: the others cannot be faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # run it from a checkout without installing

from benchmarks.moe.run import microseconds
from kvasir.kernels.triton import latent
from kvasir.kernels.triton.hopper_latent import (
    KEYS,
    LATENT,
    ROTARY,
    STAGES,
    Plan,
    _barriers,
    _find_range,
    _load,
    hopper_latent,
)
from kvasir.kernels.triton.paged_decode import LOG2E, Workspace

DEVICE, BLOCK, SCALE = "cuda", 64, 0.1
TOLERANCE = 1e-2  # of a head's result: bfloat16 rounds the weights and the result
SHAPES = [  # heads, sequences, tokens of each
    *[(16, 64, 8192), (16, 1, 8192), (16, 8, 8192), (16, 256, 1024)],
    *[(16, 1, 256), (16, 64, 256), (16, 1, 1024), (16, 16, 1024)],
    *[(32, 64, 8192), (64, 64, 8192), (128, 64, 8192), (128, 256, 1024)],
    *[(128, 1, 8192), (128, 2, 8192), (128, 1, 1024), (128, 1, 256)],
]
HEADS = (8, 16, 20, 32, 64, 128)


class Case:
    """Sequences in a paged cache. Slots that hold no token are NaN."""

    def __init__(self, lengths: list[int], heads: int) -> None:
        self.lengths, self.heads, self.workspace = lengths, heads, Workspace()
        blocks = [-(-n // BLOCK) for n in lengths]
        pages = sum(blocks) + 3
        order = torch.randperm(pages).to(torch.int32)
        tables = torch.full((len(lengths) + 2, max(1, *blocks) + 1), pages - 1, dtype=torch.int32)
        rows = torch.randperm(len(lengths) + 2)[: len(lengths)]
        used, at = torch.zeros(pages, BLOCK, dtype=torch.bool), 0
        for row, length, count in zip(rows.tolist(), lengths, blocks, strict=True):
            own = order[at : at + count]
            tables[row, :count], at = own, at + count
            for place, block in enumerate(own.tolist()):
                used[block, : length - place * BLOCK] = True
        self.cache = self._random(pages, BLOCK, LATENT.value + ROTARY.value)
        self.cache[~used.to(DEVICE)] = torch.nan
        self.tables, self.rows = tables.to(DEVICE), rows.to(DEVICE)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.query = self._random(heads, len(lengths), LATENT.value).transpose(0, 1)  # as the product before leaves it
        self.rotated = self._random(len(lengths), heads, 128 + ROTARY.value)[..., 128:]
        self.out = torch.empty(len(lengths), heads, LATENT.value, dtype=torch.bfloat16, device=DEVICE)

    @staticmethod
    def _random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.rotated, self.cache, self.tables, self.rows, self.lens

    def exact(self) -> torch.Tensor:
        """In float64; zeros for sequences without tokens."""
        out = torch.zeros(len(self.lengths), self.heads, LATENT.value, dtype=torch.float64, device=DEVICE)
        for i, (row, length) in enumerate(zip(self.rows.tolist(), self.lengths, strict=True)):
            if length:
                k = self.cache[self.tables[row, : -(-length // BLOCK)].long()].flatten(0, 1)[:length].double()
                q = torch.cat((self.query[i], self.rotated[i]), dim=-1).double()
                out[i] = (q @ k.T * SCALE).softmax(-1) @ k[:, : LATENT.value]
        return out


# ---------------------------------------------------------------- ways


def chosen(case: Case) -> None:
    latent.latent_decode(*case.inputs, case.out, case.workspace, SCALE, longest=max(case.lengths))


def plain(case: Case) -> None:
    is_hopper, latent.is_hopper = latent.is_hopper, lambda _: False
    chosen(case)
    latent.is_hopper = is_hopper


def planned(heads: int, whole: bool = False) -> Callable[[Case], None]:
    def call(case: Case) -> None:
        plan = Plan(heads, whole)
        hopper_latent(*case.inputs, case.out, case.workspace, SCALE * LOG2E, 1.0, None, plan)

    return call


def read(case: Case) -> None:
    copies = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 16, x.shape[2]], gl.NVMMASharedLayout(128, 16, 3))
        for x in (case.query, case.rotated)
    ]
    flat = case.cache.flatten(0, 1)
    copies += [
        TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [KEYS.value, n], gl.NVMMASharedLayout(128, 16, 2))
        for n in (LATENT.value, ROTARY.value)
    ]
    ranges = torch.cuda.get_device_properties(flat.device).multi_processor_count
    _read_kernel[(1, ranges)](
        *copies, case.tables, case.rows, case.lens, len(case.lens), ranges, case.tables.stride(0), BLOCK, num_warps=4
    )


@gluon.jit
def _read_kernel(
    queries, rotated, vectors, turned, table_ptr, row_ptr, length_ptr, sequences, ranges, table_stride,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    q = gl.allocate_shared_memory(vectors.dtype, [2, 1, 16, LATENT], queries.layout)
    q_turned = gl.allocate_shared_memory(vectors.dtype, [2, 1, 16, ROTARY], rotated.layout)
    k = gl.allocate_shared_memory(vectors.dtype, [STAGES, KEYS, LATENT], vectors.layout)
    k_turned = gl.allocate_shared_memory(vectors.dtype, [STAGES, KEYS, ROTARY], turned.layout)
    q_here, q_free, k_here, k_free = _barriers(2, 1), _barriers(2, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)
    seq, first, left = _find_range(length_ptr, sequences, ranges, gl.program_id(1))
    gl.warp_specialize([
        (_wait, (length_ptr, seq, first, left, q_here, q_free, k_here, k_free)),
        (_load, (queries, rotated, vectors, turned, table_ptr, row_ptr, length_ptr, table_stride, seq, first, left,
                 (q, q_turned, q_here, q_free), (k, k_turned, k_here, k_free), 16, BLOCK_SIZE, 2, False)),
    ], [4], [40])  # fmt: skip


@gluon.jit
def _wait(length_ptr, seq, first, left, q_here, q_free, k_here, k_free):
    step = 0
    turn = 0
    while left > 0:
        length = gl.load(length_ptr + seq)
        tiles = gl.minimum((length + KEYS - 1) // KEYS - first, left)
        if tiles > 0:
            mbarrier.wait(q_here.index(turn % 2), (turn // 2) & 1)
            mbarrier.arrive(q_free.index(turn % 2))
            turn += 1
        for _ in range(tiles):
            mbarrier.wait(k_here.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(k_free.index(step % STAGES))
            step += 1
        left -= tiles
        first = 0
        seq += 1


WAYS: dict[str, Callable[[Case], None]] = {
    **{"chosen": chosen, "16 heads": planned(16), "32 heads": planned(32), "64 heads": planned(64)},
    **{"16 heads, whole": planned(16, True), "64 heads, whole": planned(64, True), "plain": plain},
}

# ---------------------------------------------------------------- all together


def check(heads: int) -> set[str]:
    """The ways that are wrong."""
    some, short = torch.randint(0, 1500, (30,)).tolist(), torch.randint(0, 150, (530,)).tolist()
    wrong: set[str] = set()
    for lengths in ([1], [4097], [9000, 1, 8191], [1, 0, 63, 64, 65, 127, 128, 129, 0, *some, 9000], short):
        case = Case(lengths, heads)
        exact, there = case.exact(), case.lens > 0
        for name, call in WAYS.items():
            for _ in range(2):  # the second time, memory holds what the first left
                case.out.fill_(7.0)
                call(case)
                errors = (case.out[there].double() - exact[there]).norm(dim=-1) / exact[there].norm(dim=-1)
                error = float(errors.nan_to_num(torch.inf).max())
                kept = bool((case.out[~there] == 7.0).all())  # a sequence without tokens is left as it is
                if not (error < TOLERANCE and kept):
                    wrong.add(name)
            print(f"{heads:4} heads, {len(lengths):3} sequences to {max(lengths):4}: {name:16} {error:.1e}")
    return wrong


def time_shape(heads: int, sequences: int, length: int, wrong: set[str]) -> None:
    case = Case([length] * sequences, heads)
    size = sequences * length * (LATENT.value + ROTARY.value) * 2
    flops = 2 * sequences * length * heads * (2 * LATENT.value + ROTARY.value)
    print(f"{heads} heads, {sequences} x {length}")
    for name, call in {"read": read, **WAYS}.items():
        us = microseconds(lambda call=call: call(case))  # type: ignore[misc]
        mark = "  WRONG" if name in wrong else ""
        print(f"  {name:16}{us:8.1f} us {size / us / 1e6:6.2f} TB/s {flops / us / 1e6:6.0f} TFLOP/s{mark}", flush=True)


def main() -> int:
    torch.manual_seed(0)
    wrong = set().union(*(check(heads) for heads in HEADS))
    for shape in SHAPES:
        time_shape(*shape, wrong)
    print(f"WRONG: {sorted(wrong)}" if wrong else "all right")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
