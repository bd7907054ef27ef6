"""Kvasir: an LLM inference engine. The names below are its public surface; each is imported when first used,
so that `import kvasir` is instant and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)

_EXPORTS = {
    "LLM": "kvasir.entrypoints.llm",
    "LLMEngine": "kvasir.entrypoints.llm_engine",
    "AsyncLLM": "kvasir.entrypoints.async_llm",
    "AsyncLLMEngine": "kvasir.entrypoints.async_llm",
    "EngineArgs": "kvasir.config.args",
    "AsyncEngineArgs": "kvasir.config.args",
    "SamplingParams": "kvasir.sampling_params",
    "BeamSearchParams": "kvasir.sampling_params",
    "LoRARequest": "kvasir.lora.host",
    "StructuredOutputsParams": "kvasir.sampling_params",
    "PoolingParams": "kvasir.frontend.requests.pooling",
    "PoolingOutput": "kvasir.outputs",
    "PoolingRequestOutput": "kvasir.outputs",
    "EmbeddingOutput": "kvasir.outputs",
    "EmbeddingRequestOutput": "kvasir.outputs",
    "ClassificationOutput": "kvasir.outputs",
    "ClassificationRequestOutput": "kvasir.outputs",
    "ScoringOutput": "kvasir.outputs",
    "ScoringRequestOutput": "kvasir.outputs",
    "RequestOutput": "kvasir.outputs",
    "CompletionOutput": "kvasir.outputs",
    "TextPrompt": "kvasir.frontend.requests.prompts",
    "TokensPrompt": "kvasir.frontend.requests.prompts",
    "PromptType": "kvasir.frontend.requests.prompts",
    "ModelRegistry": "kvasir.models.architectures",
}
__all__ = ["__version__", "__version_tuple__", *_EXPORTS]

if TYPE_CHECKING:
    from kvasir.config.args import AsyncEngineArgs as AsyncEngineArgs
    from kvasir.config.args import EngineArgs as EngineArgs
    from kvasir.entrypoints.async_llm import AsyncLLM as AsyncLLM
    from kvasir.entrypoints.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from kvasir.entrypoints.llm import LLM as LLM
    from kvasir.entrypoints.llm_engine import LLMEngine as LLMEngine
    from kvasir.frontend.requests.pooling import PoolingParams as PoolingParams
    from kvasir.frontend.requests.prompts import PromptType as PromptType
    from kvasir.frontend.requests.prompts import TextPrompt as TextPrompt
    from kvasir.frontend.requests.prompts import TokensPrompt as TokensPrompt
    from kvasir.lora.host import LoRARequest as LoRARequest
    from kvasir.models.architectures import ModelRegistry as ModelRegistry
    from kvasir.outputs import ClassificationOutput as ClassificationOutput
    from kvasir.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from kvasir.outputs import CompletionOutput as CompletionOutput
    from kvasir.outputs import EmbeddingOutput as EmbeddingOutput
    from kvasir.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from kvasir.outputs import PoolingOutput as PoolingOutput
    from kvasir.outputs import PoolingRequestOutput as PoolingRequestOutput
    from kvasir.outputs import RequestOutput as RequestOutput
    from kvasir.outputs import ScoringOutput as ScoringOutput
    from kvasir.outputs import ScoringRequestOutput as ScoringRequestOutput
    from kvasir.sampling_params import BeamSearchParams as BeamSearchParams
    from kvasir.sampling_params import SamplingParams as SamplingParams
    from kvasir.sampling_params import StructuredOutputsParams as StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvasir' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_EXPORTS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
