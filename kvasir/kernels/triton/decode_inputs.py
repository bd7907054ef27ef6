"""The inputs of a step in which every row runs one token, read from the rows on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.overlap import await_previous, early


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["row_ptr", "position_ptr", "slot_ptr"])
def _decode_inputs_kernel(
    row_ptr, computed_ptr, next_ptr, table_ptr, id_ptr, position_ptr, slot_ptr, length_ptr, count, padding_row,
    table_stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(row_ptr + i, mask=inside, other=0)
    real = inside & (row != padding_row)
    position = tl.load(computed_ptr + row, mask=real, other=0)
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    token = tl.load(next_ptr + row, mask=real, other=0)
    tl.store(id_ptr + i, token.to(tl.int64), mask=inside)
    tl.store(position_ptr + i, position.to(tl.int64), mask=inside)
    tl.store(slot_ptr + i, tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=inside)
    tl.store(length_ptr + i, tl.where(real, position + 1, 0), mask=inside)
    tl.store(computed_ptr + row, position + 1, mask=real)


def decode_inputs(
    rows: torch.Tensor,  # [n] int64, each at most once but for `padding_row`
    padding_row: int,  # gets slot -1 and length 0
    num_computed: torch.Tensor,  # [rows] int32, counted up
    next_token: torch.Tensor,  # [rows] int32
    tables: torch.Tensor,  # [rows, max_blocks] int32
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input ids, positions and slots [n] int64, and lengths after the step [n] int32."""
    n = len(rows)
    ids, positions, slots = torch.empty(3, n, dtype=torch.int64, device=rows.device)
    lengths = torch.empty(n, dtype=torch.int32, device=rows.device)
    block = min(256, max(16, triton.next_power_of_2(n)))
    _decode_inputs_kernel[(triton.cdiv(n, block),)](
        rows, num_computed, next_token, tables, ids, positions, slots, lengths, n, padding_row, tables.stride(0),
        BLOCK_SIZE=block_size, BLOCK=block, num_warps=1, **early(rows),
    )  # fmt: skip
    return ids, positions, slots, lengths
