"""Heads that draft from the model's hidden states: their drafts are those of plain torch, and no text changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvasir import LLM, SamplingParams
from kvasir.errors import ConfigError, ModelError
from kvasir.worker.speculative.drafter import PassDrafter
from kvasir.worker.speculative.heads import HeadDrafter, MedusaDrafter
from tests.cpu.test_speculation import assert_same, mixed, repetitive
from tests.draft_head_builders import Shape, TorchHead, TorchMedusa, TorchMtp
from tests.engine_builders import SMALL, TIGHT, Model, generate, metric, tokens
from tests.pairwise import few

DRAFTS = 3
EAGLE3 = Shape(vocab=64)


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("llama")


SEEDS = (21, 22)  # of requests whose text the head has learned


@pytest.fixture(scope="module")
def plain(model: Model) -> LLM:
    """An engine without drafts, in which requests are chunked and preempted."""
    return model.llm(**TIGHT)


@pytest.fixture(scope="module")
def head(model: Model, plain: LLM) -> TorchHead:
    """A head that is right now and then."""
    texts = [prompt[:20] + model.greedy(prompt[:20], 40) for prompt in model.prompts[:4]]
    for seed in SEEDS:
        prompts, params = repetitive(seed), mixed(seed, 8)
        for prompt, output in zip(prompts, generate(plain, prompts, params), strict=True):
            texts += [prompt + list(output.outputs[0].token_ids)]
    head = TorchHead(EAGLE3, model.hf)
    head.learn([text for text in texts if len(text) > 3], 50)
    return head


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    return watch(monkeypatch, HeadDrafter)


def watch(monkeypatch: pytest.MonkeyPatch, kind: type[PassDrafter]) -> dict[int, list[int]]:
    """What will be drafted after texts of each length, of a single request."""
    found: dict[int, list[int]] = {}
    propose = kind.propose

    def watched(self: PassDrafter, taken: Any, drafts: Any) -> None:
        propose(self, taken, drafts)
        found[int(taken.lengths[0])] = drafts.tokens[taken.rows[0], : taken.wanted].tolist()

    monkeypatch.setattr(kind, "propose", watched)
    return found


def check_drafts(
    llm: LLM, model: Model, head: TorchHead | TorchMedusa, seen: dict[int, list[int]], count: int = 20
) -> int:
    """Compare the drafts of some requests, one after the other; how many drafts were compared."""
    compared = 0
    for prompt in [each for each in model.prompts if len(each) > 1][:4]:
        seen.clear()
        (said,) = tokens(generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)))
        assert said == model.greedy(prompt, count)
        text = prompt + said
        for length, drafts in seen.items():
            if length <= len(text):
                assert drafts == head.drafts(text[:length], len(drafts)), f"after {length} tokens"
                compared += len(drafts)
    return compared


def test_drafts_are_those_of_plain_torch(
    model: Model, head: TorchHead, seen: dict[int, list[int]], tmp_path: Path
) -> None:
    drafting = {"method": "eagle3", "model": head.save(tmp_path), "num_speculative_tokens": DRAFTS, "adaptive": False}
    llm = model.llm(**SMALL, speculative_config=drafting, enable_prefix_caching=False)
    assert check_drafts(llm, model, head, seen) > 60
    assert metric(llm, "spec_decode_num_accepted_tokens") > 10


VARIANTS = {
    "norms of features": (Shape(vocab=40, fc_norm=True, norm_output=True), {"as_speculators": True}),
    "norm before fc": (Shape(vocab=96, norm_before_fc=True, norm_before_residual=True), {"as_speculators": True}),
    "all its own": (Shape(own_embedding=True, qk_norm=True, bias=True, features=(2,), head_dim=16), {"as_bin": True}),
    "eagle-1": (Shape("eagle", features=(3,)), {}),
    "eagle-1 with a bias": (Shape("eagle", features=(3,), bias=True, own_embedding=True), {"as_bin": True}),
}


@pytest.mark.parametrize("variant", few(list(VARIANTS), fast=["norms of features", "eagle-1"]))
def test_every_variant_drafts_as_plain_torch_does(
    model: Model, seen: dict[int, list[int]], tmp_path: Path, variant: str
) -> None:
    shape, layout = VARIANTS[variant]
    head = TorchHead(shape, model.hf, seed=1)
    drafting = {"method": shape.kind, "model": head.save(tmp_path, **layout), "num_speculative_tokens": DRAFTS}
    llm = model.llm(**SMALL, speculative_config={**drafting, "adaptive": False}, enable_prefix_caching=False)
    assert check_drafts(llm, model, head, seen, count=8) > 40


@pytest.mark.parametrize("name", few(["deepseek_v3", "glm4_moe"], fast=["glm4_moe"]))
def test_the_layer_past_the_last_drafts_as_in_transformers(
    seen: dict[int, list[int]], tmp_path: Path, name: str
) -> None:
    mtp = TorchMtp(name, tmp_path, own_ends=name == "deepseek_v3")
    prompts, params = [[5, 9, 4, 7, 3] * 3, list(range(3, 33))], SamplingParams(temperature=0, max_tokens=10)
    settings: Any = {**SMALL, "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20, "use_tqdm_on_load": False}
    drafting = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    llm = LLM(mtp.path, skip_tokenizer_init=True, speculative_config=drafting, **settings)
    plain = LLM(mtp.path, skip_tokenizer_init=True, **settings)
    for prompt in prompts:
        seen.clear()
        (said,) = tokens(generate(llm, [prompt], params))
        assert said == tokens(generate(plain, [prompt], params))[0]
        text = prompt + said
        drafts = {length: found for length, found in seen.items() if length <= len(text)}
        assert len(drafts) > 5
        for length, found in drafts.items():
            assert found == mtp.drafts(text[:length], len(found)), f"after {length} tokens"


@pytest.mark.parametrize(("by_authors", "layers"), [(True, 1), (False, 2)])
def test_medusa_heads_draft_as_plain_torch_does(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_authors: bool, layers: int
) -> None:
    medusa = TorchMedusa(model.hf, heads=4, layers=layers, vocab=96 if by_authors else 50)
    drafting = {"method": "medusa", "model": medusa.save(tmp_path, by_authors), "num_speculative_tokens": 3}
    llm = model.llm(**SMALL, speculative_config={**drafting, "adaptive": False})
    found = watch(monkeypatch, MedusaDrafter)
    assert check_drafts(llm, model, medusa, found, count=10) > 60


# ---------------------------------------------------------------- the text stays the same


@pytest.fixture(scope="module")
def engines(model: Model, head: TorchHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LLM]]:
    """Engines in which requests are chunked and preempted, made once each."""

    def saved(kind: str) -> str:
        path = tmp_path_factory.mktemp(kind)
        if kind == "medusa":
            return TorchMedusa(model.hf, heads=4).save(path, by_authors=True)
        made = head if kind == "eagle3" else TorchHead(Shape("eagle", features=(3,)), model.hf, seed=1)
        return made.save(path)

    @cache
    def engine(kind: str = "eagle3", **more: Any) -> LLM:
        drafting = {"method": kind, "model": saved(kind), "num_speculative_tokens": DRAFTS, "adaptive": False}
        return model.llm(**{**TIGHT, "speculative_config": drafting, **more})

    yield engine
    engine.cache_clear()


@pytest.fixture(scope="module")
def mtp_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LLM]]:
    """The same of a model that has such a layer."""
    path = TorchMtp("glm4_moe", tmp_path_factory.mktemp("mtp"), own_ends=False).path

    @cache
    def engine(drafts: bool, **more: Any) -> LLM:
        drafting = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
        settings = {**TIGHT, "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20, "use_tqdm_on_load": False}
        return LLM(path, skip_tokenizer_init=True, **settings, speculative_config=drafting if drafts else None, **more)

    yield engine
    engine.cache_clear()


@pytest.mark.parametrize("ahead", few([False, True], fast=[True]))
def test_every_parameter_mixed_gives_the_same_text(engines: Callable[..., LLM], plain: LLM, ahead: bool) -> None:
    """Requests are chunked, preempted and resumed."""
    llm = engines(async_scheduling=ahead)
    for seed in SEEDS:
        prompts, params = repetitive(seed), mixed(seed, 8)
        assert_same(generate(llm, prompts, params), generate(plain, prompts, params))
    assert metric(llm, "num_preemptions") > 0
    assert metric(llm, "spec_decode_num_accepted_tokens") > 20


@pytest.mark.slow
@settings(max_examples=max(5, settings().max_examples // 20 if settings().max_examples < 2000 else 2000))
@given(seed=st.integers(0, 2**30), kind=st.sampled_from(["eagle3", "eagle", "medusa", "mtp"]), ahead=st.booleans())
def test_every_parameter_mixed_gives_the_same_text_often(
    engines: Callable[..., LLM],
    mtp_engines: Callable[..., LLM],
    plain: LLM,
    seed: int,
    kind: str,
    ahead: bool,
) -> None:
    prompts, params = repetitive(seed), mixed(seed, 8)
    with_drafts = mtp_engines(True, async_scheduling=ahead) if kind == "mtp" else engines(kind, async_scheduling=ahead)
    without = mtp_engines(False) if kind == "mtp" else plain
    assert_same(generate(with_drafts, prompts, params), generate(without, prompts, params))


def test_cached_prefixes_and_forks_keep_the_text(engines: Callable[..., LLM], plain: LLM, model: Model) -> None:
    """After a cached prefix the head lacks one entry, and drafts all the same."""
    stem = model.prompts[0][:20]
    prompts = [stem + model.greedy(stem, 40)[: 8 + 2 * number] for number in range(6)]
    params = [SamplingParams(temperature=0.8 * (n % 2), seed=n, n=1 + n % 2, max_tokens=14, ignore_eos=True)
              for n in range(6)]  # fmt: skip
    llm = engines(num_gpu_blocks_override=120)
    before = metric(llm, "spec_decode_num_accepted_tokens")
    for _ in range(2):
        assert_same(generate(llm, prompts, params), generate(plain, prompts, params))
    assert metric(llm, "prefix_cache_hits") > 0
    assert metric(llm, "spec_decode_num_accepted_tokens") > before


def test_a_head_that_pays_no_more_makes_no_passes(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `adaptive`, a head that is never right drafts little, and nothing is computed for it in between."""
    passes: list[int] = []
    draft = HeadDrafter.draft
    monkeypatch.setattr(
        HeadDrafter, "draft", lambda self, *args, **more: passes.append(1) or draft(self, *args, **more)
    )
    drafting = {"model": TorchHead(EAGLE3, model.hf, seed=5).save(tmp_path / "EAGLE3-x"), "num_speculative_tokens": 3}
    llm = model.llm(**SMALL, speculative_config=drafting)
    (said,) = tokens(generate(llm, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)))
    assert said == model.greedy([5, 6, 7], 80)
    assert metric(llm, "spec_decode_rows_paused") > 30
    assert 0 < len(passes) < 40


def test_synthetic_acceptance_is_the_rate_that_was_asked_for(model: Model, tmp_path: Path) -> None:
    """With random weights for both, as a measurement of a large shape has them."""
    TorchHead(EAGLE3, model.hf).save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    drafting = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    llm = model.llm(**SMALL, load_format="dummy", speculative_config={**drafting, "synthetic_acceptance_rate": 0.8})
    generate(llm, model.prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    per_step = metric(llm, "spec_decode_num_accepted_tokens") / metric(llm, "spec_decode_num_drafts")
    assert per_step == pytest.approx(0.8 + 0.64 + 0.512, abs=0.25)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"num_hidden_layers": 2}, {}, "heads that draft with one layer"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, {}, "the model has 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": None}, {}, "list the layers"),
        ({"target_hidden_size": 64}, {}, "for a model of hidden size 64"),
        ({"draft_vocab_size": 100}, {}, "the model has 96 tokens"),
        ({"draft_vocab_size": 60}, {}, r"should be \[60"),
        ({"fc_norm": True}, {}, "3 of 17 tensors are missing"),
        ({"eagle_config": {"use_last_layernorm": False}}, {}, "use_last_layernorm"),
        ({}, {"enable_lora": True}, "enable_lora does not work"),
        ({}, {"model_impl": "transformers"}, "hidden states"),
        ({}, {"swap_space": 0.01}, "swap_space"),
        ({}, {"tensor_parallel_size": 2}, "one device"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    model: Model, tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    head = TorchHead(EAGLE3, model.hf).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafting = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    with pytest.raises((ConfigError, ModelError), match=said):
        model.llm(**SMALL, speculative_config=drafting, **settings)


def test_vocabularies_that_lead_outside_are_refused(model: Model, tmp_path: Path) -> None:
    path = TorchHead(EAGLE3, model.hf).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["d2t"][-1] = 96
    save_file(tensors, tmp_path / "model.safetensors")
    drafting = {"method": "eagle3", "model": path, "num_speculative_tokens": 3}
    with pytest.raises(ModelError, match="d2t"):
        model.llm(**SMALL, speculative_config=drafting)


def test_more_drafts_than_medusa_heads_are_refused(model: Model, tmp_path: Path) -> None:
    heads = TorchMedusa(model.hf, heads=2).save(tmp_path, by_authors=True)
    with pytest.raises(ConfigError, match="at most 2"):
        model.llm(**SMALL, speculative_config={"method": "medusa", "model": heads, "num_speculative_tokens": 3})


def test_models_without_such_a_layer_refuse_mtp(model: Model) -> None:
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM"):
        model.llm(**SMALL, speculative_config={"method": "mtp", "num_speculative_tokens": 1})


def test_gguf_files_have_no_layer_for_mtp(starter_model: Path) -> None:
    with pytest.raises(ConfigError, match="is a GGUF file"):
        LLM(str(starter_model), speculative_config={"method": "mtp", "num_speculative_tokens": 1})


def test_models_with_windows_refuse_heads_with_a_cache(models: Callable[[str], Model], tmp_path: Path) -> None:
    other = models("mistral_window")
    head = TorchHead(EAGLE3, other.hf).save(tmp_path)
    with pytest.raises(ConfigError, match="sliding windows"):
        other.llm(**SMALL, speculative_config={"method": "eagle3", "model": head, "num_speculative_tokens": 3})
