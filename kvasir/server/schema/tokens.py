"""Bodies of /tokenize, /detokenize, /generate and the model list."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from kvasir.server.schema.base import Body, Reply, Usage, example, invalid, one_complaint, refused
from kvasir.server.schema.chat import ChatTemplateFields, Message
from kvasir.server.schema.sampling import SamplingBody

_ELSEWHERE = "use /v1/completions for log-probabilities."


class TokenizeRequest(ChatTemplateFields):
    """A prompt, or the messages of a conversation."""

    model_config = example(prompt="Once upon a time")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None  # type: ignore[assignment]  # either this or prompt
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise invalid("prompt", "Give either prompt or messages.")
        return self


class TokenizeReply(Reply, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeRequest(Body):
    model_config = example(tokens=[15, 16, 17])

    model: str | None = None
    tokens: list[int]


class DetokenizeReply(Reply, kw_only=True):
    prompt: str


class GenerateRequest(SamplingBody):
    """The plain interface: one prompt in, texts out."""

    model_config = example(prompt="Once upon a time", max_tokens=32)

    prompt: Annotated[str | list[int], one_complaint("prompt", "prompt must be a string or a list of token ids.")]
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = Field(
        default=None, description="Send a line of JSON for each new piece of text, instead of one object."
    )
    logprobs: Any = refused(_ELSEWHERE)
    prompt_logprobs: Any = refused(_ELSEWHERE)
    logprob_token_ids: Any = refused(_ELSEWHERE)
    return_tokens_as_token_ids: Any = refused(_ELSEWHERE)


class GenerateReply(Reply, kw_only=True):
    text: list[str]
    finish_reason: list[str | None]
    token_ids: list[list[int]] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


class ModelCard(Reply, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvasir"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Reply, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class MessagesModel(Reply, kw_only=True):
    """A model as Anthropic's clients read it."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # ISO 8601


class MessagesModelList(Reply, kw_only=True):
    data: list[MessagesModel]
    has_more: bool = False
    first_id: str
    last_id: str
