"""The comparison of tests/gpu/test_real_shapes.py, on the CPU: small shapes, float32. It passes, and it can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir import LLM
from tests.model_builders import SIZES
from tests.teacher_forced import Load, Reference, Said, compare, make_reference, scaled, speak, watch_steps

# What tests/gpu/test_real_shapes.py runs, in small.
LOADS = {
    "one": Load([7]),
    "eight": Load([1, 5, 9, 17, 30, 31, 32, 33], max_tokens=6),
    "mixed": Load([20, 3, 40, 11, 25], settings={"max_num_batched_tokens": 16}),
    "shared": Load([3, 9, 1], shared=40),
}
SHAPE = {**SIZES, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
SETTINGS = {"device": "cpu", "cpu_threads": 1, "dtype": "float32", "block_size": 16, "max_model_len": 128}
SETTINGS |= {"kv_cache_memory_bytes": 16 << 20}


def make_checkpoint(kind: str, path: Path) -> tuple[Reference, Path]:
    """Weights are numbers of bfloat16, so that an engine has the same ones in float32 and in bfloat16."""
    exact = make_reference(kind, "cpu", torch.bfloat16, **SHAPE)
    exact.model.save_pretrained(path)
    return exact, path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


def open_llm(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **{**SETTINGS, **settings})


@pytest.mark.parametrize(("kind", "name"), [*(("qwen3", name) for name in LOADS), ("llama", "mixed")])
def test_an_engine_says_what_transformers_says(kind: str, name: str, tmp_path: Path) -> None:
    exact, path = make_checkpoint(kind, tmp_path)
    load = LOADS[name]
    with open_llm(path, **load.settings) as llm:
        steps = watch_steps(llm)
        said = speak(llm, load.prompts(96), load.max_tokens)
        unscored = speak(llm, load.prompts(96), load.max_tokens, scored=False)
    found = compare(said, exact)
    found.check()
    assert len(found.gaps) == len(load.lengths) * load.max_tokens and len(found.errors) >= 16 * len(found.gaps)
    assert found.gaps.max() == 0, "in float32 nothing is near enough to be a tie here"
    assert [one.tokens for one in unscored] == [one.tokens for one in said]
    compare(unscored, exact).check()
    assert max(step.rows for step in steps) == len(load.lengths)
    assert name != "mixed" or any(step.is_mixed for step in steps)


def test_a_cache_of_8_bits_is_judged_by_a_reference_with_one(checkpoint: tuple[Reference, Path]) -> None:
    exact, path = checkpoint
    load = LOADS["mixed"]
    with open_llm(path, kv_cache_dtype="fp8_e4m3", attention_backend="torch", **load.settings) as llm:
        said = speak(llm, load.prompts(96), load.max_tokens)
    # A key that is computed a little otherwise may round to a neighbour: this is rare in float32, and small.
    found = compare(said, replace(exact, kv_dtype=torch.float8_e4m3fn))
    assert found.errors.abs().median() < 1e-5 and found.errors.abs().max() < 0.05
    with pytest.raises(AssertionError, match="too far off|no near-tie"):
        compare(said, exact).check()


@pytest.fixture(scope="module")
def said(checkpoint: tuple[Reference, Path]) -> list[Said]:
    with open_llm(checkpoint[1]) as llm:
        return speak(llm, LOADS["eight"].prompts(96), 6)


@pytest.mark.parametrize("weight", ["self_attn.o_proj", "self_attn.k_norm", "mlp.down_proj", "input_layernorm"])
def test_a_weight_that_differs_a_little_is_seen(
    checkpoint: tuple[Reference, Path], said: list[Said], weight: str
) -> None:
    exact = checkpoint[0]
    with scaled(exact, weight, 1.05), pytest.raises(AssertionError, match="too far off|no near-tie"):
        compare(said, exact).check()
    compare(said, exact).check()


def test_a_wrong_token_is_seen(checkpoint: tuple[Reference, Path], said: list[Said]) -> None:
    wrong = replace(said[0], tokens=[(said[0].tokens[0] + 1) % 96, *said[0].tokens[1:]], logprobs=None)
    with pytest.raises(AssertionError, match="no near-tie"):
        compare([*said[1:], wrong], checkpoint[0]).check()


def test_16_bits_are_judged_by_what_rounding_does(checkpoint: tuple[Reference, Path]) -> None:
    """An engine that is as far off as transformers in bfloat16 passes; one that is three times as far does not."""
    exact, path = checkpoint
    rounded = exact.rounded(torch.bfloat16)
    with open_llm(path, dtype="bfloat16") as llm:
        said = speak(llm, LOADS["eight"].prompts(96), 6)
    found = compare(said, exact, rounded)
    found.check()
    assert found.noise.abs().max() > 1e-3, "bfloat16 was to be seen"
    with pytest.raises(AssertionError, match="too far off|no near-tie"):
        compare(said, exact).check()
    with pytest.raises(AssertionError, match="too far off"):
        replace(found, errors=found.errors * 3).check()
