"""The server that is measured: what it serves, whether it is ready, how a request to it is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from kvasir import hub
from kvasir.bench.serve.http import Target
from kvasir.bench.serve.prompts import Prompt
from kvasir.config import LoadConfig, ModelConfig
from kvasir.errors import ConfigError, ModelError
from kvasir.frontend.tokenizer import Tokenizer
from kvasir.frontend.tokenizer_files import load_tokenizer
from kvasir.log import get_logger

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
logger = get_logger(__name__)
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Served:
    name: str
    root: str | None  # where the server has it from
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    base_url: str
    path: str
    is_chat: bool
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        return Target(self.base_url.rstrip("/") + self.path, self.headers)

    def served(self, patience: float) -> list[Served]:
        """What /v1/models says, as soon as the server is ready to say it."""
        end, told = time.monotonic() + patience, False
        while True:
            try:
                answer = httpx.get(self.base_url.rstrip("/") + "/v1/models", headers=dict(self.headers), timeout=30)
                if answer.is_success:
                    return [_served(entry) for entry in answer.json()["data"]]
                problem = f"HTTP {answer.status_code}: {answer.text[:200]}"
                if answer.is_client_error:
                    break
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() >= end:
                break
            if not told:
                logger.warning("waiting up to %g s for %s (%s)", patience, self.base_url, problem)
                told = True
            time.sleep(_POLL_SECONDS)
        raise ConfigError(f"{self.base_url}/v1/models does not say what is served ({problem}).")

    def body(self, model: str, prompt: Prompt, fields: Mapping[str, Any]) -> bytes:
        made: dict[str, Any] = {"model": model}
        if self.is_chat:
            made |= {"messages": [{"role": "user", "content": prompt.content}]}
            made |= {"max_completion_tokens": prompt.max_tokens}
        else:
            made |= {"prompt": prompt.content, "max_tokens": prompt.max_tokens}
        made |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(made | dict(fields))


def _served(entry: Mapping[str, Any]) -> Served:
    return Served(str(entry["id"]), entry.get("root"), entry.get("max_model_len"))


def find_tokenizer(asked: str | None, model: str | None, served: Served) -> Tokenizer:
    """The one asked for; else the model's, by the name given here or by the server."""
    names = [asked] if asked else [name for name in (model, served.root, served.name) if name]
    local = [name for name in names if Path(name).expanduser().exists()]
    try:
        path = hub.find_tokenizer(ModelConfig((local or names)[0]), LoadConfig())
        return load_tokenizer(path)
    except ModelError as error:
        raise ConfigError(f"No tokenizer to make prompts with: {error} Name one with --tokenizer.") from None
