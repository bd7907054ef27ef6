"""Adapters against PEFT: mixed batches equal each adapter alone, in float32, under every kind of load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir import LLM, LoRARequest
from kvasir.entrypoints.cli.main import main
from kvasir.errors import RequestError
from tests.adapter_builders import (
    GREEDY,
    LORAS,
    PROMPTS,
    TINY_ENGINE,
    TinyAdapter,
    base_model,
    check,
    make_adapter,
    make_base,
)

pytestmark = pytest.mark.slow  # PEFT takes ten seconds to import; test_adapter_engine.py has the fast tests
BIASED = "llama_tied_biases_llama3"
# kinds of adapters, by the model that they are made for
KINDS = [("llama", kind) for kind in (*LORAS, *PROMPTS) if "biases" not in kind and "expert" not in kind]
KINDS += [(BIASED, kind) for kind in ("biases", "dora_biases", "all_linear", "embedding", "head", "prefix_tuning")]
KINDS += [("phi3", "all_linear"), ("phi3", "dora"), ("gpt2", "all_linear"), ("gpt2", "prompt_tuning")]
KINDS += [
    ("gemma2", "all_linear"),
    ("gemma2", "prefix_tuning"),
    ("qwen3", "all_linear"),
    ("falcon_groups", "all_linear"),
]
KINDS += [("mixtral", "experts"), ("mixtral", "down_of_experts"), ("qwen3_moe", "experts"), ("qwen2_moe", "experts")]
KINDS += [("gpt_oss", "experts"), *((name, "expert_stacks") for name in ("olmoe", "llama4", "deepseek_v3"))]
# So few blocks that requests are preempted.
SMALL = {"max_model_len": 64, "max_num_seqs": 8, "num_gpu_blocks_override": 24, "watermark": 0.0}
PROMPT = [3, 5, 7, 9, 11, 13, 17, 19, 23]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_base(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


@pytest.fixture(scope="module")
def mixed(bases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Adapters of several kinds for one model, and the model alone."""
    base, folder = bases("llama"), tmp_path_factory.mktemp("adapters")
    kinds = ("all_linear", "patterns", "dora", "saved_head", "prompt_tuning", "prefix_tuning")
    made: dict[str, Any] = {kind: make_adapter(base, folder / kind, kind, seed=i) for i, kind in enumerate(kinds)}
    for number, adapter in enumerate(made.values()):
        adapter.number = number + 1
    return {"": base_model(base), **made}


def run(llm: LLM, mixed: dict[str, Any], names: list[str], prompts: list[list[int]], **options: Any) -> None:
    asked = [mixed[name].request if name else None for name in names]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, lora_request=asked, use_tqdm=False, **options
    )
    for name, output in zip(names, outputs, strict=True):
        check(mixed[name], output)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_kind_equals_peft(name: str, kind: str, bases: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(bases(name), tmp_path / kind, kind)
    base = base_model(bases(name))
    with LLM(str(bases(name)), **TINY_ENGINE) as llm:
        asked = [None, adapter.request, None, adapter.request]
        prompts = [{"prompt_token_ids": ids} for ids in (PROMPT, PROMPT, PROMPT[:3], PROMPT[2:])]
        outputs = llm.generate(prompts, GREEDY, lora_request=asked, use_tqdm=False)
    for request, output in zip(asked, outputs, strict=True):
        check(base if request is None else adapter, output)
        assert output.lora_request == request


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_loras": 1},
        {**SMALL, "max_loras": 2, "max_num_batched_tokens": 11},
        SMALL,
        {"async_scheduling": True, "enable_prefix_caching": False},
        {**SMALL, "swap_space": 0.01, "preemption_mode": "swap"},
    ],
)
def test_mixed_batches_equal_each_adapter_alone(settings: dict[str, Any], bases: Any, mixed: dict[str, Any]) -> None:
    """Base, several LoRAs and soft prompts, swapped in and out, chunked, preempted and found in the prefix cache."""
    names = list(mixed) * 3
    prompts = [[(7 * i + j) % 90 for j in range(3 + 5 * (i % 5))] for i in range(len(names))]
    with LLM(str(bases("llama")), **{**TINY_ENGINE, **settings}) as llm:
        run(llm, mixed, names, prompts)
        run(llm, mixed, names[::-1], prompts[::-1])
        stats = llm.llm_engine.client.stats()
    assert stats.resource_loads >= len(mixed) - 1
    if "num_gpu_blocks_override" in settings:
        assert stats.preemptions, "the cache was to be too small"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", kind) for kind in ("all_linear", "patterns", "rslora", "dora", "saved_both", "embedding")]
    + [(BIASED, "biases"), (BIASED, "head"), ("phi3", "dora"), ("gpt2", "all_linear")],
)
def test_a_merged_checkpoint_equals_peft(name: str, kind: str, bases: Any, tmp_path: Path) -> None:
    adapter = make_adapter(bases(name), tmp_path / kind, kind)
    assert main(["merge-lora", str(bases(name)), str(adapter.path), "--out", str(tmp_path / "merged")]) == 0
    with LLM(str(tmp_path / "merged"), **{**TINY_ENGINE, "enable_lora": False}) as merged:
        (output,) = merged.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    check(adapter, output)


def test_merging_a_stack_of_experts_is_left_to_peft(
    bases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(bases("mixtral"), tmp_path / "stack", "expert_stacks")
    assert main(["merge-lora", str(bases("mixtral")), str(adapter.path), "--out", str(tmp_path / "merged")]) != 0
    assert "merge_and_unload" in capsys.readouterr().err and not (tmp_path / "merged").exists()


@pytest.fixture(scope="module")
def llm(bases: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(bases("llama")), **TINY_ENGINE) as llm:
        yield llm


def test_a_reload_under_one_name_finds_no_stale_blocks(llm: LLM, bases: Any, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        adapter = make_adapter(bases("llama"), tmp_path / "changing", "all_linear", seed=seed)
        for cached in (False, True):
            prompt = {"prompt_token_ids": PROMPT}
            (output,) = llm.generate(prompt, GREEDY, lora_request=adapter.request, use_tqdm=False)
            check(adapter, output)
            assert bool(output.num_cached_tokens) == cached


def test_users_of_a_soft_prompt_share_its_blocks(llm: LLM, mixed: dict[str, Any]) -> None:
    """6 virtual tokens and prompts that begin differently: the first block of 4 is shared, the prompts are not."""
    for name in ("prompt_tuning", "prefix_tuning"):
        hits = []
        for first in (1, 2):
            run(llm, mixed, [name], [[first, *PROMPT]])
            hits.append(llm.llm_engine.client.stats().prefix_cache_hits)
        assert hits[1] - hits[0] == 4


def test_branches_and_beams_keep_their_adapter(llm: LLM, mixed: dict[str, Any]) -> None:
    from kvasir import BeamSearchParams, SamplingParams

    adapter: TinyAdapter = mixed["all_linear"]
    several = SamplingParams(n=3, temperature=0.001, top_k=1, max_tokens=6, ignore_eos=True, logprobs=0)
    prompt = {"prompt_token_ids": PROMPT}
    (output,) = llm.generate(prompt, several, lora_request=adapter.request, use_tqdm=False)
    assert len({tuple(each.token_ids) for each in output.outputs}) == 1
    check(adapter, output)
    (found,) = llm.beam_search(
        prompt, BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True), lora_request=adapter.request
    )
    best = found.sequences[0]
    import torch

    scores = torch.log_softmax(adapter.logits(best.tokens[:-1], 5), -1)
    total = sum(float(scores[i, token]) for i, token in enumerate(best.tokens[-5:]))
    assert abs(total - best.cum_logprob) < 1e-3


def test_what_is_wrong_is_named(llm: LLM, mixed: dict[str, Any], tmp_path: Path) -> None:
    def refused(request: Any, said: str, **params: Any) -> None:
        with pytest.raises(RequestError, match=said):
            llm.generate(PROMPT, GREEDY if not params else params["sampling"], lora_request=request, use_tqdm=False)

    refused("adapter", "must be a LoRARequest, not str")
    refused(LoRARequest("gone", 1, str(tmp_path / "gone")), "there is no such directory")
    wide = GREEDY.clone()
    wide.prompt_logprobs = 1
    refused(mixed["saved_head"].request, "prompt_logprobs cannot be had", sampling=wide)
    with pytest.raises(RequestError, match="3 prompts but 2 values of lora_request"):
        llm.generate([PROMPT] * 3, GREEDY, lora_request=[None, None], use_tqdm=False)


def test_an_engine_without_adapters_says_so(bases: Any, mixed: dict[str, Any]) -> None:
    settings = {**TINY_ENGINE, "enable_lora": False}
    with LLM(str(bases("llama")), **settings) as plain, pytest.raises(RequestError, match="enable_lora=True"):
        plain.generate(PROMPT, GREEDY, lora_request=mixed["all_linear"].request, use_tqdm=False)
