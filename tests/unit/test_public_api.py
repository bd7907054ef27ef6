"""The public surface, name by name. A change here is a change for every user."""

import kvasir

PUBLIC = [
    "LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine", "EngineArgs", "AsyncEngineArgs",
    "SamplingParams", "RequestOutput", "BeamSearchParams", "CompletionOutput",
    "TextPrompt", "TokensPrompt", "PromptType", "ModelRegistry", "__version__", "__version_tuple__",
]  # fmt: skip


def test_public_names() -> None:
    assert sorted(kvasir.__all__) == sorted(PUBLIC) == dir(kvasir)
    for name in PUBLIC:
        assert getattr(kvasir, name) is not None
    assert kvasir.__version__ == ".".join(map(str, kvasir.__version_tuple__))
