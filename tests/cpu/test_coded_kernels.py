"""Products with quantized matrices against float64 on the same codes: interpreted, and on a GPU for real (-m gpu)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvasir import kernels
from kvasir.kernels import reference
from kvasir.kernels.triton import coded as coded_module
from kvasir.kernels.triton.coded import (
    coded_gemv,
    coded_linear,
    coded_linear_parts,
    coded_parts,
    expand_coded,
    grouped_coded_linear,
    is_coded_fit,
    round_rows,
)
from kvasir.kernels.triton.launch import next_power_of_2
from kvasir.quantization.coded import BITS, Coded, Coding, stacked
from tests.kernel_builders import DEVICE, DTYPES, GPU, close, randn
from tests.pairwise import each_once, few

pytestmark = pytest.mark.kernel

# name -> kind, offset, whether there are minima, whether rows have factors
ALL = {
    "u4": ("u4", 8, False, False),
    "u4 min": ("u4", 0, True, False),
    "u6": ("u6", 32, False, False),
    "u6 min": ("u6", 0, True, False),
    "i8": ("i8", 0, False, False),
    "i8 min": ("i8", 0, True, False),
    "e4m3": ("e4m3", 0, False, False),
    "e2m1": ("e2m1", 0, False, True),
    "nf4": ("nf4", 0, False, False),
}
KINDS = list(ALL)
GROUPS = [16, 32, 64, 128, 0]  # 0: all inputs


def make(outputs: int, inputs: int, kind: str, group: int, scale: torch.dtype = torch.float32) -> Coded:
    name, offset, has_min, has_row = ALL[kind]
    group = group or inputs
    codes = torch.randint(0, 1 << BITS[name], (outputs, inputs), dtype=torch.uint8)
    if name == "e4m3":
        codes[(codes & 127) == 127] = 0
    scales = (torch.rand(outputs, inputs // group) + 0.5).to(scale)
    minimum = torch.randn(outputs, inputs // group) if has_min else None
    row = torch.rand(outputs) + 0.5 if has_row else None
    return Coded(codes, scales, Coding(name, group, offset), minimum=minimum, row=row).to(torch.device(DEVICE)).packed()


def exact(x: torch.Tensor, matrix: Coded) -> torch.Tensor:
    """In float64, from the meaning of codes."""
    values = matrix.levels().double().view(matrix.shape[0], -1, matrix.coding.group) * matrix.scale.double()[:, :, None]
    if matrix.row is not None:
        values = values * matrix.row.double()[:, None, None]
    if matrix.minimum is not None:
        values = values + matrix.minimum.double()[:, :, None]
    return x.double() @ values.view(matrix.shape).T


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "group"), each_once(KINDS, GROUPS, every=GPU))
def test_one_row(kind: str, group: int, dtype: torch.dtype) -> None:
    """The last program's rows end within it, and the last step's groups."""
    matrix, x = make(37, 640, kind, group), randn(1, 640, dtype=dtype)
    assert is_coded_fit(matrix)
    close(coded_gemv(x, matrix, blocks=[4, 256, 4]), exact(x, matrix), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "group"), each_once(["u4", "u4 min", "e4m3", "e2m1"], [32, 128, 0], every=GPU))
def test_one_row_with_what_stands_around_it(kind: str, group: int, dtype: torch.dtype) -> None:
    group = group or 256
    matrix, x = make(48, 256, kind, group), randn(1, 256, dtype=dtype)
    scaled = replace(matrix, scale=matrix.scale / 50, minimum=None if matrix.minimum is None else matrix.minimum / 50)
    gain, bias, add = randn(256, dtype=dtype), randn(48, dtype=dtype), randn(1, 48, dtype=dtype)

    def wanted(**how: object) -> torch.Tensor:
        product = lambda x, matrix, bias=None: exact(x, scaled) + (0 if bias is None else bias.double())  # noqa: E731
        return reference.fused_linear(x, scaled, bias, product=product, **how)  # type: ignore[arg-type]

    close(coded_gemv(x, scaled, bias, gain=gain, eps=1e-5), wanted(gain=gain, eps=1e-5), dtype)
    close(coded_gemv(x, scaled, bias, add=add), wanted(add=add), dtype)
    close(coded_gemv(x, scaled, bias, gain=gain, eps=1e-5, gated=True), wanted(gain=gain, eps=1e-5, gated=True), dtype)


@pytest.mark.parametrize(
    "dtype", DTYPES if GPU else [*DTYPES, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("kind", "group", "rows"), each_once(KINDS, GROUPS, [2, 16, 65], every=GPU))
def test_a_few_rows(kind: str, group: int, rows: int, dtype: torch.dtype) -> None:
    matrix, x = make(70, 640, kind, group), randn(rows, 640, dtype=dtype)
    matrix = replace(matrix, scale=matrix.scale / 8, minimum=None if matrix.minimum is None else matrix.minimum / 8)
    close(coded_linear(x, matrix), exact(x, matrix), dtype)
    bias = randn(70, dtype=dtype)
    close(coded_linear(x, matrix, bias), exact(x, matrix) + bias.double(), dtype)
    parts = coded_parts(x, matrix, None, [64, 4, 3, 5], joins=False)
    assert parts.shape == (5, rows, 70) and parts.dtype == torch.float32
    close(parts.sum(0), exact(x, matrix), dtype)


@pytest.mark.parametrize(("kind", "group"), each_once(KINDS, GROUPS, every=GPU))
def test_expanding(kind: str, group: int) -> None:
    matrix = make(37, 640, kind, group)
    torch.testing.assert_close(expand_coded(matrix, torch.float32), matrix.expand(), rtol=1e-6, atol=1e-6)
    assert torch.equal(expand_coded(matrix, torch.float16).isfinite(), matrix.expand(torch.float16).isfinite())


@pytest.mark.parametrize("kind", ["u4 min", "u6 min"])
def test_minima_may_be_rounded_to_bfloat16(kind: str) -> None:
    """Numbers count from the middle. Kernels for GPUs round scales and minima, which would lose five times as much of
    values whose minimum is far from zero."""
    found = make(64, 256, kind, 32)
    most = (1 << BITS[ALL[kind][0]]) - 1
    matrix = replace(found, minimum=-found.scale * most / 2)
    wanted, centered = matrix.expand(), matrix.centered()
    torch.testing.assert_close(centered.expand(), wanted, rtol=1e-5, atol=1e-5)
    rounded = replace(
        centered, scale=centered.scale.bfloat16().float(), minimum=centered.minimum.bfloat16().float()
    ).expand()
    assert (rounded - wanted).norm() / wanted.norm() < 2e-3
    assert centered.centered() is centered and make(8, 32, "u4", 32).centered().minimum is None


@pytest.mark.parametrize("rows", few([1, 300], fast=[1, 300]))
def test_inputs_in_another_order(rows: int) -> None:
    matrix = make(32, 256, "u4", 128)
    matrix = replace(matrix, order=torch.randperm(256, device=DEVICE), column=torch.rand(256, device=DEVICE) + 0.5)
    x = randn(rows, 256)
    close(coded_linear(x, matrix), x.double() @ matrix.expand().double().T, torch.float32)
    assert not kernels.is_coded_fit(matrix), "a fused kernel takes inputs as they are"


def test_groups_that_are_no_powers_of_two() -> None:
    """Of 192 inputs they are taken in parts; of 48 the matrix is expanded."""
    for group, fits in ((192, True), (48, False)):
        matrix = make(20, 384, "u4 min", group)
        assert is_coded_fit(matrix) == fits
        for rows in (1, 3):
            x = randn(rows, 384)
            close(coded_linear(x, matrix), exact(x, matrix), torch.float32)


def test_inputs_that_16_divides_an_odd_number_of_times() -> None:
    """Tensor cores take 16 inputs at once, and a tile's halves are inputs of two products."""
    for kind, group, inputs, fits in (("e2m1", 16, 176, False), ("e2m1", 16, 160, True), ("u4", 80, 240, False)):
        matrix, x = make(20, inputs, kind, group), randn(3, inputs)
        assert matrix.coding.tile == 16 and is_coded_fit(matrix) == fits
        close(coded_linear(x, matrix), exact(x, matrix), torch.float32)
    assert is_coded_fit(make(20, 176, "i8", 16)), "a byte for each code"


def test_scales_of_16_bits_and_8() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        matrix, x = make(20, 256, "e2m1", 16, dtype), randn(3, 256)
        close(coded_linear(x, matrix), exact(x, matrix), torch.float32)
        close(coded_linear(x[:1], matrix), exact(x[:1], matrix), torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_so(value: float) -> None:
    for kind in ("u4", "u4 min"):
        matrix, x = make(20, 256, kind, 128), randn(3, 256)
        x[1, 7] = value
        for got in (coded_linear(x, matrix), torch.cat([coded_linear(x[i : i + 1], matrix) for i in range(3)])):
            assert not got[1].isfinite().any() and got[0].isfinite().all() and got[2].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "group", "inputs"),
    [("u4", 128, 256), ("u4 min", 32, 256), ("e2m1", 16, 256), ("e2m1", 32, 192), ("e4m3", 0, 256)],
)
def test_experts(kind: str, group: int, inputs: int) -> None:
    experts = [make(24, inputs, kind, group) for _ in range(5)]
    matrices, x = stacked(experts), randn(19, inputs)
    assert matrices is not None
    starts = torch.tensor([0, 3, 3, 12, 13, 19], dtype=torch.int32, device=DEVICE)
    got = grouped_coded_linear(x, matrices, starts)
    wanted = torch.cat([exact(x[a:b], one) for one, a, b in zip(experts, starts, starts[1:], strict=False)])
    close(got, wanted, torch.float32)
    close(reference.grouped_coded_linear(x, matrices, starts), wanted, torch.float32)


def test_parts_are_left_to_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = make(20, 1024, "u4", 128), randn(4, 1024)
    monkeypatch.setattr(coded_module, "_blocks", lambda x, matrix: [64, 4, 3, 4])
    parts = coded_linear_parts(x, matrix)
    assert parts.shape == (4, 4, 20)
    close(parts.sum(0), exact(x, matrix), torch.float32)
    assert coded_linear_parts(x[:1], matrix).shape == (1, 20)


def test_parts_change_with_powers_of_two_of_the_rows() -> None:
    """Only those are compiled before the first request."""
    for outputs, inputs in ((5120, 27648), (6144, 4096), (64, 2048)):
        parts = [coded_module._parts(outputs, 64, rows, inputs, 4, fills=6) for rows in range(1, 257)]
        assert parts == [parts[next_power_of_2(rows) - 1] for rows in range(1, 257)]
        assert parts[0] > 1, "the test would show nothing"


def test_no_rows() -> None:
    matrix, x = make(20, 256, "u4", 128), randn(0, 256)
    assert coded_linear(x, matrix).shape == coded_linear_parts(x, matrix).shape == (0, 20)


@pytest.mark.skipif(not GPU, reason="the interpreter rounds to 8-bit floats otherwise")
def test_rows_of_8_bit_floats() -> None:
    x = randn(5, 1000)
    rounded, scale = round_rows(x)
    torch.testing.assert_close(rounded.float() * scale, x, rtol=0.07, atol=1e-2)
    matrix = make(64, 1024, "e4m3", 0)
    matrix = replace(matrix, coding=replace(matrix.coding, inputs="e4m3"))
    x = randn(33, 1024, dtype=torch.bfloat16)
    error = (coded_linear(x, matrix).double() - exact(x, matrix)).norm() / exact(x, matrix).norm()
    assert 1e-3 < error < 0.05
