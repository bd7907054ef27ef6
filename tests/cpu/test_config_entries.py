"""A config.json that lacks an entry, has a null there, or spells RoPE in the old way is read as by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir.config.resolve import read_hf_config
from kvasir.errors import KvasirError, ModelError
from kvasir.models import architectures
from kvasir.models.spec import DecoderSpec
from tests.model_builders import REPRESENTATIVE, SIZES, TINY
from tests.pairwise import few

Entries = dict[str, Any]
Read = Callable[[Entries], DecoderSpec]
NAMES = [name for name in TINY if name != "internlm2"]  # transformers has no code of its own for it
# Where transformers ignores an entry of the same meaning, or reads without a check what its model cannot run.
ELSEWHERE = {("phi3_longrope_partial", "original_max_position_embeddings")}
UNCHECKED = ("ffn_dim", "num_key_value_heads")
WINDOWS = {"use_sliding_window": True, "sliding_window": 9}
MORE: dict[str, tuple[str, Entries]] = {
    "qwen2_moe_windows": ("qwen2_moe", {**TINY["qwen2_moe"][1], **WINDOWS, "num_hidden_layers": 4}),
    "qwen3_moe_windows": ("qwen3_moe", {**TINY["qwen3_moe"][1], **WINDOWS}),
    "qwen2_no_window": ("qwen2", {**WINDOWS, "sliding_window": None, "max_window_layers": 0}),
    "smollm3_listed": ("smollm3", {"pad_token_id": 0, "sliding_window": 9, "layer_types": ["sliding_attention"] * 3}),
    "gemma3_old_spelling": (
        "gemma3_text",
        {
            **TINY["gemma3"][1],
            **{"rope_theta": 500.0, "rope_local_base_freq": 70.0},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "yarn_of_short_texts": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0, "factor": 4.0, "beta_slow": 9.0}},
    ),
}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def reading(entries: Entries) -> DecoderSpec:
        (tmp_path / "config.json").write_text(json.dumps(entries))
        hf = read_hf_config(tmp_path, {})
        return architectures.find(hf).read_spec(hf)

    return reading


def as_transformers_writes(kind: str, entries: Entries) -> Entries:
    """All entries, with the defaults of transformers for those that lack."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

    given = {key: value for key, value in entries.items() if key != "architectures"}
    written = CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(given))).to_json_string(use_diff=False)
    return {**json.loads(written), "architectures": [MODELS[kind]]}


def altered(full: Entries) -> Iterator[tuple[str, Entries]]:
    for key in full:
        if key not in ("architectures", "model_type", "transformers_version"):
            yield key, {each: value for each, value in full.items() if each != key}
            yield key, {**full, key: None}
    rope = full.get("rope_parameters")
    if rope and not any(isinstance(value, dict) for value in rope.values()):
        rest = {key: value for key, value in full.items() if key != "rope_parameters"}
        scaling = {("type" if key == "rope_type" else key): rope[key] for key in rope if key != "rope_theta"}
        default = rope["rope_type"] == "default"
        yield "spelling", {**rest, "rope_theta": rope["rope_theta"], "rope_scaling": None if default else scaling}


@pytest.mark.parametrize("name", few([*NAMES, *MORE], fast=[*REPRESENTATIVE, *MORE]))
def test_a_missing_or_null_entry_is_what_transformers_makes_of_it(name: str, read: Read) -> None:
    """Or it is refused; what transformers refuses may run."""
    kind, options = {**TINY, **MORE}[name]
    options = {key: value for key, value in {**SIZES, **options}.items() if key != "attn_implementation"}
    full = as_transformers_writes(kind, options)
    assert read({**options, "model_type": kind, "architectures": full["architectures"]}) == read(full)
    compared = 0
    for key, entries in altered(full):
        try:
            ours = read(entries)
        except KvasirError:
            continue
        try:
            theirs = read(as_transformers_writes(kind, entries))
        except Exception:  # its checks raise anything
            continue
        if (name, key) in ELSEWHERE or (key in UNCHECKED and entries.get(key) is None):
            continue
        assert ours == theirs, f"{key}: {entries.get(key)!r} for {full.get(key)!r}"
        compared += 1
    assert compared > 15


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=false is not supported"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; supported are softmax"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported are sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported are noaux_tc"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False is not supported; supported is True"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size=64 is not supported"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported; supported are silu"),
    ],
)
def test_what_would_compute_something_else_is_refused(name: str, entries: Entries, message: str, read: Read) -> None:
    kind, options = TINY[name]
    full = as_transformers_writes(kind, {**SIZES, **options})
    with pytest.raises(ModelError, match=message):
        read({**full, **entries})


def test_gemma_means_the_approximation_by_gelu_and_its_successors_do_not(read: Read) -> None:
    found = []
    for name, key in (("gemma", "hidden_act"), ("gemma2", "hidden_activation"), ("gemma3", "hidden_activation")):
        kind, options = TINY[name]
        found.append(read({**as_transformers_writes(kind, {**SIZES, **options}), key: "gelu"}).layers[0].mlp.activation)
    assert found == ["gelu_tanh", "gelu", "gelu"]


@pytest.mark.parametrize("word", ["su", "yarn"])
def test_first_names_of_longrope(word: str, read: Read) -> None:
    kind, options = TINY["phi3_longrope_partial"]
    full = as_transformers_writes(kind, {**SIZES, **options})
    old = {key: value for key, value in full["rope_parameters"].items() if key != "rope_type"}
    assert read({**full, "rope_parameters": None, "rope_scaling": {**old, "type": word}}) == read(full)
