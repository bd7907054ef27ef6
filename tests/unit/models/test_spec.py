"""config.json to options: old and new spellings, defaults where the file is silent, refusals that name the entry."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from typing import Any

import pytest

from kvasir.errors import ModelError
from kvasir.layers.spec import (
    DynamicScaling,
    GatedMLPSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MoESpec,
    RMSNormSpec,
    RopeSpec,
    YarnScaling,
)
from kvasir.models import architectures
from kvasir.models.spec import Architecture, DecoderSpec

BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(architecture: str, **changes: Any) -> DecoderSpec:
    config = {**BASE, "architectures": [architecture], **changes}
    return architectures.find(config).read_spec(config)


def llama(**changes: Any) -> DecoderSpec:
    return read("LlamaForCausalLM", **changes)


def ropes(spec: DecoderSpec) -> list[RopeSpec | None]:
    return [layer.attention.rope for layer in spec.layers]


def rope(spec: DecoderSpec) -> RopeSpec:
    """The one of all layers."""
    (found,) = set(ropes(spec))
    assert found is not None
    return found


# ---------------------------------------------------------------- options


def test_llama_defaults() -> None:
    spec = llama()
    (layer,) = set(spec.layers)
    assert len(spec.layers) == 4 and spec.head_dims == {8}
    assert (layer.attention.heads, layer.attention.kv_heads) == (8, 2)
    assert not (layer.attention.qkv_bias or layer.attention.o_bias or spec.tie_embeddings)
    assert layer.mlp == GatedMLPSpec(128, "silu", bias=False)
    assert layer.attention_norm == layer.mlp_norm == spec.final_norm == RMSNormSpec(1e-6)
    assert layer.attention_post_norm is layer.mlp_post_norm is None
    assert spec.windows == (None,) * 4
    assert ropes(spec) == [RopeSpec(rotary_dim=8, theta=10000.0)] * 4


def test_first_llama_has_as_many_key_heads_as_heads() -> None:
    assert {layer.attention.kv_heads for layer in llama(num_key_value_heads=None).layers} == {8}


def test_llama_options() -> None:
    spec = llama(attention_bias=True, mlp_bias=True, head_dim=32, tie_word_embeddings=True, hidden_act="gelu_new")
    (layer,) = set(spec.layers)
    assert layer.attention.qkv_bias and layer.attention.o_bias and spec.tie_embeddings
    assert (layer.attention.head_dim, layer.mlp, rope(spec)) == (32, GatedMLPSpec(128, "gelu_tanh", True), RopeSpec(32))


@pytest.mark.parametrize(
    ("given", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 9}, 9)], ids=str
)
def test_mistral_window(given: dict[str, Any], window: int | None) -> None:
    assert read("MistralForCausalLM", **given).windows == (window,) * 4


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(architecture: str) -> None:
    assert read(architecture, sliding_window=7).windows == (None,) * 4  # use_sliding_window is off by default
    on = {"use_sliding_window": True, "sliding_window": 7}
    assert read(architecture, **on, max_window_layers=3).windows == (None, None, None, 7)
    assert read(architecture, **on).windows == (None,) * 4  # from layer 28 on
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert read(architecture, **on, layer_types=types).windows == (7, None, None, 7)


def test_qwen2_and_qwen3_differ_in_biases_norms_and_heads() -> None:
    two, three = read("Qwen2ForCausalLM"), read("Qwen3ForCausalLM")
    for spec, expected in ((two, (True, False, None, 8)), (three, (False, False, RMSNormSpec(1e-6), 128))):
        attention = spec.layers[0].attention
        assert (attention.qkv_bias, attention.o_bias, attention.qk_norm, attention.head_dim) == expected


def test_layers_of_one_model_may_differ() -> None:
    sizes = {"num_experts": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    layers = read("Qwen3MoeForCausalLM", **sizes).layers
    assert [isinstance(layer.mlp, MoESpec) for layer in layers] == [False, True, False, False]
    assert len({layer.attention for layer in layers}) == 1


# ---------------------------------------------------------------- rotary embedding


@pytest.mark.parametrize(
    "given",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3", "rope_type": None}},
        {"rope_theta": 1e4, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}},
    ],
    ids=["old", "new", "oldest", "both", "length of the model itself"],
)
def test_llama3_scaling_in_every_spelling(given: dict[str, Any]) -> None:
    assert rope(llama(**given)) == RopeSpec(8, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))


def test_other_rotary_kinds() -> None:
    assert rope(llama(rope_scaling={"type": "linear", "factor": 4})).scaling == LinearScaling(4.0)
    assert rope(llama(rope_scaling=None, rope_theta=7)) == RopeSpec(8, 7.0)
    assert rope(llama(rope_parameters={"rope_type": "default", "rope_theta": 7.0})) == RopeSpec(8, 7.0)


def test_scaling_kinds_beside_the_first() -> None:
    yarn = llama(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048})
    assert rope(yarn) == RopeSpec(8, 1e4, YarnScaling(4.0, 2048, 0.1 * math.log(4) + 1))
    dynamic = llama(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert rope(dynamic) == RopeSpec(8, 1e4, DynamicScaling(4.0, 8192))
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long = llama(rope_scaling={"type": "longrope", **factors}, original_max_position_embeddings=1024)
    scaling = LongRopeScaling((1.0,) * 4, (2.0,) * 4, 1024, math.sqrt(1 + math.log(8) / math.log(1024)))
    assert rope(long) == RopeSpec(8, 1e4, scaling)


def test_gemma3_rotates_by_layer_type_in_both_spellings() -> None:
    near, far = RopeSpec(256, 1e4), RopeSpec(256, 1e6, LinearScaling(8.0))
    old = {"rope_local_base_freq": 1e4, "rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "linear", "factor": 8.0}}
    for given in (old, {"rope_parameters": new}):
        spec = read("Gemma3ForCausalLM", sliding_window_pattern=2, **given)
        assert ropes(spec) == [near, far] * 2
        assert spec.windows == (4096, None) * 2


def test_smollm3_layers_without_rotation() -> None:
    assert [rope is None for rope in ropes(read("SmolLM3ForCausalLM"))] == [False, False, False, True]
    assert [rope is None for rope in ropes(read("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0]))] == [
        True, False, False, True,
    ]  # fmt: skip


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "'mrope' is not supported; supported are default"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": 3}}, "short_factor must be a list of numbers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported are silu"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number of at least 1, but is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number, but is True"),
        ({"attention_bias": 1}, "attention_bias must be true or false, but is 1"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(8\) is not a multiple of num_key_value_heads \(3\)"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        llama(**changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("FalconForCausalLM", {"alibi": True}, "alibi is not supported"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm is not supported"),
        ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm is not supported"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries|layer_types has 2 entries"),
    ],
)
def test_variants_that_do_not_run_are_refused(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(architecture, **changes)


def test_layer_types_must_be_known_and_as_many_as_layers() -> None:
    with pytest.raises(ModelError, match="layer type 'chunked_attention' is not supported"):
        read("Qwen3ForCausalLM", layer_types=["chunked_attention"] * 4)
    with pytest.raises(ModelError, match="layer_types has 3 entries, num_hidden_layers is 4"):
        read("Qwen3ForCausalLM", layer_types=["full_attention"] * 3)


# ---------------------------------------------------------------- the registry


def test_unknown_architecture_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"Foo is not supported; supported are LlamaForCausalLM, Mistral"):
        architectures.find({"architectures": ["Foo"]})
    with pytest.raises(ModelError, match="does not name the model's architecture"):
        architectures.find({})


@pytest.mark.parametrize("name", architectures.supported())
def test_an_architecture_is_short_and_whole(name: str) -> None:
    architecture = architectures.find({"architectures": [name]})
    assert isinstance(architecture, Architecture)
    names = architecture.names_for({})
    assert len(set(names.values())) == len(names), "two tensors go to one place"
    assert len(inspect.getsourcelines(architecture.read_spec)[0]) < 25


def test_specs_need_no_torch() -> None:
    modules = {str(place).partition(":")[0] for place in architectures._ARCHITECTURES.values()}
    program = f"import sys, kvasir.models.architectures, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
