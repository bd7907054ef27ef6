"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import ConfigDict, Field, model_validator

from kvasir.server.schema.base import Body, BoundedModel, Reply, Usage, check_metadata, example, invalid, refused
from kvasir.server.schema.field_docs import FIELD_DOCS
from kvasir.server.schema.sampling import SamplingBody, StreamOptions, TemplateVariables

_MAX_MESSAGE_ENTRIES = 64
_CALLED = frozenset({"function", "custom", "name"})  # what says which tool was called; templates may read name


class Message(BoundedModel):
    """One message. Other entries (name, tool_calls, tool_call_id, reasoning_content) go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(description="system, developer, user, assistant, tool, or another role of the chat template.")
    content: str | list[str | dict[str, Any]] | None = Field(default=None, description=FIELD_DOCS["content"])

    @model_validator(mode="before")
    @classmethod
    def _entries_are_right(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MAX_MESSAGE_ENTRIES:
            raise invalid("messages", f"A message may have at most {_MAX_MESSAGE_ENTRIES} entries.")
        calls = given.get("tool_calls") if isinstance(given, dict) else None
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise invalid("messages", "tool_calls of a message must be a list of objects.")
        if any(_CALLED.isdisjoint(call) for call in calls or ()):  # some templates would leave them out
            raise invalid("messages", "A tool call of a message needs function, or custom for a custom tool.")
        return given


class ChatTemplateFields(Body):
    """A conversation, and how the chat template renders it."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        default=None, description="Continue the last message instead of answering it."
    )
    add_special_tokens: bool | None = Field(
        default=None, description="Add special tokens to the rendered text (default: no, the template writes them)."
    )
    chat_template: str | None = Field(default=None, description="Needs --trust-request-chat-template.")
    chat_template_kwargs: TemplateVariables | None = Field(
        default=None, description="Further variables of the chat template."
    )
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class ChatRequest(SamplingBody, ChatTemplateFields):
    model_config = example(messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=32)

    model: str | None = Field(default=None, description="A name from /v1/models. Unset: the served model.")
    max_tokens: int | None = Field(default=None, ge=1, description="Older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = Field(
        default=None, description="Begin the reply with the last message, which must have the reply's role."
    )
    reasoning_effort: str | None = Field(default=None, description="Passed to chat templates that read it.")
    user: str | None = Field(default=None, description="Shown in the server's log.")
    safety_identifier: str | None = Field(default=None, description="Shown in the server's log.")
    prompt_cache_key: str | None = Field(
        default=None, description="Accepted without effect: all requests share one prefix cache."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Let the model make several calls at once.")
    tool_choice: str | dict[str, Any] | None = Field(
        default=None,
        description="none, auto (the default with tools), required, a tool by its name, or allowed_tools.",
    )
    service_tier: Any = refused("there is only one tier; use priority to order requests.", "auto", "default")
    modalities: Any = refused("the model writes only text.", ["text"])
    include_reasoning: bool | None = Field(default=None, description="Return the model's reasoning (default: yes).")
    thinking_token_budget: int | None = Field(
        default=None, ge=0, description="Most tokens of reasoning; then the marker that ends it is forced."
    )
    functions: Any = refused("it is the older form of tools; use tools.", [])
    function_call: Any = refused("it is the older form of tool_choice; use tool_choice.", "none")
    store: bool | None = Field(default=None, description="Store the completion (default: no).")
    metadata: dict[str, str] | None = Field(default=None, description="Stored with the completion. Needs store.")
    audio: Any = refused("the model writes only text.")
    prediction: Any = refused("predicted outputs are not used.")
    web_search_options: Any = refused("the server does not search the web.")
    verbosity: Any = refused("the model has no such setting.", "medium")

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "stream_options", "stream_options needs stream: set stream to true, or leave stream_options out."
            )
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true.")
        if self.logprob_token_ids and not self.logprobs:
            raise invalid("logprob_token_ids", "logprob_token_ids needs logprobs to be true.")
        if self.metadata and not self.store:
            raise invalid("metadata", "metadata is kept with stored completions: set store to true or leave it out.")
        check_metadata(self.metadata)
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens", "max_tokens is the older name of max_completion_tokens: give one of them.")
        return self


class ChatBatchRequest(ChatRequest):
    """Several conversations with the same parameters."""

    model_config = example(
        messages=[[{"role": "user", "content": "What is the capital of France?"}], [{"role": "user", "content": "Hi"}]],
        max_tokens=32,
    )

    messages: list[Annotated[list[Message], Field(min_length=1)]] = Field(  # type: ignore[assignment]
        min_length=1, description="The conversations, each a list of messages."
    )
    n: Any = refused("every conversation has one choice.", 1)
    stream: Any = refused("batches are not streamed.", False)
    use_beam_search: Any = refused("send conversations for beam search one by one.", False)
    return_token_ids: Any = refused("a choice of a batch has no prompt of its own in the reply.", False)
    prompt_logprobs: Any = refused("a choice of a batch has no prompt of its own in the reply.")
    store: Any = refused("batches are not stored.", False)

    def conversations(self) -> list[ChatRequest]:
        given = {name: getattr(self, name) for name in self.model_fields_set if name in ChatRequest.model_fields}
        return [ChatRequest.model_construct(**{**given, "messages": messages}) for messages in self.messages]


# ---------------------------------------------------------------- replies


class TopLogprob(Reply, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Reply, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CalledCustom(Reply, kw_only=True):
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ReplyCall(Reply, kw_only=True):
    """A tool call; in a stream, a piece of one."""

    index: int | UnsetType = UNSET  # in a stream
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class ReplyMessage(Reply, kw_only=True):
    role: str
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same, under its older name
    tool_calls: list[ReplyCall] | UnsetType = UNSET


class ChatChoice(Reply, kw_only=True):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Reply, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: str | None = None
    metadata: dict[str, str] | UnsetType = UNSET  # of a stored completion
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Reply, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ReplyCall] | UnsetType = UNSET


class ChunkChoice(Reply, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Reply, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
