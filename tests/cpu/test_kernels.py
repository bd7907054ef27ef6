"""The operations against transformers' own, bit for bit in bfloat16, and the CPU's products against plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvasir import kernels
from kvasir.models.config_reader import ACTIVATIONS

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_like_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data.normal_(1, 0.2)
    x, residual = torch.randn(2, 9, 64).to(dtype)
    assert torch.equal(kernels.rms_norm(x, norm.weight, 1e-5), norm(x))
    normed, total = kernels.add_rms_norm(x, residual.clone(), norm.weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_rounds_like_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key = torch.randn(11, 4, 16).to(dtype), torch.randn(11, 2, 16).to(dtype)
    angles = torch.randn(50, 8)
    positions = torch.randint(0, 50, (11,))
    cos, sin = (torch.cat((x, x), -1)[positions].to(dtype) for x in (angles.cos(), angles.sin()))
    table = torch.cat((angles.cos(), angles.sin()), -1)
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    for ours, theirs in zip(kernels.rotary(query, key, positions, table), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_rotary_leaves_the_other_dimensions_alone() -> None:
    query, key = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    table = torch.randn(5, 8)
    rotated, _ = kernels.rotary(query, key, torch.tensor([0, 4, 2]), table)
    assert torch.equal(rotated[..., 8:], query[..., 8:])
    inner, _ = kernels.rotary(query[..., :8], key[..., :8], torch.tensor([0, 4, 2]), table)
    assert torch.equal(rotated[..., :8], inner)


@pytest.mark.parametrize("theirs", list(ACTIVATIONS))
def test_activations_are_transformers(theirs: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.randn(5, 24)
    torch.testing.assert_close(
        kernels.gated_activation(x, ACTIVATIONS[theirs]), ACT2FN[theirs](x[:, :12]) * x[:, 12:], atol=1e-6, rtol=1e-6
    )


def test_every_activation_is_reachable() -> None:
    assert set(ACTIVATIONS.values()) == set(kernels.ACTIVATIONS)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_with_plain_and_packed_weights(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 40).to(dtype)[:, :33], torch.randn(50, 33).to(dtype)
    bias = torch.randn(50).to(dtype) if with_bias else None
    exact = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-1
    for form in (weight, kernels.pack_weight(weight)):
        found = kernels.linear(x, form, bias)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)


def test_store_kv_writes_its_slots_only() -> None:
    pool = torch.zeros(6, 3, 2, 4, 2, 8)  # blocks of three layers side by side
    cache = pool[:, 1]
    key, value = torch.randn(2, 3, 2, 8)
    kernels.store_kv(key, value, cache, torch.tensor([21, 0, 10]))
    for token, slot in enumerate((21, 0, 10)):
        assert torch.equal(cache[slot // 4, 0, slot % 4], key[token])
        assert torch.equal(cache[slot // 4, 1, slot % 4], value[token])
    cache[5, :, 1] = cache[0, :, 0] = cache[2, :, 2] = 0
    assert not pool.any()
