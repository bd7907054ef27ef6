"""Within `precompile` nothing new is launched, and everything is compiled afterwards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402

from kvasir import LLM, SamplingParams, kernels  # noqa: E402
from kvasir.kernels.triton.launch import THREADS  # noqa: E402
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
    with kernels.precompile():
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

    with kernels.precompile():
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    assert x.tolist() == [3] * 4


def test_what_the_compiler_says_is_raised() -> None:
    x = torch.zeros(4, device="cuda")
    with pytest.raises(triton.CompilationError, match="no such value"), kernels.precompile():
        _broken_kernel[(4,)](x, VALUE=1)
    assert knobs.runtime.jit_cache_hook is None


def test_a_start_compiles_all_kernels_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(make_hf_model("qwen3", hidden_size=320, num_attention_heads=6, head_dim=64), tmp_path)
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(2, 96, 3).tolist()} for _ in range(20)]
    compiled: list[tuple[str, bool]] = []  # kernel, and whether in a thread for that

    def note(*, fn: Any, **_: Any) -> None:
        compiled.append((fn.name.rpartition(".")[2], threading.current_thread().name.startswith(THREADS)))

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    with LLM(
        str(path), dtype="bfloat16", max_model_len=1024, hf_overrides={"max_position_embeddings": 1024},
        kv_cache_memory_bytes=64 << 20, max_num_seqs=32,
        skip_tokenizer_init=True, use_tqdm_on_load=False,
    ) as llm:  # fmt: skip
        alone = [name for name, in_thread in compiled if not in_thread]  # found out while graphs were captured
        assert len(compiled) > 20 and len(alone) < 6, alone
        compiled.clear()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert not compiled, "while requests waited"
