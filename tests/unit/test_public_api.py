"""The public surface, name by name. A change here is a change for every user."""

import pytest

import kvasir
from kvasir.errors import ConfigError

PUBLIC = [
    "LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine", "EngineArgs", "AsyncEngineArgs",
    "SamplingParams", "StructuredOutputsParams", "RequestOutput", "BeamSearchParams", "CompletionOutput", "LoRARequest",
    "PoolingParams", "PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput",
    "ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput",
    "TextPrompt", "TokensPrompt", "PromptType", "ModelRegistry", "__version__", "__version_tuple__",
]  # fmt: skip


def test_public_names() -> None:
    assert sorted(kvasir.__all__) == sorted(PUBLIC) == dir(kvasir)
    for name in PUBLIC:
        assert getattr(kvasir, name) is not None
    assert kvasir.__version__ == ".".join(map(str, kvasir.__version_tuple__))


@pytest.mark.parametrize("name", ["LLM", "LLMEngine", "AsyncLLM"])
def test_engine_args_are_a_keyword_as_in_vllm(name: str) -> None:
    with pytest.raises(ConfigError, match="/nope"):
        getattr(kvasir, name).from_engine_args(engine_args=kvasir.EngineArgs("/nope"))


def test_the_engine_loop_cannot_wait() -> None:
    with pytest.raises(ConfigError, match="start_engine_loop=False is not possible"):
        kvasir.AsyncLLM.from_engine_args(kvasir.EngineArgs("/nope"), start_engine_loop=False)
