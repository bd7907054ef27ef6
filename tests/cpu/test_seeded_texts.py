"""Seeded texts on the CPU library, bit by bit: a request's tokens and log-probabilities are the same alone, in a batch,
in chunks, after prefix hits, and when it is preempted; of checkpoints and GGUF files, with windows and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Kind

from kvasir import LLM, SamplingParams
from kvasir.kernels.cpu import library
from tests.cpu.test_gguf import Written
from tests.engine_builders import generate, metric
from tests.model_builders import make_hf_model, save
from tests.native_builders import require_library

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2100,
}
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral_window": {"sliding_window": 90},
    "gemma2": {"sliding_window": 150, "head_dim": 64, "query_pre_attn_scalar": 64},  # in every second layer
}
KINDS = ["BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
SHORT, LONG = [20, 21, 40, 45, 60, 150, 260], [20, 21, 63, 130, 257, 600, 900, 2000]
# Blocks that hold one request of the greatest length, and too few for all prompts.
TIGHT_SHORT, TIGHT_LONG = {"mistral_window": 24, "gemma2": 40}, 135
SHARED = 16  # tokens that all prompts begin with: one block

Text = tuple[Any, Any]  # tokens and log-probabilities
Way = tuple[str, str | None, dict[str, Any]]


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    """The library divides keys over threads only if there are several."""
    require_library()
    before = library.num_threads()
    yield
    library.configure(before)


def checkpoint(name: str, path: Path) -> str:
    return str(save(make_hf_model(name, **(SIZES | WINDOWS.get(name, {}))), path))


def gguf_file(name: str, kind: str, path: Path) -> str:
    def change(writer: Any) -> None:
        if name == "gemma2":
            writer.add_sliding_window(WINDOWS[name]["sliding_window"])
            writer.add_attn_logit_softcapping(3.0)
            writer.add_final_logit_softcapping(5.0)

    return Written(name, name, path / "m.gguf", Kind[kind], change, **(SIZES | WINDOWS.get(name, {}))).path


def opener(path: str, max_model_len: int) -> Callable[..., LLM]:
    fixed: Any = {"dtype": "bfloat16", "skip_tokenizer_init": True, "use_tqdm_on_load": False, "batch_invariant": True}
    usual: Any = {"kv_cache_memory_bytes": 64 << 20, "block_size": 16, "max_num_batched_tokens": 2048, "cpu_threads": 2}
    return lambda **settings: LLM(path, max_model_len=max_model_len, **usual | settings, **fixed)


def ways(blocks: int | None) -> Iterator[Way]:
    """Settings under which requests meet each other, and the counter that shows it. `blocks`: too few for all of them;
    None: nothing is preempted."""
    yield "in a batch", None, {"enable_prefix_caching": False}
    yield "in chunks", None, {"enable_prefix_caching": False, "max_num_batched_tokens": 48}
    yield "after prefix hits", "prefix_cache_hits", {"max_num_batched_tokens": 512}
    if blocks is not None:
        tight = {"num_gpu_blocks_override": blocks, "enable_prefix_caching": False, "max_num_batched_tokens": 128}
        yield "preempted and computed again", "num_preemptions", {**tight, "swap_space": 0}
        yield "preempted and swapped", "num_preemptions", {**tight, "swap_space": 1}


def check(open_llm: Callable[..., LLM], lengths: list[int], blocks: int | None, vocabulary: int = 96) -> None:
    """Each of the prompts alone, and all together in every way."""
    rng = np.random.default_rng(sum(lengths))
    shared = rng.integers(2, vocabulary, SHARED).tolist()
    prompts = [shared + rng.integers(2, vocabulary, n - SHARED).tolist() for n in lengths]
    common: Any = {"max_tokens": 40, "ignore_eos": True, "logprobs": 2, "temperature": 1.0}
    params = [SamplingParams(seed=i, **common, **({"top_p": 0.9} if i % 3 == 2 else {})) for i in range(len(prompts))]

    def texts(outputs: Any) -> list[Text]:
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with open_llm(enable_prefix_caching=False) as llm:
        alone = [text for i in range(len(prompts)) for text in texts(generate(llm, prompts[i : i + 1], params[i]))]
    for way, counter, settings in ways(blocks):
        with open_llm(**settings) as llm:
            for _ in range(2 if counter == "prefix_cache_hits" else 1):  # the second time hits whole prompts
                for i, text in enumerate(texts(generate(llm, prompts, params))):
                    assert text == alone[i], f"{way}: the prompt of {lengths[i]} tokens has another text than alone"
            assert counter is None or metric(llm, counter) > 0, f"{way}: {counter} is 0"


def check_model(name: str, path: str) -> None:
    """Models with windows need so few blocks that only short prompts in a short context preempt each other."""
    check(opener(path, 2048), LONG, None if name in WINDOWS else TIGHT_LONG)
    if name in WINDOWS:
        check(opener(path, 300), SHORT, TIGHT_SHORT[name])


def test_short_prompts(tmp_path: Path) -> None:
    check(opener(gguf_file("gemma2", "Q4_K", tmp_path), 300), SHORT, TIGHT_SHORT["gemma2"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", *WINDOWS])
def test_checkpoints(name: str, tmp_path: Path) -> None:
    check_model(name, checkpoint(name, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [*(("llama", kind) for kind in KINDS), *(("gemma2", kind) for kind in ("BF16", "Q8_0", "Q6_K"))]
)
def test_gguf_files(name: str, kind: str, tmp_path: Path) -> None:
    check_model(name, gguf_file(name, kind, tmp_path))


@pytest.mark.slow
def test_a_real_model(starter_model: Path) -> None:
    check(opener(str(starter_model), 1024), [900, 64, 20, 257], 69, vocabulary=40_000)
