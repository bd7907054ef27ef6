"""Numbers of a config.json that cannot be: a sentence that names the entry, whatever the model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvasir.errors import ModelError
from kvasir.models import architectures
from tests.unit.models.test_spec import BASE, read

HOSTILE: list[Any] = [
    *(0, -1, 3, 1 << 16, 1 << 40, 10**400, 0.5, math.nan, math.inf, -math.inf, 1e308, True, "x", [], {}, [1], ["a"]),
    *({"a": 1}, [[]], [None]),
]
MORE: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "head_dim": 8,
    "sliding_window": 64,
    "layer_types": ["full_attention"] * 4,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    "rope_parameters": None,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 64,
    "no_rope_layers": [1] * 4,
    "mlp_only_layers": [],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "sliding_window_pattern": 2,
    "n_inner": None,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "architectures": None,
}


@pytest.mark.parametrize("architecture", architectures.supported())
def test_only_our_errors_come_out(architecture: str) -> None:
    for key in {**BASE, **MORE}:
        for value in HOSTILE:
            changes = {key: value} if key != "original_max_position_embeddings" else {key: value, **scaled("longrope")}
            check(architecture, changes)
    for kind in ("linear", "dynamic", "yarn", "longrope", "llama3"):
        for key in scaled(kind)["rope_scaling"]:
            for value in HOSTILE:
                check(architecture, {"rope_scaling": {**scaled(kind)["rope_scaling"], key: value}})


def scaled(kind: str) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    more = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return {"rope_scaling": {"rope_type": kind, **factors, **more, "attention_factor": 1.0, "mscale": 1.0}}


def check(architecture: str, changes: dict[str, Any]) -> None:
    try:
        read(architecture, **{"num_experts": 4, "moe_intermediate_size": 32, **changes})
        architectures.settle_implementation({**BASE, "architectures": [architecture], **changes}, "kvasir")
    except ModelError as error:
        assert len(str(error)) < 1500 and "\n" not in str(error)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, but is 0"),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7},
            r"hidden_size \(64\) is not a multiple of num",
        ),
        ({"num_hidden_layers": 1 << 31}, "num_hidden_layers must be at most 4096, but is 2147483648"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, but is nan"),
        ({"hidden_size": 10**5000}, "hidden_size must be at most 16777216, but is a number of thousands of digits"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e9}}, "factor must be a number from 0.015625 to 4096"),
        ({"rope_parameters": 5}, "rope_parameters must be a mapping, but is 5"),
        ({"layer_types": 5, "use_sliding_window": True}, "layer_types must be a list of str, but is 5"),
        ({"head_dim": 7}, "rotary embeddings turn pairs of numbers, and 7 of a head's 7"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json: {said}"):
        read("Qwen2ForCausalLM", **changes)


def test_experts_that_are_not_there() -> None:
    with pytest.raises(ModelError, match=r"num_experts_per_tok \(9\) is more than there are experts \(8\)"):
        read("MixtralForCausalLM", num_experts_per_tok=9)


def test_lengths_are_checked_before_they_are_used() -> None:
    with pytest.raises(ModelError, match="max_position_embeddings must be a whole number of at least 1, but is -1"):
        architectures.settle_implementation(
            {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": -1}, "auto"
        )
