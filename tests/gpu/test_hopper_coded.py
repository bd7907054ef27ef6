"""The kernel for a few rows on GPUs like the H200, and assembly in the one for more, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.kernels.triton import hopper_coded
from kvasir.kernels.triton.coded import coded_gemv, coded_linear, coded_linear_parts, float_parts, grouped_coded_linear
from kvasir.quantization.coded import Coded, Coding, stacked
from tests.cpu.test_coded_kernels import KINDS, exact, make

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def newer() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("for GPUs of compute capability 9.0 and newer")


def close(got: torch.Tensor, wanted: torch.Tensor, limit: float = 8e-3) -> None:
    """bfloat16 rounds the result, normed inputs, and the values of short groups."""
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < limit, error


def scaled(kind: str, group: int, outputs: int, inputs: int) -> Coded:
    matrix = make(outputs, inputs, kind, group)
    return replace(matrix, scale=matrix.scale / 8, minimum=None if matrix.minimum is None else matrix.minimum / 8)


@pytest.mark.parametrize("inputs", [640, 2048])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str, group: int, inputs: int) -> None:
    """From one row to more than the kernel takes; the last program's rows of the matrix end within it."""
    matrix = scaled(kind, group, 1027, inputs)
    bias = torch.randn(1027, device="cuda", dtype=BF16)
    for rows in (1, 2, 7, 8, 9, 16, 17, 64, 65, 129):
        x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
        close(coded_linear(x, matrix), exact(x, matrix))
        close(coded_linear(x, matrix, bias), exact(x, matrix) + bias.double())
        parts = coded_linear_parts(x, matrix)
        close(parts.sum(0) if parts.dim() == 3 else parts, exact(x, matrix))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_one_output(rows: int) -> None:
    matrix, x = scaled("u4", 128, 1, 1024), torch.randn(rows, 1024, device="cuda", dtype=BF16)
    close(coded_linear(x, matrix), exact(x, matrix))


@pytest.mark.parametrize("rows", [20, 400])
@pytest.mark.parametrize(
    ("kind", "group", "inputs"),
    [("u4", 128, 2048), ("u4 min", 128, 2048), ("e2m1", 32, 2880), ("e2m1", 16, 2048), ("e4m3", 0, 2048)],
)
def test_experts(kind: str, group: int, inputs: int, rows: int) -> None:
    """In the sizes of gpt-oss, which 64 divides and 128 does not, too; some experts get no rows."""
    experts = [scaled(kind, group, 128, inputs) for _ in range(5)]
    matrices, x = stacked(experts), torch.randn(rows, inputs, device="cuda", dtype=BF16)
    assert matrices is not None
    starts = torch.tensor([0, 3, 3, rows // 2, rows // 2 + 1, rows], dtype=torch.int32, device="cuda")
    wanted = [exact(x[a:b], one) for one, a, b in zip(experts, starts, starts[1:], strict=False)]
    close(grouped_coded_linear(x, matrices, starts), torch.cat(wanted))


def test_which_matrices_it_takes() -> None:
    x = torch.randn(8, 2048, device="cuda", dtype=BF16)
    for kind in KINDS:
        for group in (16, 32, 64, 128, 0):
            assert hopper_coded.takes(x, scaled(kind, group, 64, 2048)) == (kind != "nf4"), (kind, group)
    assert not hopper_coded.takes(x.half(), scaled("u4", 128, 64, 2048))
    for rows in (x[:0], torch.cat([x, x])):
        assert not hopper_coded.takes(rows, scaled("u4", 128, 64, 2048))


@pytest.mark.parametrize("group", [16, 32, 64, 128, 0])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nf4"])
def test_one_row_with_what_stands_around_it(kind: str, group: int) -> None:
    matrix = scaled(kind, group, 1040, 1024)
    x, gain = torch.randn(1, 1024, device="cuda", dtype=BF16), torch.rand(1024, device="cuda").to(BF16) + 0.5
    bias, add = torch.randn(1040, device="cuda", dtype=BF16), torch.randn(1, 1040, device="cuda", dtype=BF16)

    if matrix.minimum is not None:  # values around zero, as weights are
        middle = matrix.levels().mean() * matrix.scale.mean()
        matrix = replace(matrix, minimum=matrix.minimum - middle)
    normed = x.double() * torch.rsqrt(x.double().square().mean() + 1e-5) * gain.double()
    close(coded_gemv(x, matrix, bias, gain=gain, eps=1e-5), exact(normed, matrix) + bias.double())
    close(coded_gemv(x, matrix, bias, add=add), exact(x, matrix) + bias.double() + add.double())
    matrix = replace(matrix, scale=matrix.scale / 8, minimum=None if matrix.minimum is None else matrix.minimum / 8)
    gate, up = (exact(normed, matrix) + bias.double()).chunk(2, dim=1)
    got = coded_gemv(x, matrix, bias, gain=gain, eps=1e-5, gated=True)
    close(got, torch.nn.functional.silu(gate) * up, limit=1.5e-2)  # both factors are rounded


@pytest.mark.parametrize(("outputs", "inputs"), [(1040, 1024), (4096, 4096), (28672, 1024)])
@pytest.mark.parametrize("rows", [9, 16, 33, 64])
def test_floats_of_eight_bits_on_both_sides(rows: int, outputs: int, inputs: int) -> None:
    matrix = scaled("e4m3", 0, outputs, inputs)
    matrix = replace(matrix, coding=Coding("e4m3", inputs, inputs="e4m3"))
    x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
    rounded = (x.float() / (x.float().abs().amax(1, keepdim=True) / 448)).to(torch.float8_e4m3fn).double()
    wanted = exact(rounded * (x.double().abs().amax(1, keepdim=True) / 448), matrix)
    close(coded_linear(x, matrix), wanted)
    close(float_parts(x, matrix, None, joins=False).sum(0), wanted)
    bias = torch.randn(outputs, device="cuda", dtype=BF16)
    close(coded_linear(x, matrix, bias), wanted + bias.double())
