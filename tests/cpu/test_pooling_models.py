"""Every pooling architecture equals transformers': hidden states of tokens, classes of texts and of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvasir import LLM, PoolingParams
from kvasir.errors import ConfigError, ModelError, RequestError
from tests.pairwise import few
from tests.pooling_builders import VOCABULARY, save_bert, save_sentence_bert, save_tokenizer, set_entries

LENGTHS = (29, 5, 1, 12, 12)
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "num_labels": 3,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 96, "max_position_embeddings": 40}
MODERN = {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = {
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
T5 = {"d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_heads": 4, "vocab_size": 96, "n_positions": 40}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "pad_token_id": 0}
# Name of the classes without their ending -> model type, sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("bert", SIZES),
    "Roberta": ("roberta", {**SIZES, "pad_token_id": 1, "max_position_embeddings": 42}),
    "XLMRoberta": ("xlm-roberta", {**SIZES, "pad_token_id": 1, "max_position_embeddings": 42}),
    "DistilBert": ("distilbert", {**DISTIL, "num_labels": 3}),
    "MPNet": ("mpnet", {**SIZES, "pad_token_id": 1, "max_position_embeddings": 42}),
    "ModernBert": ("modernbert", {**SIZES, **MODERN}),
    "NomicBert": ("nomic_bert", SIZES),
    "Gte": ("gte", SIZES),
    "JinaEmbeddingsV3": ("jina_embeddings_v3", {**SIZES, "type_vocab_size": 1}),
    "T5Encoder": ("t5", T5),
    "MT5Encoder": ("mt5", {**T5, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 12}),
    "Mistral": ("mistral", {**DECODER, "sliding_window": 6}),
    "Qwen2": ("qwen2", DECODER),
    "Qwen3": ("qwen3", {**DECODER, "head_dim": 8}),
    "Llama": ("llama", DECODER),
    "Gemma3Text": ("gemma3_text", {**DECODER, **GEMMA, "use_bidirectional_attention": True}),
}
NO_CLASSES = ("Gemma3Text", "T5Encoder", "MT5Encoder")  # transformers has no classifiers of them, or others
RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(3, 96, length).tolist() for length in LENGTHS]


def make(name: str, ending: str, directory: Path, **options: Any) -> Any:
    """A model of transformers with random weights, as it is after loading what it saved."""
    kind, sizes = MODELS[name]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **options})
    made = getattr(transformers, f"{name}{ending}")(config)
    with torch.no_grad():
        for value in made.parameters():  # biases and gains that a wrong formula would not show are not 0 and 1
            value.add_(torch.randn_like(value) * 0.1)
    made.save_pretrained(directory)
    return type(made).from_pretrained(directory, attn_implementation="eager").eval()


def load(directory: Path, **settings: Any) -> LLM:
    return LLM(str(directory), skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes=None, **settings)


def pooled(llm: LLM, task: str, **params: Any) -> list[np.ndarray]:
    given = PoolingParams(task=task, **params)
    return [each.outputs.data for each in llm.encode(TEXTS, given, use_tqdm=False)]


def reference(model: Any, text: list[int], **inputs: Any) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([text]), **inputs)


@pytest.mark.parametrize("name", few(list(MODELS), fast=("Bert", "MPNet", "ModernBert", "Qwen3")))
def test_hidden_states(name: str, tmp_path: Path) -> None:
    hf = make(name, "Model", tmp_path)
    with load(tmp_path) as llm:
        found = pooled(llm, "token_embed", normalize=False)
        vectors = pooled(llm, "embed", normalize=False)
        units = pooled(llm, "embed")
        pooling = llm.llm_engine.config.model.poolers[0].pooling
    for text, states, vector, unit in zip(TEXTS, found, vectors, units, strict=True):
        expected = reference(hf, text).last_hidden_state[0].numpy()
        np.testing.assert_allclose(states, expected, atol=3e-5, rtol=1e-4)
        whole = {"cls": expected[0], "last": expected[-1], "mean": expected.mean(0)}[pooling]
        np.testing.assert_allclose(vector, whole, atol=3e-5, rtol=1e-4)
        np.testing.assert_allclose(unit, whole / np.linalg.norm(whole), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", few(["Bert", "ModernBert", "MPNet", "Gemma3Text"], fast=("Bert",)))
def test_vectors_in_bfloat16(name: str, tmp_path: Path) -> None:
    """The CPU library attends, except in layers with biases or with windows that hide something."""
    hf = make(name, "Model", tmp_path)
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16") as llm:
        found = pooled(llm, "token_embed")
    for text, units in zip(TEXTS, found, strict=True):
        expected = torch.nn.functional.normalize(reference(hf, text).last_hidden_state[0], dim=-1).numpy()
        assert (units * expected).sum(-1).min() > 0.999


@pytest.mark.parametrize("name", few(["Qwen2", "Llama", "Mistral", "Qwen3"], fast=("Qwen2",)))
def test_decoders_that_see_later_tokens(name: str, tmp_path: Path) -> None:
    """As GTE-Qwen2: is_causal is false in config.json, so a model for text generation embeds in both directions."""
    hf = make(name, "Model", tmp_path, is_causal=False)
    set_entries(tmp_path, architectures=[f"{name}ForCausalLM"])
    with load(tmp_path) as llm:
        found = pooled(llm, "token_embed", normalize=False)
    for text, states in zip(TEXTS, found, strict=True):
        expected = reference(hf, text).last_hidden_state[0].numpy()
        np.testing.assert_allclose(states, expected, atol=3e-5, rtol=1e-4)
    with pytest.raises(ConfigError, match="does not generate text"):
        load(tmp_path, runner="generate")


def test_nvidias_llama_that_sees_later_tokens(tmp_path: Path) -> None:
    hf = make("Llama", "Model", tmp_path, is_causal=False)
    set_entries(tmp_path, architectures=["LlamaBidirectionalModel"], is_causal=None)
    with load(tmp_path) as llm:
        found = pooled(llm, "embed", normalize=False)
    for text, vector in zip(TEXTS, found, strict=True):
        expected = reference(hf, text).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, expected, atol=3e-5, rtol=1e-4)


# ---------------------------------------------------------------- checkpoints from before transformers had the models


def test_the_first_files_of_nomic_bert(tmp_path: Path) -> None:
    hf = make("NomicBert", "Model", tmp_path)
    names = {"n_embd": 32, "n_head": 4, "n_inner": 48, "n_layer": 3, "n_positions": 80, "max_trained_positions": 40}
    options = {"activation_function": "swiglu", "rotary_emb_base": 1000, "layer_norm_epsilon": 1e-12, "prenorm": False}
    kept = {"architectures": ["NomicBertModel"], "vocab_size": 96, "type_vocab_size": 2, "model_type": "nomic_bert"}
    (tmp_path / "config.json").write_text(json.dumps({**kept, **names, **options, "rotary_scaling_factor": 2}))
    with load(tmp_path) as llm:
        found = pooled(llm, "token_embed", normalize=False)
        assert llm.llm_engine.config.model.max_model_len == 40, "positions after these are rotated otherwise"
    for text, states in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(states, reference(hf, text).last_hidden_state[0].numpy(), atol=3e-5, rtol=1e-4)
    set_entries(tmp_path, num_experts=8)
    with pytest.raises(ModelError, match="num_experts=8 is not supported"):
        load(tmp_path)


@pytest.mark.parametrize("factor", [None, 8.0])
def test_the_first_files_of_gte(factor: float | None, tmp_path: Path) -> None:
    """Their code, and so their names, are their own, and NTK stretches positions in the long and multilingual ones."""
    theta, dim = 20000.0, 8
    hf = make("Gte", "Model", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": theta})
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"new.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    scaling = None if factor is None else {"type": "ntk", "factor": factor}
    options = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True}
    named = {"architectures": ["NewModel"], "model_type": "new", "rope_theta": theta, "rope_scaling": scaling}
    set_entries(tmp_path, rope_parameters=None, **named, **options)
    if factor is not None:  # as the models' own code computes it
        plain = 1.0 / (theta * factor) ** (torch.arange(0, dim, 2) / dim)
        hf.rotary_emb.inv_freq = plain / factor ** (2 / dim)
    with load(tmp_path) as llm:
        found = pooled(llm, "token_embed", normalize=False)
    for text, states in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(states, reference(hf, text).last_hidden_state[0].numpy(), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", few([name for name in MODELS if name not in NO_CLASSES], fast=("XLMRoberta", "Llama")))
def test_classes(name: str, tmp_path: Path) -> None:
    hf = make(name, "ForSequenceClassification", tmp_path, pad_token_id=0)
    with load(tmp_path) as llm:
        logits, shares = pooled(llm, "classify", use_activation=False), pooled(llm, "classify")
    for text, found, share in zip(TEXTS, logits, shares, strict=True):
        mask = {} if name in ("Mistral", "Qwen2", "Qwen3", "Llama") else {"attention_mask": torch.ones(1, len(text))}
        expected = reference(hf, text, **mask).logits[0]
        np.testing.assert_allclose(found, expected.numpy(), atol=3e-5, rtol=1e-4)
        np.testing.assert_allclose(share, expected.softmax(-1).numpy(), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bert", "Roberta", "ModernBert", "Qwen2", "NomicBert"])
def test_classes_of_tokens(name: str, tmp_path: Path) -> None:
    hf = make(name, "ForTokenClassification", tmp_path)
    with load(tmp_path) as llm:
        found = pooled(llm, "token_classify")
    for text, shares in zip(TEXTS, found, strict=True):
        expected = reference(hf, text).logits[0].softmax(-1).numpy()
        np.testing.assert_allclose(shares, expected, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------- decoders in chunks, with cached prefixes


@pytest.mark.parametrize("pooling", ["mean", "max", "cls", "last"])
def test_prompts_in_parts(pooling: str, tmp_path: Path) -> None:
    """A prompt that takes several steps has the vector of one that takes one, beside others of other lengths."""
    hf = make("Qwen2", "Model", tmp_path)
    settings = {"max_num_batched_tokens": 7, "max_num_seqs": 4, "block_size": 4}
    with load(tmp_path, pooler_config={"pooling_type": pooling, "normalize": False}, **settings) as llm:
        found = pooled(llm, "embed")
        tokens = pooled(llm, "token_embed", normalize=False)
        stats = llm.llm_engine.client.stats()
    assert stats.partial_prefills > 4, "prompts were computed in parts"
    for text, vector, states in zip(TEXTS, found, tokens, strict=True):
        expected = reference(hf, text).last_hidden_state[0].numpy()
        whole = {"cls": expected[0], "last": expected[-1], "mean": expected.mean(0), "max": expected.max(0)}[pooling]
        np.testing.assert_allclose(vector, whole, atol=3e-5, rtol=1e-4)
        np.testing.assert_allclose(states, expected, atol=3e-5, rtol=1e-4)


def test_prefixes_are_cached_where_only_the_last_token_counts(tmp_path: Path) -> None:
    make("Qwen2", "Model", tmp_path)
    texts = [[*TEXTS[0][:20], last] for last in range(3, 8)]
    vectors = {}
    for caching in (True, False):
        with load(tmp_path, block_size=4, enable_prefix_caching=caching) as llm:
            llm.embed(texts[:1], use_tqdm=False)
            outputs = llm.embed(texts, use_tqdm=False)
            vectors[caching] = [each.outputs.embedding for each in outputs]
            assert all((each.num_cached_tokens == 20) is caching for each in outputs)
            mean = llm.encode(texts, PoolingParams(task="token_embed"), use_tqdm=False)
            assert not any(each.num_cached_tokens for each in mean), "all tokens' states are needed"
    np.testing.assert_allclose(vectors[True], vectors[False], atol=1e-6)


def test_texts_as_long_as_the_model_takes(tmp_path: Path) -> None:
    make("Bert", "Model", tmp_path)
    text = RNG.integers(3, 96, 40).tolist()
    with load(tmp_path) as llm:
        assert len(llm.embed(text, use_tqdm=False)[0].outputs.embedding) == 32
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            llm.embed([*text, 5], use_tqdm=False)
        cut = llm.embed([*text, 5], truncate_prompt_tokens=-1, use_tqdm=False)[0].outputs.embedding
        np.testing.assert_allclose(cut, llm.embed(text, use_tqdm=False)[0].outputs.embedding, atol=1e-6)
        with pytest.raises(RequestError, match="does not generate text"):
            llm.generate(text, use_tqdm=False)
        with pytest.raises(RequestError, match="does not generate text"):
            llm.chat([{"role": "user", "content": "cat"}], use_tqdm=False)
        with pytest.raises(RequestError, match="must be PoolingParams, not dict"):
            llm.embed(text, pooling_params={"dimensions": 8}, use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="cannot be shortened"):
            llm.embed(text, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)


def test_how_texts_are_read(tmp_path: Path) -> None:
    """Texts that are cut keep their special tokens, in whatever form and at whichever side."""
    save_bert(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "what is "}}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat sat on the mat and a dog barks"
    with LLM(str(tmp_path), dtype="float32") as llm:

        def ids(prompt: Any, prompt_name: str | None = None, **reading: Any) -> list[int]:
            (output,) = llm.embed(prompt, tokenization_kwargs=reading, prompt_name=prompt_name, use_tqdm=False)
            return output.prompt_token_ids

        right = tokenizer(text, truncation=True, max_length=6)["input_ids"]
        assert ids(text, truncate_prompt_tokens=6) == ids({"prompt": text}, truncate_prompt_tokens=6) == right
        asked = tokenizer("what is " + text)["input_ids"]
        assert ids(text, "query") == ids({"prompt": text}, "query") == asked
        assert ids(tuple(asked), truncate_prompt_tokens=4) == asked[:4]
        assert ids(text, add_special_tokens=False) == tokenizer(text, add_special_tokens=False)["input_ids"]
        tokenizer.truncation_side = "left"
        left = tokenizer(text, truncation=True, max_length=6)["input_ids"]
        assert left != right
        assert ids(text, truncate_prompt_tokens=6, truncation_side="left") == left
        params = PoolingParams(truncate_prompt_tokens=6, truncation_side="left")
        assert llm.embed(text, pooling_params=params, use_tqdm=False)[0].prompt_token_ids == left
        with pytest.raises(RequestError, match="tokenization_kwargs takes truncate_prompt_tokens"):
            ids(text, padding=True)
        with pytest.raises(RequestError, match="left or right"):
            ids(text, truncation_side="middle")


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    make("Bert", "Model", tmp_path)
    for settings, says in (
        ({"runner": "generate"}, "does not generate text"),
        ({"swap_space": 1.0}, "no KV cache"),
        ({"long_prefill_token_threshold": 8}, "one step"),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, "one step"),
        ({"pooler_config": {"pooling": "mean"}}, "pooling_type"),
        ({"pooler_config": {"pooling_type": "median"}}, "median"),
        ({"pooler_config": {"step_tag_id": 5}}, "step_tag_id is for pooling_type=step"),
        ({"pooler_config": {"tok_pooling_type": "step", "step_tag_id": "a"}}, "step_tag_id must be the id of a token"),
        ({"pooler_config": {"tok_pooling_type": "step", "returned_token_ids": [32]}}, "whole numbers from 0 to 31"),
    ):
        with pytest.raises(ConfigError, match=says):
            load(tmp_path, **settings)


# ---------------------------------------------------------------- heads made of other files


def test_rerankers_made_of_two_tokens(tmp_path: Path) -> None:
    """As Qwen3-Reranker: the score is the probability of yes against no as the next token."""
    hf = make("Qwen3", "ForCausalLM", tmp_path, vocab_size=len(VOCABULARY))
    save_tokenizer(tmp_path)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["cat", "dog"]}
    no, yes = VOCABULARY.index("cat"), VOCABULARY.index("dog")
    with LLM(str(tmp_path), dtype="float32", hf_overrides=overrides) as llm:
        found = [each.outputs.data for each in llm.encode(TEXTS, use_tqdm=False)]
    for text, score in zip(TEXTS, found, strict=True):
        logits = reference(hf, text).logits[0, -1]
        np.testing.assert_allclose(score, logits[[no, yes]].softmax(-1)[1:].numpy(), atol=1e-5)


def test_a_template_writes_the_prompt_of_a_pair(tmp_path: Path) -> None:
    """As for Qwen3-Reranker, by vLLM's roles: query and document."""
    save_bert(tmp_path, "ForSequenceClassification", num_labels=1)
    one = "{{ messages | selectattr('role', 'eq', '%s') | map(attribute='content') | first }}"
    template = f"what is {one % 'query'} and {one % 'document'} ?"
    texts = ["a dog barks", "the moon"]
    with LLM(str(tmp_path), dtype="float32") as llm:
        pairs = llm.score("cat", texts, use_tqdm=False)
        given = llm.score("cat", texts, chat_template=template, use_tqdm=False)
        written = llm.classify([f"what is cat and {text} ?" for text in texts], use_tqdm=False)
    with LLM(str(tmp_path), dtype="float32", chat_template=template) as llm:
        by_setting = llm.score("cat", texts, use_tqdm=False)
    assert [each.outputs.score for each in given] == [each.outputs.probs[0] for each in written]
    assert [each.outputs.score for each in by_setting] == [each.outputs.score for each in given]
    assert given[0].prompt_token_ids == written[0].prompt_token_ids != pairs[0].prompt_token_ids


@pytest.mark.parametrize("ending", ["ForRewardModel", "ForProcessRewardModel"])
def test_reward_models(ending: str, tmp_path: Path) -> None:
    hf = make("Qwen2", "ForCausalLM", tmp_path, num_labels=2)
    head = {f"score.{i}.{kind}": torch.randn(shape) for i, kind, shape in (
        (0, "weight", (32, 32)), (0, "bias", (32,)), (2, "weight", (2, 32)), (2, "bias", (2,)),
    )}  # fmt: skip
    save_file(head, tmp_path / "score.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "base.safetensors")
    set_entries(tmp_path, architectures=[f"Qwen2{ending}"])
    steps = {"pooling_type": "step", "step_tag_id": TEXTS[0][4], "returned_token_ids": [1]}
    settings = {"pooler_config": steps} if "Process" in ending else {}
    with load(tmp_path, **settings) as llm:
        found = [each.outputs.data for each in llm.reward(TEXTS, use_tqdm=False)]
        if settings:
            with pytest.raises(RequestError, match="must be from 0 to 1, .* but has 2"):
                llm.reward(TEXTS, pooling_params=PoolingParams(returned_token_ids=[0, 2]), use_tqdm=False)
    for text, values in zip(TEXTS, found, strict=True):
        states = reference(hf.model, text).last_hidden_state[0]
        inner = torch.relu(states @ head["score.0.weight"].T + head["score.0.bias"])
        expected = (inner @ head["score.2.weight"].T + head["score.2.bias"]).numpy()
        if settings:
            expected = expected[np.array(text) == TEXTS[0][4]][:, [1]]
        np.testing.assert_allclose(values, expected, atol=1e-4, rtol=1e-4)


def test_three_heads_of_bge_m3(tmp_path: Path) -> None:
    hf = make("XLMRoberta", "Model", tmp_path)
    heads = {}
    for name, size in (("colbert", 32), ("sparse", 1)):
        heads[name] = torch.nn.Linear(32, size)
        torch.save(heads[name].state_dict(), tmp_path / f"{name}_linear.pt")
    with load(tmp_path) as llm:
        dense, colbert, sparse = (pooled(llm, task) for task in ("embed", "token_embed", "token_classify"))
    for text, *vectors in zip(TEXTS, dense, colbert, sparse, strict=True):
        states = reference(hf, text).last_hidden_state[0]
        with torch.no_grad():
            tokens = heads["colbert"](states[1:])
            weights = torch.relu(heads["sparse"](states))
        expected = states[0] / states[0].norm(), tokens / tokens.norm(dim=-1, keepdim=True), weights
        for ours, theirs in zip(vectors, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5, rtol=1e-4)


def test_late_interaction(tmp_path: Path) -> None:
    """A layer for every token and no module that pools, as in ColBERT: texts have vectors for their tokens only."""
    hf = save_bert(tmp_path)
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Dense").mkdir()
    identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    (tmp_path / "1_Dense" / "config.json").write_text(json.dumps({"in_features": 32, "out_features": 8, **identity}))
    weight = torch.randn(8, 32)
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")

    def vectors(text: str) -> torch.Tensor:
        ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(text, return_tensors="pt")
        with torch.inference_mode():
            return torch.nn.functional.normalize(hf(**ids).last_hidden_state[0] @ weight.T, dim=-1)

    query, texts = "what is the moon", ["the moon is made of cheese", "a dog"]
    with LLM(str(tmp_path), dtype="float32") as llm:
        found = [each.outputs.data for each in llm.encode(texts, use_tqdm=False)]
        scores = [each.outputs.score for each in llm.score(query, texts, use_tqdm=False)]
        with pytest.raises(RequestError, match="does not do 'embed'; it does token_embed"):
            llm.embed(texts, use_tqdm=False)
    for text, states, score in zip(texts, found, scores, strict=True):
        np.testing.assert_allclose(states, vectors(text).numpy(), atol=1e-5)
        best = (vectors(query) @ vectors(text).T).amax(1).sum()
        assert score == pytest.approx(float(best), abs=1e-4)


@pytest.mark.parametrize(
    ("entries", "function"),
    [
        ({}, lambda x: x.softmax(-1)),
        ({"problem_type": "regression"}, lambda x: x),
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
    ],
)
def test_what_makes_scores_of_a_classifiers_numbers(entries: dict[str, Any], function: Any, tmp_path: Path) -> None:
    hf = save_bert(tmp_path, "ForSequenceClassification", num_labels=3)
    set_entries(tmp_path, **entries)
    with load(tmp_path) as llm:
        found = [each.outputs.probs for each in llm.classify(TEXTS[:2], use_tqdm=False)]
    for text, share in zip(TEXTS[:2], found, strict=True):
        logits = reference(hf, text, attention_mask=torch.ones(1, len(text))).logits[0]
        np.testing.assert_allclose(share, function(logits).numpy(), atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_dense_module_of_sentence_transformers(tmp_path: Path) -> None:
    model = save_sentence_bert(tmp_path, "Dense", prompts={"query": "what is "})
    texts = ["the cat sat on the mat", "a dog", "what is the moon made of"]
    with LLM(str(tmp_path), dtype="float32") as llm:
        found = [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]
        asked = llm.embed(texts, prompt_name="query", use_tqdm=False)
        scores = llm.score(texts[0], texts, use_tqdm=False)
    expected = model.encode(texts)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(
        [each.outputs.embedding for each in asked], model.encode(texts, prompt_name="query"), atol=1e-5
    )
    np.testing.assert_allclose([each.outputs.score for each in scores], expected @ expected[0], atol=1e-5)
