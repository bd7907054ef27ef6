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
    "RequestOutput": "kvasir.outputs",
    "CompletionOutput": "kvasir.outputs",
    "TextPrompt": "kvasir.frontend.requests.prompts",
    "TokensPrompt": "kvasir.frontend.requests.prompts",
    "PromptType": "kvasir.frontend.requests.prompts",
    "ModelRegistry": "kvasir.models.registry",
}
__all__ = ["__version__", "__version_tuple__", *_EXPORTS]

if TYPE_CHECKING:
    from kvasir.config.args import AsyncEngineArgs as AsyncEngineArgs
    from kvasir.config.args import EngineArgs as EngineArgs
    from kvasir.entrypoints.async_llm import AsyncLLM as AsyncLLM
    from kvasir.entrypoints.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from kvasir.entrypoints.llm import LLM as LLM
    from kvasir.entrypoints.llm_engine import LLMEngine as LLMEngine
    from kvasir.frontend.requests.prompts import PromptType as PromptType
    from kvasir.frontend.requests.prompts import TextPrompt as TextPrompt
    from kvasir.frontend.requests.prompts import TokensPrompt as TokensPrompt
    from kvasir.models.registry import ModelRegistry as ModelRegistry
    from kvasir.outputs import CompletionOutput as CompletionOutput
    from kvasir.outputs import RequestOutput as RequestOutput
    from kvasir.sampling_params import BeamSearchParams as BeamSearchParams
    from kvasir.sampling_params import SamplingParams as SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvasir' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_EXPORTS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
