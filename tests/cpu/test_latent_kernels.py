"""Attention over a latent cache against float64: in plain torch, and by the Triton kernels, on the CPU with Triton's
interpreter, on a GPU for real."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvasir.kernels import reference

pytest.importorskip("triton")

from kvasir.attention import torch as plain_torch
from kvasir.attention import triton as triton_attention
from kvasir.attention.base import AttentionBackend, AttentionBatch
from kvasir.attention.cpu import CpuAttention
from kvasir.attention.torch import TorchAttention
from kvasir.attention.triton import TritonAttention
from kvasir.kernels.layout import find_tiles
from kvasir.kernels.triton import latent as latent_module
from kvasir.kernels.triton.head_products import multiply_heads
from kvasir.kernels.triton.latent import latent_store
from kvasir.kernels.triton.paged_decode import Split
from kvasir.worker.profiling import steps_to_compile
from tests.kernel_builders import DEVICE, DTYPES, GPU, close, paged, randn
from tests.native_builders import SETS

pytestmark = pytest.mark.kernel
PLAIN, ROTARY, VALUE, LATENT = 8, 4, 6, 16
SCALE = 0.31


def attend(query: torch.Tensor, seen: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The last tokens of one sequence, each head's keys and values written out, in float64."""
    count, length = len(query), len(seen)
    plain = query.shape[2] - (seen.shape[1] - up.shape[2])
    both = torch.einsum("nl,hdl->nhd", seen[:, : up.shape[2]].double(), up.double())
    scores = torch.einsum("mhd,nhd->hmn", query[..., :plain].double(), both[..., :plain])
    scores = scores + torch.einsum("mhd,nd->hmn", query[..., plain:].double(), seen[:, up.shape[2] :].double())
    at = torch.arange(length - count, length, device=query.device)[:, None]
    hidden = torch.arange(length, device=query.device)[None] > at
    weights = (scores * SCALE).masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, both[..., plain:])


class Case:
    """Sequences in a paged cache of vectors, and a step over them; those that run one token come first."""

    def __init__(self, chunks: list[int], lengths: list[int], heads: int, dtype: torch.dtype, sizes: tuple[int, ...]):
        plain, rotary, value, latent = sizes
        self.chunks, self.lengths = chunks, lengths
        pages, self.tables, self.rows, self.lens = paged(lengths, 1, latent + rotary, 16, dtype)
        self.cache = pages[:, 0, :, 0].contiguous()
        self.cache[0] = float("nan")  # a page that belongs to nobody
        self.starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
        self.query = randn(int(self.starts[-1]), heads, plain + rotary, dtype=dtype)
        self.up = randn(heads, plain + value, latent, dtype=dtype) / latent**0.5

    def batch(self) -> AttentionBatch:
        return AttentionBatch(
            slots=self.rows, query_start=torch.from_numpy(self.starts).to(DEVICE), seq_lens=self.lens,
            tables=self.tables, rows=self.rows, num_decodes=sum(n == 1 for n in self.chunks),
            query_lens=np.array(self.chunks, np.int32), seq_bounds=np.array(self.lengths, np.int32), block_size=16,
        )  # fmt: skip

    def check(self, out: torch.Tensor, dtype: torch.dtype, unit: float = 1.0) -> None:
        for i, length in enumerate(self.lengths):
            part = slice(self.starts[i], self.starts[i + 1])
            seen = self.cache[self.tables[self.rows[i]].long()].flatten(0, 1)[:length].float() * unit
            close(out[part], attend(self.query[part], seen, self.up), dtype)


SMALL = (PLAIN, ROTARY, VALUE, LATENT)
ALL = [1, 1, 1, 9, 21, 70], [150, 70, 7, 40, 21, 75]


@pytest.mark.skipif(GPU or not SETS, reason="it is for CPUs")
@pytest.mark.parametrize("sizes", [SMALL, (32, 16, 48, 128), (7, 6, 5, 11)])
def test_cpu_library(sizes: tuple[int, ...]) -> None:
    chunks, lengths = ALL
    for heads in (1, 5):
        case = Case([*chunks, 300], [*lengths, 700], heads, torch.bfloat16, sizes)
        out = CpuAttention().forward_latent(case.query, case.cache, case.up, case.batch(), scale=SCALE)
        case.check(out, torch.bfloat16)


@pytest.mark.parametrize("piece", [4096, 13])
def test_plain_torch(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_torch, "PIECE", piece)
    monkeypatch.setattr(plain_torch, "MOST_SCORES", 4 * 13 * 20)
    case = Case(*ALL, 4, torch.float32, SMALL)
    case.check(
        TorchAttention().forward_latent(case.query, case.cache, case.up, case.batch(), scale=SCALE), torch.float32
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", [Split(1, 1 << 30), Split(4, 32)])
@pytest.mark.parametrize("heads", [4, 20])
def test_decodes(heads: int, split: Split, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_module, "choose_split", lambda sequences, blocks: split)
    case = Case([1, 1, 1], [150, 70, 7], heads, dtype, SMALL)
    case.check(TritonAttention().forward_latent(case.query, case.cache, case.up, case.batch(), scale=SCALE), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("piece", [1 << 20, 50])  # tokens
def test_chunks_in_pieces(piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(*ALL, 4, dtype, SMALL)
    token = 4 * (PLAIN + VALUE) * case.query.element_size()
    monkeypatch.setattr(triton_attention, "PIECE_BYTES", piece * token)
    batch = case.batch()
    case.check(TritonAttention().forward_latent(case.query, case.cache, case.up, batch, scale=SCALE), dtype)
    pieces = batch.step_cache["pieces", piece]
    assert [each.tokens for each in pieces] == ([136] if piece > 136 else [50, 50, 36])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [4, pytest.param(80, marks=pytest.mark.slow)])
def test_steps_that_only_the_device_knows(heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_module, "TILE_PROGRAMS", 264 if GPU else 3)
    chunks, lengths = [1, 1, 9, 21], [50, 7, 30, 21]
    case = Case(chunks, lengths, heads, dtype, SMALL)
    batch, size = case.batch(), 40  # the last tokens are padding
    counts = torch.tensor(chunks, dtype=torch.int32, device=DEVICE)
    batch.tiles, batch.num_decodes = find_tiles(counts, case.lens, size), 0
    batch.query_lens, batch.seq_bounds = np.zeros(4, np.int32), np.full(4, 2048, np.int32)
    case.query = torch.cat([case.query, randn(size - len(case.query), *case.query.shape[1:], dtype=dtype)])
    case.check(TritonAttention().forward_latent(case.query, case.cache, case.up, batch, scale=SCALE), dtype)


@pytest.mark.parametrize("backend", [TorchAttention, TritonAttention])
def test_a_cache_of_eight_bits(backend: type[AttentionBackend]) -> None:
    case = Case(*ALL, 4, torch.float32, SMALL)
    case.cache = (case.cache / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
    out = backend().forward_latent(case.query, case.cache, case.up, case.batch(), scale=SCALE, unit=0.5)
    case.check(out, torch.float32, 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_store(eight_bit: bool, interleaved: bool, dtype: torch.dtype) -> None:
    tokens, heads = 6, 3
    joined = randn(tokens, heads * (PLAIN + ROTARY) + LATENT + ROTARY, dtype=dtype)
    gain, angles = randn(LATENT, dtype=dtype), torch.randn(50, ROTARY // 2, device=DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([3, 0, 40, 7, 49, 1], device=DEVICE)
    slots = torch.tensor([5, 93, 17, 40, 60, 61], device=DEVICE)
    caches = [
        torch.zeros(6, 16, LATENT + ROTARY, device=DEVICE, dtype=torch.float8_e4m3fn if eight_bit else dtype)
        for _ in range(2)
    ]
    found = []
    for store, cache, x in zip((reference.latent_store, latent_store), caches, (joined, joined.clone()), strict=True):
        query, cached = x.split([heads * (PLAIN + ROTARY), LATENT + ROTARY], dim=-1)
        query = query.unflatten(-1, (heads, -1))
        found.append(store(query, cached, positions, table, cache, slots, gain, 1e-6, interleaved, 0.5))
    close(found[1], found[0], dtype)
    assert (caches[1].float() != 0).any(-1).flatten().nonzero().flatten().tolist() == sorted(slots.tolist())
    if eight_bit:  # a step of the type, where a division is rounded; the interpreter rounds a few wrongly
        near = torch.isclose(caches[1].float(), caches[0].float(), rtol=0.26, atol=2e-3).float().mean()
        assert near == 1 if GPU else near > 0.99
    else:
        close(caches[1], caches[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(3, 24, 100), (2, 512, 20), (16, 128, 512)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_heads_have_matrices_of_their_own(
    tokens: int, heads: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x = randn(tokens, heads, inputs + 8, dtype=dtype)[..., :inputs]
    rows = randn(heads, outputs + 16, inputs, dtype=dtype)[:, 16:]
    columns = randn(heads, inputs, outputs, dtype=dtype).transpose(1, 2)
    for weight in (rows, columns):
        out = torch.full((tokens + 1, heads, outputs), 7.0, dtype=dtype, device=DEVICE)
        multiply_heads(x, weight, out[:tokens])
        close(out[:tokens], torch.einsum("thi,hoi->tho", x.double(), weight.double()), dtype)
        assert (out[tokens:] == 7.0).all()


# The kernel for Hopper GPUs has no interpreter. The one that merges its parts has, and says where they must lie.


def ranges_of(lengths: list[int], ranges: int, least: int, tokens: int) -> list[list[tuple[int, int]]]:
    """The (sequence, tile) pairs of each range."""
    tiles = [(seq, tile) for seq, length in enumerate(lengths) for tile in range(-(-length // tokens))]
    ranges = min(ranges, -(-len(tiles) // least))
    return [tiles[len(tiles) * i // ranges : len(tiles) * (i + 1) // ranges] for i in range(ranges)]


def parts_of(
    lengths: list[int], heads: int, ranges: int, least: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the ranges write: parts, their sums of weights, and the output as far as it is done; and what comes out."""
    hopper_latent = pytest.importorskip("kvasir.kernels.triton.hopper_latent")
    width, tokens, lines = hopper_latent.LATENT.value, hopper_latent.KEYS.value, 8
    part, lse = torch.full((2 * ranges, lines, width), torch.nan), torch.full((2 * ranges, lines), torch.nan)
    out = torch.full((len(lengths), heads, width), 7.0)  # as a sequence without tokens keeps it
    wanted = out.clone()
    texts = [(torch.randn(heads, n) * 3, torch.randn(n, width)) for n in lengths]
    for seq, (scores, values) in enumerate(texts):
        if lengths[seq]:
            wanted[seq] = torch.softmax(scores * np.log(2), -1) @ values
    for index, some in enumerate(ranges_of(lengths, ranges, least, tokens)):
        for seq in {seq for seq, _ in some}:
            own = [tile for one, tile in some if one == seq]
            seen = slice(own[0] * tokens, min((own[-1] + 1) * tokens, lengths[seq]))
            scores, values = texts[seq][0][:, seen], texts[seq][1][seen]
            found = torch.softmax(scores * np.log(2), -1) @ values
            if own[0] == 0 and seen.stop == lengths[seq]:
                out[seq] = found
            else:
                slot = 2 * index + (own[0] == 0)
                assert part[slot].isnan().all(), "a part has its own place"
                part[slot, :heads], lse[slot, :heads] = found, torch.exp2(scores).sum(-1).log2()
    return part, lse, out, wanted


@pytest.mark.parametrize(
    ("lengths", "heads", "ranges", "least"),
    [
        ([1, 0, 64, 65, 3000, 0, 128, 700], 3, 7, 2),
        ([5000], 2, 40, 1),
        ([1024] * 3, 2, 13, 2),
        ([1], 1, 132, 2),
    ],
)
@pytest.mark.parametrize("how", [{"COLUMNS": 512, "SLOTS": 8}, {"COLUMNS": 128, "SLOTS": 32}], ids=str)
def test_parts_of_equal_ranges(lengths: list[int], heads: int, ranges: int, least: int, how: dict[str, Any]) -> None:
    hopper_latent = pytest.importorskip("kvasir.kernels.triton.hopper_latent")
    part, lse, out, wanted = (x.to(DEVICE) for x in parts_of(lengths, heads, ranges, least))
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    hopper_latent._latent_merge_kernel[(heads, len(lengths), 512 // how["COLUMNS"])](
        part, lse, lens, out, len(lengths), ranges, least,
        HEADS=heads, LINES=part.shape[1], LATENT=512, KEYS=64, CHUNK=4, PDL=False, **how,
    )  # fmt: skip
    close(out, wanted.double(), torch.float32)


@pytest.mark.parametrize("heads", [8, 16, 20, 32, 40, 128])
def test_every_plan_is_compiled_before_the_first_request(heads: int) -> None:
    """Texts of prompts are decodes, too: in the last layer, which runs for each text's last token."""
    hopper_latent = pytest.importorskip("kvasir.kernels.triton.hopper_latent")
    max_rows = 256
    steps = list(steps_to_compile(max_rows, 2048, 4096))
    compiled = {
        hopper_latent.choose_plan(count, heads, int(step.bounds[:count].max()))
        for step in steps
        for count in (step.num_decodes, len(step.rows))
        if count
    }
    served = {
        hopper_latent.choose_plan(count, heads, longest)
        for count in range(1, max_rows + 1)
        for longest in (1, 32, 64, 200, 256, 257, 500, 2000, 4096)
    }
    assert served <= compiled
