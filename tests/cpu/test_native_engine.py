"""The engine on the CPU library with a real model: the same text as on plain torch, and a cache of 8 bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir import LLM, RequestOutput, SamplingParams, kernels
from kvasir.kernels.cpu import library
from kvasir.models.native import LayerByLayer, NativeDecoder
from tests.cpu.test_starter import QUESTIONS
from tests.model_builders import make_hf_model, save
from tests.native_builders import require_library
from tests.pairwise import few

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Water boils at"]
NEAR = 0.26  # two steps of bfloat16 between logits of 16 and 32; torch parts from itself at such tokens, too


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Later tests in this process would be slow with more threads than there are cores."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def generate(model: Path, prompts: list[str] = PROMPTS, length: int = 16, **settings: Any) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=length, temperature=0, logprobs=2, ignore_eos=True)
    with LLM(str(model), max_model_len=256, use_tqdm_on_load=False, kv_cache_memory_bytes=64 << 20, **settings) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("count", few([2, 20], fast=[2]))
def test_greedy_text_equals_plain_torch(starter_model: Path, count: int) -> None:
    """Texts of forty tokens, both in bfloat16. Where two tokens are equally good as far as bfloat16 can tell,
    either may stand, and what follows is then its own: torch does not agree with itself there either, from one batch
    to another. Everywhere else the tokens are the same."""
    require_library()
    with kernels.reference_only():
        theirs = generate(starter_model, QUESTIONS[:count], 40, attention_backend="torch")
    ours = generate(starter_model, QUESTIONS[:count], 40, attention_backend="cpu", quantization="none")
    compared = 0
    for one, other in zip(ours, theirs, strict=True):
        mine, wanted = one.outputs[0].token_ids, other.outputs[0].token_ids
        differ = next((at for at, pair in enumerate(zip(mine, wanted, strict=True)) if pair[0] != pair[1]), None)
        compared += len(wanted) if differ is None else differ
        if differ is not None:
            assert other.outputs[0].logprobs is not None
            best, second = sorted(score.logprob for score in other.outputs[0].logprobs[differ].values())[::-1][:2]
            assert best - second < NEAR, f"{one.prompt!r} parts at token {differ}, where the best stands out"
    assert compared > count * 40 / 2, "most of it was compared"


@pytest.mark.parametrize("count", few([3, 16], fast=[3]))
def test_several_at_once_say_what_each_says_alone(starter_model: Path, count: int) -> None:
    """As the file has its weights, which is how it is served."""
    require_library()
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(str(starter_model), max_model_len=256, use_tqdm_on_load=False, kv_cache_memory_bytes=64 << 20) as llm:
        together = llm.generate(QUESTIONS[:count], params, use_tqdm=False)
        llm.reset_prefix_cache()
        alone = [llm.generate([question], params, use_tqdm=False)[0] for question in QUESTIONS[:count]]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_threads_stay_where_they_are_bound_until_the_engine_is_closed(tmp_path: Path) -> None:
    require_library()
    path = str(save(make_hf_model("qwen2"), tmp_path))
    settings: Any = {"dtype": "bfloat16", "max_model_len": 64, "skip_tokenizer_init": True}
    settings |= {"kv_cache_memory_bytes": 8 << 20, "use_tqdm_on_load": False}
    before = os.sched_getaffinity(0)
    for cpu in sorted(before)[:2]:
        with LLM(path, cpu_bind=str(cpu), **settings) as llm:
            assert os.sched_getaffinity(0) == {cpu} and llm.llm_engine.config.device.cpu_threads == 1
        assert os.sched_getaffinity(0) == before
    with LLM(path, cpu_bind="0-1", **settings):
        others = [os.sched_getaffinity(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]
        assert {0} in others or {1} in others, "the library's thread is pinned to one of them"


@pytest.mark.parametrize(
    "settings",
    few(
        [{"dtype": "float32"}, {"dtype": "bfloat16", "attention_backend": "torch"}],
        fast=[{"dtype": "bfloat16", "attention_backend": "torch"}],
    ),
    ids=str,
)
def test_all_threads_are_as_many_as_were_asked_for(starter_model: Path, settings: dict[str, Any]) -> None:
    """The library's too, which computes norms and samples even where torch attends."""
    require_library()
    for threads in (3, 1):
        generate(starter_model, PROMPTS[:1], 2, cpu_threads=threads, **settings)
        assert library.num_threads() == torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "settings", few([{}, {"kv_cache_dtype": "int8"}, {"cpu_threads": 3}], fast=[{"kv_cache_dtype": "int8"}]), ids=str
)
def test_a_gguf_file_runs_as_it_is(starter_model: Path, settings: dict[str, Any]) -> None:
    require_library()
    outputs = generate(starter_model, **settings)
    assert "Paris" in outputs[0].outputs[0].text
    assert "100" in outputs[2].outputs[0].text


@pytest.mark.parametrize(("name", "kind"), [("qwen2", NativeDecoder), ("mixtral", LayerByLayer)])
def test_torch_keeps_to_one_thread_in_steps_and_only_there(
    name: str, kind: type[NativeDecoder | LayerByLayer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_library()
    seen: set[int] = set()
    forward = kind.forward

    def watched(*args: Any) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return forward(*args)

    monkeypatch.setattr(kind, "forward", watched)
    path = save(make_hf_model(name), tmp_path)
    settings = {"dtype": "bfloat16", "max_model_len": 64, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(path), cpu_threads=3, use_tqdm_on_load=False, **settings) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=3, detokenize=False), use_tqdm=False)
    assert seen == {1} and torch.get_num_threads() == 3
