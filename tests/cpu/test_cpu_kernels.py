"""The CPU library against plain torch, on every instruction set this machine can run, over random shapes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvasir import kernels
from kvasir.attention.base import AttentionBatch
from kvasir.attention.cpu import CpuAttention
from kvasir.attention.torch import TorchAttention
from kvasir.kernels import reference
from kvasir.kernels.cpu import library, ops, packed
from kvasir.kernels.cpu.packed import BF16, INT4, INT6, INT8, Format
from tests.native_builders import SETS, require_library

BFLOAT = torch.bfloat16
FORMATS = {"bf16": BF16, "int8": INT8, "int6": INT6, "int4": INT4}


@pytest.fixture(params=SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    require_library()
    torch.manual_seed(0)
    library.use_instruction_set(request.param)
    yield request.param
    library.use_instruction_set(SETS[0])


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(BFLOAT)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 5e-3) -> None:
    assert got.shape == wanted.shape
    error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    assert error < tolerance, f"relative error {error:.1e}"


def test_structures_match() -> None:
    assert library.loaded().kv_layout() == library.layout()


# ---------------------------------------------------------------- products


SHAPES = [(64, 64), (50, 40), (33, 31), (160, 96), (16, 640)]
ROWS = [1, 2, 3, 4, 5, 8, 13, 16, 17, 28, 29, 45, 100]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(shape: tuple[int, int], name: str) -> None:
    outputs, inputs = shape
    weight, bias = randn(outputs, inputs), randn(outputs)
    matrix = packed.pack(weight, FORMATS[name], bias)
    kept = matrix.rows(torch.arange(outputs)).double()
    assert torch.equal(kept, weight.double()) or name != "bf16"
    for rows in ROWS:
        x = randn(rows, inputs + 3)[:, :inputs]  # rows that do not lie side by side
        # 8 bits of activations are another 0.5%
        close(matrix.linear(x), x.double() @ kept.T + bias.double(), 4e-3 if name == "bf16" else 1.2e-2)
    assert matrix.linear(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("seed", range(12))
def test_linear_of_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs, inputs, rows = (int(rng.integers(1, most)) for most in (300, 700, 80))
    form = list(FORMATS.values())[seed % len(FORMATS)]
    matrix, x = packed.pack(randn(outputs, inputs), form), randn(rows, inputs)
    kept = matrix.rows(torch.arange(outputs)).double()
    close(matrix.linear(x), x.double() @ kept.T, 4e-3 if form is BF16 else 1.4e-2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", library.ACTIVATIONS)
@pytest.mark.parametrize("half", [48, 21])
def test_gated_linear(half: int, name: str, activation: str) -> None:
    weight, bias = randn(2 * half, 64) / 8, randn(2 * half)
    matrix = packed.pack(weight, FORMATS[name], bias)
    for rows in ROWS:
        x = randn(rows, 64)
        wanted = reference.gated_activation(matrix.linear(x), activation)
        close(matrix.gated_linear(x, activation), wanted)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", library.ACTIVATIONS)
def test_activated_linear(name: str, activation: str) -> None:
    matrix = packed.pack(randn(75, 64) / 4, FORMATS[name], randn(75))
    for rows in ROWS:
        x = randn(rows, 64)
        close(matrix.linear(x, activation), reference.ACTIVATIONS[activation](matrix.linear(x)))


def test_quantized_weights_are_near() -> None:
    weight = randn(64, 320)
    for form, most in ((INT8, 0.007), (INT6, 0.026), (INT4, 0.11)):
        close(packed.pack(weight, form).rows(torch.arange(64)), weight, most)


def test_types_of_checkpoints() -> None:
    weight = torch.randn(48, 64)
    for dtype in (torch.float32, torch.float16, torch.float64, BFLOAT):
        source = weight.to(dtype)
        assert torch.equal(packed.pack(source).rows(torch.arange(48)), source.to(BFLOAT))
    assert torch.equal(packed.pack(weight.T).rows(torch.arange(64)), weight.T.to(BFLOAT)), "a transposed matrix"


def test_parts_fill_a_matrix_from_any_row() -> None:
    weight = randn(57, 64)
    for form in FORMATS.values():
        whole = packed.pack(weight, form)
        layout = packed.Layout(form, 57, 64)
        parts = packed.PackedMatrix(layout, torch.full((layout.num_bytes,), 255, dtype=torch.uint8))
        for first, last in ((40, 57), (0, 7), (7, 40)):
            parts.fill(weight[first:last], first)
        assert torch.equal(parts.rows(torch.arange(57)), whole.rows(torch.arange(57)))


@pytest.mark.parametrize("kind", packed.GGUF)
def test_gguf_rows(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    number, form = packed.GGUF[kind]
    _, row_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    rng, rows, inputs = np.random.default_rng(0), 35, 512
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    raw = rng.integers(0, 256, (rows, inputs // block, row_bytes), np.uint8)
    for at in {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82]}.get(kind, [0, 2] if form.has_min else [0]):
        scales = rng.uniform(0.001, 0.1, (rows, inputs // block)).astype(np.float16)
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    source = torch.from_numpy(raw.reshape(rows, -1))
    wanted = torch.from_numpy(gguf.dequantize(source.numpy(), gguf.GGMLQuantizationType(number)))
    for target in (form, form.joined(Format("q6", 16, 32)), form.joined(Format("q8", has_min=True))):
        layout = packed.Layout(target, rows, inputs)
        matrix = packed.PackedMatrix(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
        matrix.fill_gguf(source, kind)
        close(matrix.rows(torch.arange(rows)), wanted, 3e-3)  # bfloat16 has 8 bits
        x = randn(5, inputs)
        close(matrix.linear(x), x.double() @ wanted.double().T, 1.5e-2)


# ---------------------------------------------------------------- a step's inputs


@pytest.mark.parametrize("seed", range(8))
def test_step_inputs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    max_rows, blocks, block_size = 9, 12, 16
    rows = torch.from_numpy(rng.permutation(max_rows)[: int(rng.integers(1, max_rows))])
    num_tokens = torch.from_numpy(rng.integers(1, 2 if seed % 2 else 40, len(rows), np.int32))
    token_ids = torch.from_numpy(rng.integers(-1, 3, int(num_tokens.sum()), np.int32))
    tables = torch.from_numpy(rng.permutation(max_rows * blocks).astype(np.int32).reshape(max_rows, blocks))
    next_token = torch.from_numpy(rng.integers(100, 200, max_rows, np.int32))
    before = torch.from_numpy(rng.integers(0, 150, max_rows, np.int32))
    found = []
    for version in (ops, reference):
        num_computed = before.clone()
        step = version.step_inputs(rows, num_tokens, token_ids, num_computed, next_token, tables, block_size)
        found.append((*step, num_computed))
    for ours, wanted in zip(*found, strict=True):
        assert ours.dtype == wanted.dtype and torch.equal(ours, wanted)
    ids, positions, slots, query_start, lengths, num_computed = found[0]
    last = query_start[1:].long() - 1
    assert torch.equal(positions[last] + 1, lengths) and torch.equal(num_computed[rows], lengths)
    assert torch.equal(slots[last] % block_size, positions[last] % block_size)
    assert all(int(ids[at]) in (0, 1, 2) or token_ids[at] == -1 for at in range(len(ids)))


# ---------------------------------------------------------------- pointwise


@pytest.mark.parametrize("width", [8, 64, 100, 896])
def test_norms(width: int) -> None:
    x, residual = randn(7, width), randn(7, width)
    for gain in (randn(width), torch.randn(width)):
        close(ops.rms_norm(x, gain, 1e-6), reference.rms_norm(x, gain, 1e-6), 2e-3)
        got, total = ops.add_rms_norm(x, residual, gain, 1e-6)
        wanted, wanted_total = reference.add_rms_norm(x, residual, gain, 1e-6)
        close(got, wanted, 2e-3)
        assert torch.equal(total, wanted_total)


@pytest.mark.parametrize("activation", library.ACTIVATIONS)
def test_gated_activation(activation: str) -> None:
    x = randn(9, 2 * 72) * 4
    close(ops.gated_activation(x, activation), reference.gated_activation(x, activation), 2e-3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (80, 32), (16, 16), (24, 8)])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_store(head_dim: int, rotated: int, interleaved: bool, norms: bool) -> None:
    heads, kv_heads, tokens = 6, 2, 9
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim)
    angles = torch.rand(50, rotated // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 50, (tokens,))
    slots = torch.randperm(40)[:tokens]
    gains = (randn(head_dim), randn(head_dim)) if norms else (None, None)
    ours, theirs = (torch.zeros(10, 3, 2, 4, kv_heads, head_dim, dtype=BFLOAT)[:, 1] for _ in range(2))
    args = (*gains, 1e-6, interleaved)
    wanted = reference.rope_store(qkv, heads, positions, table, theirs, slots, *args)
    got = ops.rope_store(qkv.clone(), heads, positions, table, ours, slots, *args)
    close(got, wanted, 2e-3)
    close(ours, theirs, 2e-3)
    if not norms:
        assert torch.equal(got, wanted) and torch.equal(ours, theirs), "rotation rounds as the reference does"


def test_a_token_without_a_slot_is_not_stored() -> None:
    cache = torch.zeros(2, 2, 4, 1, 16, dtype=BFLOAT)
    ops.rope_store(randn(1, 48), 1, torch.zeros(1, dtype=torch.int64), None, cache, torch.tensor([-1]))
    assert not cache.any()


# ---------------------------------------------------------------- attention


def make_batch(work: list[tuple[int, int]], block_size: int, causal: bool = True) -> AttentionBatch:
    lengths = np.array([context + queries for context, queries in work], np.int32)
    queries = np.array([queries for _, queries in work], np.int32)
    width = -(-int(lengths.max()) // block_size)
    return AttentionBatch(
        slots=torch.zeros(int(queries.sum()), dtype=torch.int64),
        query_start=torch.from_numpy(np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)),
        seq_lens=torch.from_numpy(lengths),
        tables=torch.randperm(len(work) * width + 1)[: len(work) * width].view(len(work), width).int(),
        rows=torch.arange(len(work)),
        num_decodes=int((queries == 1).sum()),
        query_lens=queries,
        seq_bounds=lengths,
        block_size=block_size,
        causal=causal,
    )


MIXED = [(9, 1), (0, 1), (231, 1), (64, 1), (0, 70), (5, 3), (130, 20)]
LONG = [(1500, 1), (3000, 1)]  # few sequences: their keys are shared out


@pytest.mark.parametrize("work", [MIXED, LONG], ids=["mixed", "long"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 32), (6, 1, 80), (8, 2, 16)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (17, None), (600, 30.0), (None, 5.0)])
def test_attention(
    work: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, window: int | None, softcap: float | None
) -> None:
    batch = make_batch(work, 16)
    blocks = int(batch.tables.max()) + 1
    cache = randn(blocks, 2, 2, 16, kv_heads, head_dim)[:, 1]
    query = randn(len(batch.slots), heads + 2, head_dim)[:, :heads]
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    wanted = TorchAttention().forward(query.float(), cache.float(), batch, **options)  # type: ignore[arg-type]
    batch.step_cache.clear()
    got = CpuAttention().forward(query, cache, batch, **options)  # type: ignore[arg-type]
    close(got, wanted, 8e-3)


@pytest.mark.parametrize("seed", range(12))
def test_attention_of_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, shared, head_dim = int(rng.integers(1, 4)), int(rng.integers(1, 8)), 4 * int(rng.integers(2, 40))
    lengths = [
        (int(rng.integers(0, 400)), int(rng.choice([1, rng.integers(1, 90)]))) for _ in range(rng.integers(1, 9))
    ]
    batch = make_batch(sorted(lengths, key=lambda one: one[1] != 1), int(rng.choice([8, 16, 32])))
    cache = randn(int(batch.tables.max()) + 1, 2, batch.block_size, kv_heads, head_dim)
    query = randn(len(batch.slots), kv_heads * shared, head_dim)
    window = None if seed % 2 else int(rng.integers(1, 300))
    wanted = TorchAttention().forward(query.float(), cache.float(), batch, scale=head_dim**-0.5, window=window)
    batch.step_cache.clear()
    close(CpuAttention().forward(query, cache, batch, scale=head_dim**-0.5, window=window), wanted, 8e-3)


def test_attention_that_sees_what_follows() -> None:
    batch = make_batch([(0, 40), (0, 9)], 16, causal=False)
    cache, query = randn(8, 2, 16, 2, 64), randn(49, 4, 64)
    wanted = TorchAttention().forward(query.float(), cache.float(), batch, scale=0.1, window=None)
    close(CpuAttention().forward(query, cache, batch, scale=0.1, window=None), wanted, 8e-3)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 12, 32), (4, 2, 64), (6, 1, 80), (2, 2, 8)])
def test_encoder_attention(heads: int, kv_heads: int, head_dim: int, apart: bool, softcap: float | None) -> None:
    """Keys and values are read where they are: side by side with the queries, or each by themselves."""
    lengths = np.array([1, 7, 64, 65, 300, 3], np.int32)
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    qkv = randn(int(lengths.sum()), heads + 2 * kv_heads, head_dim)
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if apart:  # as positions that were rotated leave them
        query, key = query.contiguous(), key.contiguous()
    options = (starts, lengths, head_dim**-0.5, None, None, softcap)
    wanted = reference.encoder_attention(query.float(), key.float(), value.float(), *options)
    close(ops.encoder_attention(query, key, value, *options), wanted, 8e-3)


def test_the_library_attends_for_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where it knows too little: windows that hide something, biases, other types."""
    calls: list[str] = []
    for version, name in ((ops, "library"), (reference, "torch")):
        monkeypatch.setattr(version, "encoder_attention", lambda query, *rest, name=name: calls.append(name) or query)
    lengths, starts = np.array([4, 9], np.int32), torch.tensor([0, 4, 13], dtype=torch.int32)
    x, bias = randn(13, 2, 16), randn(2, 17)
    for given, reach, some in ((x, None, None), (x, 8, None), (x, 7, None), (x, None, bias), (x.float(), None, None)):
        kernels.encoder_attention(given, given, given, starts, lengths, 0.25, reach, some)
    assert calls == ["library", "library", "torch", "torch", "torch"]


@pytest.mark.parametrize("head_dim", [64, 80])
def test_8_bit_cache(head_dim: int) -> None:
    """Stored by rope_store, read by attention: as near as 8 bits are."""
    heads, kv_heads, tokens = 4, 2, 50
    batch = make_batch([(0, tokens)], 16)
    place = torch.arange(tokens)
    batch.slots = batch.tables[0].long()[place // 16] * 16 + place % 16
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim)
    blocks = int(batch.tables.max()) + 1
    plain = torch.zeros(blocks, 2, 16, kv_heads, head_dim, dtype=BFLOAT)
    small = torch.zeros(blocks, 2, 16, kv_heads, head_dim + 4, dtype=torch.int8)
    results = []
    for cache in (plain, small):
        query = ops.rope_store(qkv.clone(), heads, place, None, cache, batch.slots)
        results.append(CpuAttention().forward(query, cache, batch, scale=0.1, window=None))
    close(results[1], results[0], 2e-2)
    assert not torch.equal(results[1], results[0])


def in_8_bits(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors as the 8-bit cache has them, a float32 scale behind each; and what they then mean."""
    scale = (cache.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-9)
    numbers = (cache.float() / scale).round()
    small = torch.cat([numbers.to(torch.int8), scale.contiguous().view(torch.int8)], dim=-1)
    return small.contiguous(), numbers * scale


@pytest.mark.parametrize("work", [MIXED, LONG], ids=["mixed", "long"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (17, None), (600, 30.0), (None, 5.0)])
def test_attention_over_8_bits(work: list[tuple[int, int]], window: int | None, softcap: float | None) -> None:
    batch = make_batch(work, 16)
    small, meant = in_8_bits(randn(int(batch.tables.max()) + 1, 2, 16, 2, 64))
    query = randn(len(batch.slots), 14, 64)
    options = {"scale": 0.125, "window": window, "softcap": softcap}
    wanted = TorchAttention().forward(query.float(), meant, batch, **options)  # type: ignore[arg-type]
    batch.step_cache.clear()
    close(CpuAttention().forward(query, small, batch, **options), wanted, 2e-2)  # type: ignore[arg-type]


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT], ids=str)
@pytest.mark.parametrize("vocab", [40, 3000])
def test_draw(vocab: int, dtype: torch.dtype) -> None:
    lines = 60
    logits = (torch.randn(lines, vocab) * 3).to(dtype)
    logits[5, 10:] = logits[6, : vocab // 2] = float("-inf")
    logits[9:12] = logits[30, 0] = logits[31, vocab - 1] = logits[32, vocab // 2] = float("nan")
    rows, positions = torch.arange(lines) % 3, torch.arange(lines)
    temperature, seeds = torch.tensor([0.0, 0.7, 1.3]), torch.tensor([1, -5, 77], dtype=torch.int32)
    next_token, wanted_next = torch.zeros(2, 3, dtype=torch.int32)
    got = ops.draw(logits, rows, positions, temperature, seeds, next_token)
    wanted = reference.draw(logits, rows, positions, temperature, seeds, wanted_next)
    assert torch.equal(got, wanted)
    broken = logits.isnan().any(dim=1)
    assert (got[broken] == reference.NOT_A_TOKEN).all() and (got[~broken] >= 0).all()
    assert torch.isin(next_token, got).all()


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT], ids=str)
@pytest.mark.parametrize(("vocab", "spread"), [(50, 2.0), (5000, 2.0), (50_000, 0.3), (50_000, 8.0)])
def test_filter_threshold(vocab: int, spread: float, dtype: torch.dtype) -> None:
    """Among few, among many that are nearly alike, and among many of which few count."""
    wishes = [(0.0, 5, 0.5), (0.1, 0, 1.0), (0.0, 7, 1.0), (0.0, 0, 0.8), (0.02, 20, 0.9), (0.0, 0, 1.0), (0.0, 1, 0.1)]
    min_p, top_k, top_p = (torch.tensor(column) for column in zip(*wishes, strict=True))
    rows = torch.arange(28) % len(wishes)
    temperature = torch.linspace(0.5, 1.5, len(wishes))
    logits = (torch.randn(28, vocab) * spread).to(dtype)
    logits[:7, : vocab // 2] = float("-inf")
    args = (rows, temperature, min_p, top_k.int(), top_p)
    got, wanted = ops.filter_threshold(logits, *args), reference.filter_threshold(logits, *args)
    kept, wanted_kept = ((logits.float() >= threshold[:, None]).sum(1) for threshold in (got, wanted))
    assert (kept - wanted_kept).abs().max() <= 1, "a sum at the very edge may round either way"
    assert (got == wanted).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT], ids=str)
def test_filter_threshold_among_many_equals(dtype: torch.dtype) -> None:
    """More of one value than are ever sorted; some tokens are masked by a number, some are impossible."""
    logits = torch.randint(0, 5, (6, 40_000)).to(dtype)
    logits[:, :20] = torch.arange(10, 30)
    logits[1:, 30_000:] = -1e9
    logits[2:, 35_000:] = float("-inf")
    top_k, top_p = torch.tensor([0, 9000, 0, 25_000, 10, 33_000]), torch.tensor([0.9999999, 1.0, 0.5, 0.999, 0.9, 1.0])
    args = (torch.arange(6), torch.full((6,), 3.0), torch.zeros(6), top_k.int(), top_p)
    got = ops.filter_threshold(logits, *args)
    assert torch.equal(got, reference.filter_threshold(logits, *args))
    assert len(set(got.tolist())) >= 4, "they end at different places"


# ---------------------------------------------------------------- the same bits whatever is computed beside


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(name: str) -> None:
    weight, bias, x = randn(160, 900), randn(160), randn(100, 900)
    matrix = packed.pack(weight, FORMATS[name], bias)
    for product in (matrix.linear, lambda rows: matrix.gated_linear(rows, "silu")):
        whole = product(x)
        for rows in ROWS:
            assert torch.equal(product(x[:rows]), whole[:rows]), f"{rows} rows"
            assert torch.equal(product(x[-rows:]), whole[-rows:]), f"the last {rows} rows"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 80), (6, 1, 32)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (17, None), (300, 30.0)])
def test_a_query_does_not_depend_on_the_other_queries(
    threads: int, heads: int, kv_heads: int, head_dim: int, window: int | None, softcap: float | None
) -> None:
    """In a batch of a long prompt and others, alone as a chunk of any size, and by itself."""
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    whole = make_batch([(0, 700), (231, 1), (5, 3), (1200, 1)], 16)
    cache = randn(int(whole.tables.max()) + 1, 2, 16, kv_heads, head_dim)
    query = randn(len(whole.slots), heads, head_dim)

    def attend(queries: torch.Tensor, batch: AttentionBatch, table: torch.Tensor) -> torch.Tensor:
        batch.tables = table
        return CpuAttention().forward(queries, cache, batch, **options)  # type: ignore[arg-type]

    before = library.num_threads()
    library.configure(threads)
    try:
        together = attend(query, whole, whole.tables)
        for begin, count in [(0, 40), (199, 1), (255, 2), (256, 1), (200, 100), (511, 130), (600, 100), (699, 1)]:
            got = attend(query[begin : begin + count], make_batch([(begin, count)], 16), whole.tables[:1].contiguous())
            assert torch.equal(got, together[begin : begin + count]), f"{count} queries from {begin} on"
        for at, table, work in [(700, 1, (231, 1)), (704, 3, (1200, 1))]:
            got = attend(query[at : at + 1], make_batch([work], 16), whole.tables[table : table + 1].contiguous())
            assert torch.equal(got, together[at : at + 1])
    finally:
        library.configure(before)
