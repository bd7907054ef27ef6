"""Architectures without a spec run through transformers' code with our attention; users add specs of their own."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.masking_utils import chunked_causal_mask_function

from kvasir import LLM, ModelRegistry, SamplingParams
from kvasir.errors import ConfigError, ModelError
from kvasir.models import architectures, fallback
from kvasir.models.fallback import TransformersModel
from kvasir.models.transformer import Transformer
from tests.conftest import ROOT
from tests.cpu.test_engine import TIGHT, Model, check_logprobs, generate, metric
from tests.model_builders import SIZES, TINY
from tests.pairwise import few

WITHOUT_A_SPEC: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("phi", {"pad_token_id": 0}),
    "olmo": ("olmo", {"pad_token_id": 0, "clip_qkv": 1.5}),
    "glm": ("glm", {"pad_token_id": 0, "head_dim": 8}),
    "nemotron": ("nemotron", {"pad_token_id": 0, "head_dim": 8}),
    "flex_olmo": ("flex_olmo", {"pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2}),
}
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=20)
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=20)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(architectures, "_ARCHITECTURES", dict(architectures._ARCHITECTURES))
    architectures._load_plugins.cache_clear()
    yield
    architectures._load_plugins.cache_clear()


def make(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setitem(TINY, name, WITHOUT_A_SPEC.get(name) or TINY[name])
    return Model(name, path)


def runs(llm: LLM) -> Any:
    return llm.llm_engine.client.core.executor.model  # type: ignore[attr-defined]


def check_under_load(model: Model, kind: type, **settings: Any) -> None:
    with model.llm(**(TIGHT if kind is TransformersModel else model.tight()), **settings) as llm:
        assert isinstance(runs(llm), kind)
        outputs = generate(llm, model.prompts, PARAMS)
        again = generate(llm, model.prompts, PARAMS)
        assert metric(llm, "num_preemptions") > 0
        assert metric(llm, "prefix_cache_hits") > 0
    check_logprobs(model, outputs)
    check_logprobs(model, again)


@pytest.mark.parametrize("name", few(list(WITHOUT_A_SPEC), fast=["phi", "olmo"]))
def test_without_a_spec_it_runs_through_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    model = make(name, tmp_path, monkeypatch)
    check_under_load(model, TransformersModel)
    assert any("runs through transformers" in line for line in log_lines)


def test_experts_run_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their heads ask the decoder for the scores of routers."""
    model = make("flex_olmo", tmp_path, monkeypatch)
    with model.llm(**TIGHT) as llm:
        assert isinstance(runs(llm), TransformersModel)
        check_logprobs(model, generate(llm, model.prompts[:3], SHORT))


def test_heads_get_no_more_than_decoders_return() -> None:
    given = fallback.GivenStates()
    given.hidden = torch.zeros(1, 2, 4)
    output = given()
    assert output.last_hidden_state is given.hidden and output[0] is given.hidden
    assert output.past_key_values is None and output.router_logits is None
    with pytest.raises(AttributeError, match="a decoder's output has no router_logit$"):
        output.router_logit  # noqa: B018


# windows, soft caps, scaled logits
@pytest.mark.parametrize("name", few(["qwen3", "mistral_window", "gemma2", "cohere"], fast=["gemma2"]))
def test_on_request_others_do_as_well(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_under_load(make(name, tmp_path, monkeypatch), TransformersModel, model_impl="transformers")


def test_kvasir_alone_refuses_what_it_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("phi", tmp_path, monkeypatch)
    with pytest.raises(ModelError, match="PhiForCausalLM is not supported; supported are LlamaForCausalLM"):
        model.llm(model_impl="kvasir")


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="MambaForCausalLM is no architecture of Kvasir's own, and cannot run through"):
        LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64)


def cannot_run(kind: str, path: Path, sizes: dict[str, Any], **settings: Any) -> str:
    """Why it cannot, in the words of the error."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(path)
    with pytest.raises(ModelError) as caught:
        LLM(str(path), skip_tokenizer_init=True, **{"max_model_len": 64, **settings})
    return str(caught.value)


def test_layers_with_a_state_of_their_own_are_refused(tmp_path: Path) -> None:
    """Their other layers attend as they should, and the text would be wrong without an error."""
    sizes = {**SIZES, "pad_token_id": 0, "num_hidden_layers": 2}
    for kind, own in (
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("recurrent_gemma", {"head_dim": 8, "lru_width": 32, "num_hidden_layers": 3}),
    ):
        assert "carry a state from token to token" in cannot_run(kind, tmp_path / kind, {**sizes, **own})


def test_windows_that_only_masks_have(tmp_path: Path) -> None:
    """Phi-3.5-MoE does not hand its window to attention functions."""
    model = Model("phimoe", tmp_path, sliding_window=6, num_hidden_layers=2)
    with model.llm(**TIGHT, model_impl="transformers") as llm:
        check_logprobs(model, generate(llm, model.prompts[:2], SHORT))


def test_masks_that_are_no_windows_are_refused(tmp_path: Path) -> None:
    said = cannot_run("doge", tmp_path / "doge", {**SIZES, "pad_token_id": 0, "num_hidden_layers": 2})
    assert "does not do with a mask that only attention reads" in said
    for chunk in (8, 4096):
        mask = fallback._show_mask(
            mask_function=chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long)),
            device=torch.device("cpu"),
            local_size=chunk,
        )
        with pytest.raises(ModelError, match="neither causal nor has a sliding window"):
            fallback._window(mask, None)


def test_angles_that_depend_on_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LongRoPE's are those of the engine's longest text. Dynamic ones would change from step to step."""
    rope = {**TINY["phi3_longrope_partial"][1]["rope_parameters"], "original_max_position_embeddings": 16}
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 16}
    model = Model("phi3_longrope_partial", tmp_path / "long", num_hidden_layers=2, **changes)
    prompts = [prompt for prompt in model.prompts if len(prompt) > 16][:4]
    with model.llm(**TIGHT, model_impl="transformers") as llm:  # a prompt's first chunk is shorter than 16 tokens
        check_logprobs(model, generate(llm, prompts, SHORT))
    scaling = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}
    said = cannot_run("phi", tmp_path / "dynamic", {**SIZES, **scaling, "pad_token_id": 0}, max_model_len=200)
    assert "set max_model_len to 128 or less" in said


# ---------------------------------------------------------------- models of users


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("add_a_model", ROOT / "examples" / "add_a_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_adds_a_model_in_under_60_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example()
    assert len((ROOT / "examples" / "add_a_model.py").read_text().splitlines()) < 60
    module.register()
    assert "PhiForCausalLM" in ModelRegistry.get_supported_archs()
    check_under_load(make("phi", tmp_path, monkeypatch), Transformer)


def test_plugins_are_called_once_and_before_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def plugin() -> None:
        calls.append(1)
        ModelRegistry.register_model("Mine", "kvasir.models.architectures.llama:LLAMA")

    point = EntryPoint("mine", "somewhere:plugin", architectures.PLUGINS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: plugin)
    monkeypatch.setattr(architectures, "entry_points", lambda group: [point] if group == "kvasir.plugins" else [])
    mine, llama = (architectures.find({"architectures": [name]}) for name in ("Mine", "LlamaForCausalLM"))
    assert mine is llama
    assert calls == [1]


def test_a_plugin_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "kvasir_no_such_module:register", architectures.PLUGINS)
    monkeypatch.setattr(architectures, "entry_points", lambda group: [point])
    with pytest.raises(ConfigError, match="plugin broken .*failed: ModuleNotFoundError"):
        architectures.supported()


def test_wrong_registrations_are_refused() -> None:
    with pytest.raises(ConfigError, match="an Architecture or 'module:name' is needed, not int"):
        ModelRegistry.register_model("Mine", 3)  # type: ignore[arg-type]
    for place, said in (("no.such.module", "cannot be imported"), ("json:dumps", "is not an Architecture")):
        ModelRegistry.register_model("Mine", place)
        with pytest.raises(ModelError, match=said):
            architectures.find({"architectures": ["Mine"]})


def test_overrides_reach_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("phi", tmp_path, monkeypatch)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    with model.llm(load_format="dummy", hf_overrides={"num_hidden_layers": layers - 1}) as llm:
        assert len(runs(llm).step.layers) == layers - 1
