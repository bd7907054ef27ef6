"""Logits on the CPU library, bit by bit: a text's are the same alone, in a batch, in chunks, token by token, after a
prefix hit, and when a preempted request is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.errors import ConfigError
from kvasir.kernels.cpu import library
from kvasir.models.loader import load
from tests.engine_builders import metric
from tests.model_builders import Held, PagedModel, make_config, make_hf_model, save
from tests.native_builders import SETS, require_library
from tests.pairwise import few

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2100,
}
# whole steps, all layers with windows, every second one with windows and soft caps, layer by layer, and a latent cache
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral_window": {"sliding_window": 90},
    "gemma2": {"sliding_window": 150, "head_dim": 64},
    "mixtral": {},
    "deepseek_v3": {"kv_lora_rank": 40, "moe_intermediate_size": 64},
}
FILES = ["Q4_K", "Q8_0"]
Loader = Callable[[str], Any]


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    library.use_instruction_set(request.param)
    yield request.param
    library.use_instruction_set(SETS[0])


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    """The library divides keys over threads only if there are several."""
    require_library()
    before = library.num_threads()
    library.configure(2)
    yield
    library.configure(before)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """The model of an architecture in bfloat16, or of a GGUF file of a type."""
    require_library()
    models: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in models:
            path = tmp_path_factory.mktemp(name)
            models[name] = load_file(name, path) if name in FILES else load_checkpoint(name, path)
        return models[name]

    return get


def load_checkpoint(name: str, path: Path) -> Any:
    save(make_hf_model(name, **(SIZES | CHECKPOINTS[name])), path)
    return load(make_config(path, "cpu", dtype="bfloat16", max_model_len=2100), torch.device("cpu"))


def load_file(kind: str, path: Path) -> Any:
    gguf = pytest.importorskip("gguf")
    from tests.cpu.test_gguf import Written
    from tests.cpu.test_gguf_native import load_file as load_gguf

    written = Written("llama", "llama", path / "m.gguf", gguf.GGMLQuantizationType[kind], **SIZES)
    return load_gguf(written.path)


def ways(model: Any, length: int, **cache: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The same text computed in different ways: the way, the first token, and the logits from there on. The first way
    is the whole text alone."""
    rng = np.random.default_rng(length)
    text, *others = (rng.integers(2, 96, n).tolist() for n in (length, *rng.integers(1, length, 7)))

    def fresh() -> PagedModel:
        return PagedModel(model, num_blocks=2200, **cache)

    yield "alone", 0, fresh().step({"text": text})["text"]
    batch = {str(number): other for number, other in enumerate(others)}
    yield "in a batch", 0, fresh().step({**batch, "text": text})["text"]
    for size in (33, 100, 256):
        paged = fresh()
        chunks = [paged.step({"text": text[at : at + size]})["text"] for at in range(0, length, size)]
        yield f"in chunks of {size}", 0, torch.cat(chunks)
    paged, begin = fresh(), max(1, length - 30)
    paged.step({"text": text[:begin], **batch})
    decodes = [paged.step({"text": [token], **{key: [5] for key in batch}})["text"] for token in text[begin:]]
    yield "token by token in a batch", begin, torch.cat(decodes)
    paged, begin = fresh(), length // 2 // 4 * 4
    paged.step({"other": text[:begin] + others[0]})
    paged.sequences["text"] = Held(begin, paged.sequences["other"].blocks[: begin // 4])
    yield "after a prefix hit", begin, paged.step({"text": text[begin:]})["text"]


def check(model: Any, length: int, **cache: Any) -> None:
    every = ways(model, length, **cache)
    wanted = next(every)[2]
    for way, begin, got in every:
        differ = (got != wanted[begin:]).any(dim=1).sum()
        assert differ == 0, f"{way}, {differ} of {len(got)} tokens have other logits than alone"


@pytest.mark.parametrize("name", [*CHECKPOINTS, *FILES])
@pytest.mark.parametrize("length", [20, 600, pytest.param(2000, marks=pytest.mark.slow)])
def test_logits(name: str, length: int, loaded: Loader) -> None:
    check(loaded(name), length)


@pytest.mark.parametrize("instruction_set", SETS[1:], indirect=True)
@pytest.mark.parametrize("name", few([*CHECKPOINTS, *FILES], fast=["gemma2"]))
def test_logits_by_lesser_instruction_sets(name: str, instruction_set: str, loaded: Loader) -> None:
    check(loaded(name), 300)


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_logits_with_an_8_bit_cache(name: str, loaded: Loader) -> None:
    check(loaded(name), 300, kv_dtype=torch.int8)


@pytest.mark.parametrize("quantization", few(["int8", "int4", "fp8", "fp8_block"], fast=["int4"]))
@pytest.mark.parametrize("name", few(["llama", "gemma2", "mixtral", "deepseek_v3"], fast=["gemma2"]))
def test_logits_of_weights_quantized_at_load(name: str, quantization: str, tmp_path: Path) -> None:
    save(make_hf_model(name, **(SIZES | CHECKPOINTS[name])), tmp_path)
    config = make_config(tmp_path, "cpu", dtype="bfloat16", max_model_len=2100, quantization=quantization)
    check(load(config, torch.device("cpu")), 300)


@pytest.mark.parametrize(
    ("name", "blocks", "quantization"),
    [
        ("llama", 60, None),
        ("gemma2", 75, None),
        ("deepseek_v3_halves", 60, None),
        pytest.param("mixtral", 60, None, marks=pytest.mark.slow),
        pytest.param("llama", 60, "int8", marks=pytest.mark.slow),
        pytest.param("llama", 60, "int4", marks=pytest.mark.slow),
    ],
)
def test_log_probabilities_under_load(name: str, blocks: int, quantization: str | None, tmp_path: Path) -> None:
    """Requests alone, and all together in small chunks with too few blocks for them and prefixes that are cached."""
    path = save(make_hf_model(name, **(SIZES | CHECKPOINTS.get(name, {}))), tmp_path)
    rng = np.random.default_rng(0)
    shared = rng.integers(2, 96, 64).tolist()
    prompts: Any = [shared + rng.integers(2, 96, int(n)).tolist() for n in rng.integers(1, 250, 8)]
    greedy: Any = {"max_tokens": 40, "ignore_eos": True, "logprobs": 3, "temperature": 0.0}
    params = [SamplingParams(**greedy | ({"temperature": 1.0, "seed": i} if i % 2 else {})) for i in range(8)]
    settings: Any = {"dtype": "bfloat16", "max_model_len": 512, "skip_tokenizer_init": True, "use_tqdm_on_load": False}
    settings |= {"batch_invariant": True, "quantization": quantization}
    with LLM(str(path), kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False, **settings) as llm:
        alone = [llm.generate([each], own, use_tqdm=False)[0] for each, own in zip(prompts, params, strict=True)]
    tight = {"num_gpu_blocks_override": blocks, "block_size": 16, "max_num_batched_tokens": 48, "swap_space": 0}
    with LLM(str(path), **tight, **settings) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        assert metric(llm, "num_preemptions") > 0 and metric(llm, "prefix_cache_hits") > 0
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_a_layer_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a plugin's. A latent cache is taken, but not one of 8 bits, over which torch attends."""
    path = save(make_hf_model("deepseek_v3"), tmp_path)
    settings: Any = {"dtype": "bfloat16", "max_model_len": 64, "skip_tokenizer_init": True, "use_tqdm_on_load": False}
    settings |= {"batch_invariant": True, "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(path), **settings):
        pass
    with pytest.raises(ConfigError, match="batch_invariant=True: .* attention_backend='torch'"):
        LLM(str(path), kv_cache_dtype="fp8", **settings)
    monkeypatch.setattr("kvasir.models.native.LatentAttention", None)
    with pytest.raises(ConfigError, match=r"batch_invariant=True: the model's layer 0 \(DecoderLayer\) rounds"):
        LLM(str(path), **settings)
