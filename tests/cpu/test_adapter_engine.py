"""Adapters in an engine, against transformers with the adapter merged into its weights: fast, and on more than one
process, quantized and GGUF models."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvasir import LLM, LoRARequest, SamplingParams, StructuredOutputsParams, kernels
from kvasir.lora.device import tensors_of
from kvasir.models import loader, native
from kvasir.quantization.coded import int8
from kvasir.quantization.coded_linear import CodedMethods, Quantizer
from tests.adapter_builders import GREEDY, TINY_ENGINE, check, write_files, write_lora
from tests.engine_builders import metric, tokens
from tests.gguf_builders import write_model
from tests.grammars import small_tokenizer
from tests.model_builders import make_hf_model, save
from tests.native_builders import require_library

PROMPTS = [[(7 * i + j) % 90 for j in range(3 + 4 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_hf_model("llama")
    model.path = save(model, tmp_path_factory.mktemp("base"))
    return model


@pytest.fixture(scope="module")
def merged(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Models with adapters merged in, by the adapters' paths; and the model alone."""
    folder = tmp_path_factory.mktemp("adapters")
    return {"": model, **{str(folder / f"a{seed}"): write_lora(model, folder / f"a{seed}", seed) for seed in range(5)}}


def asked(names: list[str]) -> list[LoRARequest | None]:
    return [LoRARequest(Path(name).name, 1, name) if name else None for name in names]


def write_expert_lora(model: Any, path: Path, rank: int = 3) -> Any:
    """As PEFT wrote adapters of experts while transformers kept each expert's matrices apart: a LoRA for each, here of
    every other expert. Returns a copy of transformers' Mixtral with them merged in."""
    generator, tensors, merged = torch.Generator().manual_seed(5), {}, deepcopy(model)
    for number, layer in enumerate(merged.model.layers):
        experts = layer.mlp.experts
        inner = experts.down_proj.shape[2]
        for expert in range(0, len(experts.down_proj), 2):
            both, down = experts.gate_up_proj.data[expert], experts.down_proj.data[expert]
            for name, matrix in (("w1", both[:inner]), ("w3", both[inner:]), ("w2", down)):
                module = f"base_model.model.model.layers.{number}.block_sparse_moe.experts.{expert}.{name}"
                a = torch.randn(rank, matrix.shape[1], generator=generator) * 0.4
                b = torch.randn(matrix.shape[0], rank, generator=generator) * 0.4
                tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
                matrix += 2 * b @ a
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["w1", "w2", "w3"]}
    write_files(path, tensors, config)
    return merged


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A mixture of experts, alone and with an adapter of its experts merged in; as `merged`."""
    model, folder = make_hf_model("mixtral", num_local_experts=4), tmp_path_factory.mktemp("mixture")
    model.path = save(model, folder / "base")
    return {"": model, str(folder / "lora"): write_expert_lora(model, folder / "lora")}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_experts(mixture: dict[str, Any], settings: dict[str, Any]) -> None:
    names = [*mixture, *mixture]
    with LLM(str(mixture[""].path), **{**TINY_ENGINE, **settings}) as llm:
        outputs = llm.generate(prompts_for(names), GREEDY, lora_request=asked(names), use_tqdm=False)
    for name, output in zip(names, outputs, strict=True):
        check(mixture[name], output)


@pytest.mark.parametrize(("quantization", "tolerance"), [(None, 0.5), ("int8", 1.5)])
def test_adapters_of_packed_experts(mixture: dict[str, Any], quantization: str | None, tolerance: float) -> None:
    require_library()
    base, name = mixture
    settings = {**TINY_ENGINE, "dtype": "bfloat16", "attention_backend": "cpu", "block_size": 16}
    with LLM(str(mixture[""].path), **settings, quantization=quantization) as llm:
        outputs = llm.generate(prompts_for([base, name]), GREEDY, lora_request=asked([base, name]), use_tqdm=False)
    check(mixture[name], outputs[1], tolerance)
    with pytest.raises(AssertionError, match="likeliest|logprob"):
        check(mixture[base], outputs[1], tolerance)


@pytest.mark.parametrize(("quantize", "tolerance"), [(int8, 0.5), (None, 2e-4)])
def test_adapters_of_experts_by_the_methods_of_a_gpu(
    quantize: Quantizer | None, tolerance: float, mixture: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are codes, and such as are expanded, because the checkpoint does not quantize them."""
    monkeypatch.setattr(loader, "Unquantized", lambda: CodedMethods(quantize))
    base, name = mixture
    with LLM(str(mixture[""].path), **TINY_ENGINE) as llm:
        core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
        experts = core.executor.model.layers[0].mlp.experts
        assert bool(experts.stacks) == (quantize is not None)
        outputs = llm.generate(prompts_for([base, name]), GREEDY, lora_request=asked([base, name]), use_tqdm=False)
        (change,) = experts.slots.changes.values()
    check(mixture[name], outputs[1], tolerance)
    with pytest.raises(AssertionError, match="likeliest|logprob"):
        check(mixture[base], outputs[1], tolerance)
    # Where the model's own experts are computed by other kernels, one for adapters would first be compiled here.
    monkeypatch.setattr(kernels, "_version_for", lambda x: pytest.fail("a kernel is launched"))
    chosen = torch.tensor([[0, 1], [2, 0]])
    with torch.inference_mode():
        changed = experts._changed(change, torch.randn(2, experts.shape.hidden_size), torch.ones(2, 2), chosen)
    assert changed.isfinite().all()


@pytest.fixture(scope="module")
def llm(model: Any) -> Iterator[LLM]:
    with LLM(str(model.path), **{**TINY_ENGINE, "max_loras": 2, "max_num_batched_tokens": 9, "max_num_seqs": 4}) as llm:
        yield llm


def prompts_for(names: list[str]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": PROMPTS[i % len(PROMPTS)]} for i in range(len(names))]


def test_more_adapters_than_slots_in_one_batch(llm: LLM, merged: dict[str, Any]) -> None:
    names = [*merged, *reversed(merged)]
    outputs = llm.generate(prompts_for(names), GREEDY, lora_request=asked(names), use_tqdm=False)
    for name, output in zip(names, outputs, strict=True):
        check(merged[name], output)
    core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
    stats = core.stats()
    assert stats.resource_loads >= 5 and stats.resource_evictions >= 3 and core.executor.runner.stats.changed_steps
    assert core.executor.adapters.store.num_read == 5  # the others came from host memory


@pytest.mark.parametrize("method", ["suffix", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_drafts_leave_the_texts_of_adapters_as_they_are(
    llm: LLM, model: Any, merged: dict[str, Any], method: str
) -> None:
    drafting = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "draft_model":
        drafting["model"] = str(model.path)
    names = [*merged, *merged]
    prompts: Any = [{"prompt_token_ids": (PROMPTS[i % 4][:3] * 9)[: 12 + i]} for i in range(len(names))]
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=24, ignore_eos=True)
    wanted = llm.generate(prompts, params, lora_request=asked(names), use_tqdm=False)
    settings = {**TINY_ENGINE, "max_loras": 2, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    with LLM(str(model.path), **settings, speculative_config=drafting) as drafts:
        outputs = drafts.generate(prompts, params, lora_request=asked(names), use_tqdm=False)
        assert metric(drafts, "spec_decode_num_accepted_tokens") > 0
    assert tokens(outputs) == tokens(wanted)
    assert len({tuple(each.outputs[0].token_ids[:8]) for each in wanted[: len(merged)]}) > 3, "adapters differ"


def test_penalties_do_not_see_the_ids_of_a_soft_prompt(llm: LLM, model: Any, tmp_path: Path) -> None:
    """All prefer the token with id 0, which fills the places of the soft prompt and must not be penalised for that."""
    table = torch.randn(6, 32) * 0.3
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 6}
    path = write_files(tmp_path / "soft", {"prompt_embeddings": table}, config)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, repetition_penalty=5.0, logit_bias={0: 100})
    prompt = {"prompt_token_ids": [5, 6, 7]}
    (output,) = llm.generate(prompt, params, lora_request=asked([str(path)])[0], use_tqdm=False)
    assert output.outputs[0].token_ids[0] == 0 and output.prompt_token_ids == [5, 6, 7]
    with torch.inference_mode():
        embeddings = torch.cat((table, model.get_input_embeddings()(torch.tensor([5, 6, 7]))))[None]
        logits = model(inputs_embeds=embeddings).logits[0, -1]
    plain = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0)
    (output,) = llm.generate(prompt, plain, lora_request=asked([str(path)])[0], use_tqdm=False)
    token = output.outputs[0].token_ids[0]
    found = output.outputs[0].logprobs[0][token].logprob
    assert token == int(logits.argmax()) and abs(found - float(logits.log_softmax(-1)[token])) < 1e-4


def write_head(model: Any, path: Path, seed: int) -> Any:
    """Write an adapter that brings a head of its own (modules_to_save), and return a copy of the model with it."""
    merged = deepcopy(model)
    merged.lm_head.weight.data = torch.randn(merged.lm_head.weight.shape, generator=torch.Generator().manual_seed(seed))
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "modules_to_save": ["lm_head"]}
    made = write_files(path.with_name("made"), {"base_model.model.lm_head.weight": merged.lm_head.weight.data}, config)
    path.mkdir(exist_ok=True)
    for file in made.iterdir():
        (path / file.name).write_bytes(file.read_bytes())  # in place, as `cp` does
    return merged


def test_a_file_that_is_overwritten_changes_nothing_that_runs(llm: LLM, model: Any, tmp_path: Path) -> None:
    path, engine = tmp_path / "head", llm.llm_engine
    first = write_head(model, path, 1)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    engine.add_request("runs", prompt, GREEDY, lora_request=asked([str(path)])[0])
    outputs = {}
    while not outputs:
        outputs = {each.request_id: each for each in engine.step() if each.outputs[0].token_ids}
    second = write_head(model, path, 2)
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each for each in engine.step()}
    check(first, outputs["runs"])
    (output,) = llm.generate(prompt, GREEDY, lora_request=asked([str(path)])[0], use_tqdm=False)
    check(second, output)


def test_an_adapter_that_changes_before_it_is_loaded_is_not_taken_for_the_old_one(
    llm: LLM, model: Any, tmp_path: Path
) -> None:
    """A request that came before the change ends with an error. Otherwise the new weights would be known by the hash of
    the old ones, with cached blocks and in host memory."""
    path, engine = tmp_path / "early", llm.llm_engine
    old = write_head(model, path, 3)
    prompt = {"prompt_token_ids": PROMPTS[1]}
    engine.add_request("early", prompt, GREEDY, lora_request=asked([str(path)])[0])
    write_head(model, path, 4)
    ended: list[Any] = []
    while engine.has_unfinished_requests():
        ended += [each for each in engine.step() if each.finished]
    assert [each.outputs[0].finish_reason for each in ended] == ["error"]
    write_head(model, path, 3)
    (output,) = llm.generate(prompt, GREEDY, lora_request=asked([str(path)])[0], use_tqdm=False)
    check(old, output)


DRAFTERS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False},
}


@pytest.mark.parametrize("method", ["ngram", pytest.param("suffix", marks=pytest.mark.slow)])
def test_drafts_and_adapters(method: str, model: Any, merged: dict[str, Any]) -> None:
    """Texts with drafts are those of each adapter, over more adapters than slots and with chunked prompts."""
    names = list(merged)
    settings = {**TINY_ENGINE, "max_loras": 2, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    prompts = [{"prompt_token_ids": [5, 6, 7 + i % 3] * 4} for i in range(len(names))]
    params = GREEDY.clone()
    params.max_tokens = 24
    with LLM(str(model.path), **settings, speculative_config=DRAFTERS[method]) as llm:
        outputs = llm.generate(prompts, params, lora_request=asked(names), use_tqdm=False)
        assert metric(llm, "spec_decode_num_accepted_tokens") > 0
    for name, output in zip(names, outputs, strict=True):
        check(merged[name], output)


@pytest.mark.slow
def test_constraints_and_drafts_and_adapters(tmp_path: Path) -> None:
    """Constrained texts are those of the merged model under the same constraint, with drafts and without."""
    model = make_hf_model("llama", vocab_size=512)
    models = {"": model, "lora": write_lora(model, tmp_path / "lora", 3)}
    for name, each in models.items():
        small_tokenizer().save(str(save(each, tmp_path / f"model{name}") / "tokenizer.json"))
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=StructuredOutputsParams(regex=regex))
        for regex in ("[a-c]{12,24}", "([0-9]{2}-){8}", "(yes|no|maybe)+!")
    ]
    texts = {}
    settings = {**TINY_ENGINE, "skip_tokenizer_init": False, "kv_cache_memory_bytes": 1 << 23}
    for name in models:
        with LLM(str(tmp_path / f"model{name}"), **{**settings, "enable_lora": False}) as alone:
            texts[name] = [each.outputs[0].text for each in alone.generate(["ab"] * 3, params, use_tqdm=False)]
    assert texts[""] != texts["lora"]
    request = asked([str(tmp_path / "lora")])[0]
    for drafts in ({}, {"speculative_config": DRAFTERS["ngram"]}):
        with LLM(str(tmp_path / "model"), **settings, **drafts) as llm:
            both = llm.generate(["ab"] * 6, params * 2, lora_request=[request] * 3 + [None] * 3, use_tqdm=False)
        assert [each.outputs[0].text for each in both] == texts["lora"] + texts[""]


def test_the_largest_rank_beside_a_small_one(model: Any, tmp_path: Path) -> None:
    ranks = {"wide": 512, "narrow": 3, "odd": 257}
    models = {name: write_lora(model, tmp_path / name, rank, rank, alpha=3.0) for name, rank in ranks.items()}
    names = [str(tmp_path / name) for name in ranks]
    with LLM(str(model.path), **{**TINY_ENGINE, "max_lora_rank": 512}) as llm:
        outputs = llm.generate(prompts_for(names), GREEDY, lora_request=asked(names), use_tqdm=False)
    for name, output in zip(ranks, outputs, strict=True):
        check(models[name], output, tolerance=2e-3)


@pytest.mark.slow
def test_two_ranks_equal_one(model: Any, merged: dict[str, Any]) -> None:
    names = [*merged, *merged]
    with LLM(str(model.path), **{**TINY_ENGINE, "max_loras": 2}, tensor_parallel_size=2) as parallel:
        outputs = parallel.generate(prompts_for(names), GREEDY, lora_request=asked(names), use_tqdm=False)
    for name, output in zip(names, outputs, strict=True):
        check(merged[name], output)


def test_the_cpu_library_adapts_whole_steps(model: Any, merged: dict[str, Any]) -> None:
    """In bfloat16: most tokens are those of the float32 reference, and the steps ran whole."""
    require_library()
    names, before = list(merged), native.STEPS.copy()
    settings = {**TINY_ENGINE, "dtype": "bfloat16", "attention_backend": "cpu", "block_size": 16, "max_loras": 5}
    with LLM(str(model.path), **settings) as native_llm:
        outputs = native_llm.generate(prompts_for(names), GREEDY, lora_request=asked(names), use_tqdm=False)
    for name, output in zip(names, outputs, strict=True):
        check(merged[name], output, tolerance=0.35)
    steps = native.STEPS - before
    assert steps["adapted"] > 5 and not steps["layer by layer"]


def test_a_gguf_file_orders_queries_and_keys_otherwise(model: Any, merged: dict[str, Any], tmp_path: Path) -> None:
    """The same adapters over a GGUF file of the same weights, whose queries and keys are in llama.cpp's order."""
    kinds = pytest.importorskip("gguf").GGMLQuantizationType
    write_model(tmp_path / "m.gguf", model, "llama", kinds.F32)
    names = list(merged)
    settings = {**TINY_ENGINE, "max_loras": 5, "quantization": "none"}
    with LLM(str(tmp_path / "m.gguf"), **settings) as gguf:
        outputs = gguf.generate(prompts_for(names), GREEDY, lora_request=asked(names), use_tqdm=False)
    for name, output in zip(names, outputs, strict=True):
        check(merged[name], output)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_keep_their_adapters(model: Any, merged: dict[str, Any], quantization: str) -> None:
    """What an adapter adds is not quantized. The tolerance is that of the base model's quantization, and far less than
    what the adapter changes."""
    require_library()
    name = list(merged)[1]
    settings = {**TINY_ENGINE, "dtype": "bfloat16", "attention_backend": "cpu", "block_size": 16}
    with LLM(str(model.path), **settings, quantization=quantization) as quantized:
        outputs = quantized.generate(prompts_for(["", name]), GREEDY, lora_request=asked(["", name]), use_tqdm=False)
    for each, output in zip(("", name), outputs, strict=True):
        check(merged[each], output, tolerance=1.5)
    with pytest.raises(AssertionError, match="likeliest|logprob"):
        check(model, outputs[1], tolerance=1.5)


def test_a_prefix_in_an_eight_bit_cache(model: Any, tmp_path: Path) -> None:
    """Keys and values of prefix tuning go into the CPU library's cache of 8-bit integers as computed ones do."""
    require_library()
    table = torch.randn(4, 3 * 2 * 16) * 0.5
    config = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}
    request = asked([str(write_files(tmp_path / "prefix", {"prompt_embeddings": table}, config))])[0]
    settings = {**TINY_ENGINE, "dtype": "bfloat16", "attention_backend": "cpu", "block_size": 16}
    scores = []
    for kind in ("auto", "int8"):
        with LLM(str(model.path), **settings, kv_cache_dtype=kind) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
            (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, lora_request=request, use_tqdm=False)
            (plain,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        scores.append({token: each.logprob for token, each in output.outputs[0].logprobs[0].items()})
        assert (
            abs(plain.outputs[0].logprobs[0][plain.outputs[0].token_ids[0]].logprob - max(scores[-1].values())) > 0.02
        )
    both = scores[0].keys() & scores[1].keys()
    assert len(both) > 10 and max(abs(scores[0][token] - scores[1][token]) for token in both) < 0.1


@pytest.mark.slow
def test_two_hundred_adapters_through_four_slots(model: Any, tmp_path: Path) -> None:
    """Random arrivals, lengths and repeats, with aborts and a base model's requests among them: every text is that of
    its own adapter, nobody starves, and the base model's requests never wait for a load."""
    rng = np.random.default_rng(7)
    merged = {str(tmp_path / f"a{i}"): write_lora(model, tmp_path / f"a{i}", i, rank=1 + i % 8) for i in range(200)}
    names = [*merged, *rng.choice(list(merged), 120), *[""] * 40]
    rng.shuffle(names)
    settings = {**TINY_ENGINE, "max_loras": 4, "max_cpu_loras": 20, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    with LLM(str(model.path), **settings) as llm:
        engine, texts, aborted, waiting = llm.llm_engine, {}, set(), list(enumerate(names))
        params = [GREEDY.clone() for _ in names]
        for each in params:
            each.max_tokens = int(rng.integers(1, 12))
        while waiting or engine.has_unfinished_requests():
            for _ in range(int(rng.integers(0, 6))):
                if waiting:
                    number, name = waiting.pop()
                    prompt = {"prompt_token_ids": rng.integers(2, 90, int(rng.integers(1, 20))).tolist()}
                    engine.add_request(str(number), prompt, params[number], lora_request=asked([name])[0])
            if rng.random() < 0.02:
                victim = str(int(rng.integers(0, len(names))))
                aborted |= {output.request_id for output in engine.abort_request(victim)}
            texts |= {output.request_id: output for output in engine.step() if output.finished}
        stats = engine.client.stats()
    assert stats.resource_loads >= 200 - len(aborted) and stats.resource_evictions >= 190 - len(aborted)
    assert stats.resource_slots_used == 0 and len(texts.keys() | aborted) == len(names)
    for number, name in enumerate(names):
        if str(number) not in aborted:
            check(merged.get(name, model), texts[str(number)])


def test_tensors_lie_in_the_content_of_their_file(tmp_path: Path) -> None:
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    wanted = {f"{kind}.{size}": torch.randn(size, 3).to(kind) for kind in kinds for size in (1, 5)}
    save_file(wanted, tmp_path / "adapter.safetensors", {"format": "pt"})
    found = tensors_of(bytearray((tmp_path / "adapter.safetensors").read_bytes()))
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted)
