"""What a model is run for: `runner` and `convert`, by the architecture in config.json and the files beside it."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.errors import ConfigError
from kvasir.models.architectures import settle_runner

GENERATES, EMBEDS = {"architectures": ["Qwen2ForCausalLM"]}, {"architectures": ["BertModel"]}
CLASSIFIES = {"architectures": ["BertForSequenceClassification"]}
POOLS, OTHER = ("pooling", "embed"), ("generate", "none")


@pytest.mark.parametrize(
    ("config", "runner", "convert", "has_files", "found"),
    [
        (GENERATES, "auto", "auto", False, OTHER),
        (GENERATES, "auto", "none", False, OTHER),
        (GENERATES, "auto", "auto", True, POOLS),  # sentence-transformers' files
        (GENERATES, "generate", "auto", True, OTHER),
        (GENERATES, "pooling", "auto", False, POOLS),
        (GENERATES, "auto", "embed", False, POOLS),
        (GENERATES, "auto", "classify", False, ("pooling", "classify")),
        (GENERATES | {"is_causal": False}, "auto", "auto", False, POOLS),
        (GENERATES | {"is_causal": False}, "pooling", "none", False, POOLS),
        (EMBEDS, "auto", "auto", False, POOLS),
        (EMBEDS, "pooling", "none", False, POOLS),
        (EMBEDS, "auto", "classify", False, ("pooling", "classify")),
        (CLASSIFIES, "auto", "auto", False, ("pooling", "classify")),
        (CLASSIFIES, "auto", "embed", False, POOLS),
        ({"architectures": ["LlamaForTokenClassification"]}, "auto", "auto", False, ("pooling", "token_classify")),
        ({"architectures": ["Qwen2ForProcessRewardModel"]}, "auto", "auto", False, ("pooling", "reward")),
        ({"architectures": ["MistralModel"]}, "auto", "auto", False, POOLS),
    ],
)
def test_runner(config: dict[str, Any], runner: str, convert: str, has_files: bool, found: tuple[str, str]) -> None:
    assert settle_runner(config, runner, convert, has_files) == found


@pytest.mark.parametrize(
    ("config", "runner", "convert", "says"),
    [
        (EMBEDS, "generate", "auto", "BertModel does not generate text. Leave it at auto"),
        (GENERATES | {"is_causal": False}, "generate", "auto", "does not generate text"),
        (GENERATES, "generate", "embed", "convert='embed' is for runner='pooling'"),
        (GENERATES, "pooling", "none", "needs convert='embed' or 'classify'"),
    ],
)
def test_what_does_not_fit(config: dict[str, Any], runner: str, convert: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settle_runner(config, runner, convert, False)
