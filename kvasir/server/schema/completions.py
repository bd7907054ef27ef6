"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from kvasir.server.schema.base import MAX_TOKEN_IDS, Reply, Usage, example, invalid, one_complaint, refused
from kvasir.server.schema.sampling import PromptIds, SamplingBody, StreamOptions

_MAX_EMBEDS = 128


class CompletionRequest(SamplingBody):
    max_values = MAX_TOKEN_IDS
    model_config = example(prompt="Once upon a time", max_tokens=32)

    model: str | None = Field(default=None, description="A name from /v1/models. Unset: the served model.")
    prompt: Annotated[
        str | list[str] | PromptIds | list[PromptIds] | None,
        one_complaint(
            "prompt", "prompt must be a string, a list of strings, a list of token ids or a list of such lists."
        ),
    ] = Field(default=None, description="Text or token ids; one prompt or a list of prompts.")
    prompt_embeds: str | Annotated[list[str], Field(min_length=1, max_length=_MAX_EMBEDS)] | None = Field(
        default=None,
        description="A tensor [tokens, hidden] in place of a prompt's tokens, as torch.save or safetensors writes it, "
        "in base64; or a list of them. Their choices come before those of prompt. Needs --enable-prompt-embeds.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Maximum number of output tokens (default 16). 0 only with echo, to score the prompt.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = Field(default=None, description="Begin the text with the prompt.")
    add_special_tokens: bool | None = Field(
        default=None, description="Add the tokenizer's special tokens (default: yes)."
    )
    user: str | None = Field(default=None, description="Shown in the server's log.")
    suffix: Any = refused("text is completed only at its end.", "")

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "stream_options", "stream_options needs stream: set stream to true, or leave stream_options out."
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise invalid("logprob_token_ids", "logprob_token_ids needs logprobs: set it to 0 or more.")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "max_tokens must be at least 1, or 0 with echo.")
        if self.prompt is None and self.prompt_embeds is None:
            raise invalid("prompt", "prompt is missing.")
        if self.prompt in ([], [[]]) and self.prompt_embeds is None:
            raise invalid("prompt", "prompt is empty: give at least one.")
        if self.prompt_embeds is not None and self.echo:
            raise invalid("echo", "echo is for text: prompt_embeds has none.")
        return self


class CompletionLogprobs(Reply, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Reply, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class Completion(Reply, kw_only=True):
    """A whole completion, or a chunk of a stream, which has the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
