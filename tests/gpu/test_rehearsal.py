"""Within a rehearsal nothing new is launched, and everything is compiled afterwards, or in the background."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402

from kvasir import LLM, SamplingParams, kernels  # noqa: E402
from kvasir.kernels.triton.rehearsal import THREADS  # noqa: E402
from tests.model_builders import make_hf_model, save  # noqa: E402

pytestmark = pytest.mark.gpu


@triton.jit
def _fill_kernel(x_ptr, VALUE: tl.constexpr):
    tl.store(x_ptr + tl.program_id(0), VALUE)


@triton.jit
def _broken_kernel(x_ptr, VALUE: tl.constexpr):
    tl.static_assert(VALUE == 0, "no such value")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled or read from disk."""
    names: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: names.append(fn.name))
    return names


def test_launches_wait_for_the_premiere(compiled: list[str]) -> None:
    x = torch.zeros(4, device="cuda")
    with kernels.rehearsal():
        _fill_kernel[(4,)](x, VALUE=1)
        _fill_kernel[(4,)](x, VALUE=2)
        _fill_kernel[(4,)](x, VALUE=1)
        assert torch.empty(3, device="cuda", dtype=torch.int32).tolist() == [0, 0, 0]
        assert torch.empty_like(x).tolist() == [0] * 4
    assert x.tolist() == [0] * 4 and len(compiled) == 2
    _fill_kernel[(4,)](x, VALUE=2)
    assert x.tolist() == [2] * 4 and len(compiled) == 2, "it was compiled again"


def test_other_threads_launch_what_they_like() -> None:
    x = torch.zeros(4, device="cuda")

    def launch() -> None:
        _fill_kernel[(4,)](x, VALUE=3)

    with kernels.rehearsal():
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    assert x.tolist() == [3] * 4


def test_what_the_compiler_says_is_raised() -> None:
    x = torch.zeros(4, device="cuda")
    with pytest.raises(triton.CompilationError, match="no such value"), kernels.rehearsal():
        _broken_kernel[(4,)](x, VALUE=1)
    assert knobs.runtime.jit_cache_hook is None


def wait_for_the_background() -> None:
    for thread in threading.enumerate():
        if thread.name == THREADS:
            thread.join()


def test_in_the_background(compiled: list[str]) -> None:
    x = torch.zeros(4, device="cuda")
    with kernels.rehearsal(wait=False):
        _fill_kernel[(4,)](x, VALUE=4)
        _broken_kernel[(4,)](x, VALUE=2)  # what cannot be compiled is told to whoever launches it
    wait_for_the_background()
    assert x.tolist() == [0] * 4 and len(compiled) == 1
    _fill_kernel[(4,)](x, VALUE=4)
    assert x.tolist() == [4] * 4 and len(compiled) == 1, "it was compiled again"
    with pytest.raises(triton.CompilationError, match="no such value"):
        _broken_kernel[(4,)](x, VALUE=2)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_batches_find_their_kernels(name: str, tmp_path: Path, compiled: list[str]) -> None:
    path = save(make_hf_model(name, hidden_size=256, num_attention_heads=4, head_dim=64), tmp_path)
    rng = np.random.default_rng(0)
    with LLM(
        str(path), dtype="bfloat16", max_model_len=128, kv_cache_memory_bytes=256 << 20, max_num_seqs=64,
        skip_tokenizer_init=True, use_tqdm_on_load=False,
    ) as llm:  # fmt: skip
        wait_for_the_background()
        before = len(compiled)
        for count in (1, 2, 3, 8, 20, 64):
            prompts = [{"prompt_token_ids": rng.integers(2, 96, int(n)).tolist()} for n in rng.integers(1, 40, count)]
            params = SamplingParams(temperature=count % 2, top_p=0.9, max_tokens=12, ignore_eos=True)
            llm.generate(prompts, params, use_tqdm=False)
        assert before > 0 and compiled[before:] == [], "these were compiled while requests waited"
