"""Bodies of /tokenize, /detokenize, /generate and the model list."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from kvasir.server.schema.base import MAX_TOKEN_IDS, Body, Reply, Usage, example, invalid, one_complaint, refused
from kvasir.server.schema.chat import ChatTemplateFields, Message
from kvasir.server.schema.sampling import PromptIds, SamplingBody

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
    max_values = MAX_TOKEN_IDS
    model_config = example(tokens=[15, 16, 17])

    model: str | None = None
    tokens: PromptIds


class DetokenizeReply(Reply, kw_only=True):
    prompt: str


class GenerateRequest(SamplingBody):
    """The plain interface: one prompt in, texts out."""

    max_values = MAX_TOKEN_IDS
    model_config = example(prompt="Once upon a time", max_tokens=32)

    prompt: Annotated[str | PromptIds, one_complaint("prompt", "prompt must be a string or a list of token ids.")]
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


class ScoringRequest(Body):
    """Items to be scored by a query about them."""

    model_config = example(query="Is this a city? ", items=["Paris", "Bread"], label_token_ids=[15, 16])

    model: str | None = None
    query: Annotated[str | list[int], one_complaint("query", "query must be a string or a list of token ids.")]
    items: Annotated[
        list[str] | list[list[int]],
        one_complaint("items", "items must be a list of strings or of lists of token ids."),
    ] = Field(min_length=1)
    label_token_ids: list[int] = Field(
        min_length=1, max_length=1024, description="The score is the probability of the first of these tokens."
    )
    apply_softmax: bool | None = Field(
        default=None, description="Probabilities among the labels (default), or among all tokens."
    )
    item_first: bool | None = Field(default=None, description="Put the item before the query instead of behind it.")
    add_special_tokens: bool | None = Field(default=None, description="Add special tokens to the query (default: yes).")
    priority: int | None = Field(default=None, description="Lower goes first; needs --scheduling-policy priority.")
    timeout: float | None = Field(default=None, gt=0)
    request_id: str | None = None


class ItemScore(Reply, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoringReply(Reply, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage


class LoadAdapterRequest(Body):
    """An adapter to serve: a PEFT directory on the server's machine, or a name on the Hugging Face Hub."""

    model_config = example(lora_name="my-adapter", lora_path="/adapters/my-adapter")

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1)
    task_id: int | None = None  # of a multitask prompt
    load_inplace: bool | None = None  # replace an adapter of this name


class UnloadAdapterRequest(Body):
    model_config = example(lora_name="my-adapter")

    lora_name: str


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
