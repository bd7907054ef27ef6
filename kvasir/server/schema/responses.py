"""Bodies of /v1/responses."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from pydantic import Field, model_validator

from kvasir.server.schema.base import Body, Reply, check_metadata, example, invalid, refused
from kvasir.server.schema.sampling import CacheSalt, ConstraintFields, TemplateVariables

LOGPROBS = "message.output_text.logprobs"
# Details of items that no response has here, so these ask for nothing. Clients send some of them with every request.
_ABSENT = frozenset(
    {
        *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
        *("web_search_call.action.sources", "code_interpreter_call.outputs"),
        *("computer_call_output.output.image_url", "message.input_image.image_url"),
    }
)


class ReasoningOptions(Body):
    effort: str | None = Field(default=None, description="Passed to chat templates that read it.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Accepted without effect: reasoning is returned whole, as text."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Older name of summary."
    )


class TextOptions(Body):
    format: dict[str, Any] | None = Field(
        default=None, description="Form of the output: type text, json_object or json_schema."
    )
    verbosity: Any = refused("the model has no such setting.", "medium")


class ResponseStreamOptions(Body):
    include_obfuscation: Any = refused("events are not padded.", False)


class PromptFields(Body):
    """What the prompt of a response is made of."""

    model: str | None = Field(default=None, description="A name from /v1/models. Unset: the served model.")
    instructions: str | None = Field(default=None, description="A system message before the input.")
    previous_response_id: str | None = Field(
        default=None, description="Continue the conversation of this response, which must be stored."
    )
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="Let the model make several calls at once.")
    chat_template_kwargs: TemplateVariables | None = None
    truncation: Any = refused("items are not dropped; shorten the input.", "disabled")
    conversation: Any = refused("conversations are not stored; use previous_response_id.")


class InputTokensRequest(PromptFields):
    model_config = example(input="What is the capital of France?")

    input: str | list[dict[str, Any]] | None = Field(default=None, description="As in /v1/responses.")
    personality: Any = refused("the model has no such setting.")

    @model_validator(mode="after")
    def _not_empty(self) -> InputTokensRequest:
        if not self.input and self.instructions is None and self.previous_response_id is None:
            raise invalid("input", "input is empty: give a text, or at least one item.")
        return self


class ResponsesRequest(PromptFields, ConstraintFields):
    model_config = example(input="What is the capital of France?", max_output_tokens=32)

    input: str | list[dict[str, Any]] = Field(
        description="A text, or a list of messages, tool calls and their outputs."
    )
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(default=None, description="Store the response (default: yes, if the server stores any).")
    background: bool | None = Field(
        default=None,
        description="Reply at once and run in the background; poll with GET. Needs store. With stream, the events can "
        "also be followed with GET.",
    )
    metadata: dict[str, str] | None = Field(default=None, description="Stored with the response and returned with it.")
    include: list[str] | None = Field(
        default=None,
        description=f"Further output to return: {LOGPROBS!r}. OpenAI's other values are accepted; they are about "
        "encrypted reasoning, tools of OpenAI's and images, which no response has.",
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, description=f"Number of likeliest tokens at each position, with include {LOGPROBS!r}."
    )
    user: str | None = Field(default=None, description="Shown in the server's log.")
    safety_identifier: str | None = Field(default=None, description="Shown in the server's log.")
    prompt_cache_key: str | None = Field(
        default=None, description="Accepted without effect: all requests share one prefix cache."
    )

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    priority: int | None = None
    timeout: float | None = Field(default=None, gt=0)
    cache_salt: CacheSalt | None = None

    service_tier: Any = refused("there is only one tier; use priority to order requests.", "auto", "default")
    max_tool_calls: Any = refused("it limits tools that a server calls itself, and this one calls none.")
    include_reasoning: bool | None = Field(default=None, description="Return the model's reasoning (default: yes).")
    thinking_token_budget: int | None = Field(
        default=None, ge=0, description="Most tokens of reasoning; then the marker that ends it is forced."
    )
    response_format: Any = refused("say it as text.format.", {"type": "text"})
    context_management: Any = refused("input is not compacted.")
    prompt: Any = refused("prompts are not stored.")
    prompt_cache_retention: Any = refused("the prefix cache keeps prefixes as long as there is room.")

    @model_validator(mode="after")
    def _consistent(self) -> ResponsesRequest:
        for name in self.include or []:
            if name != LOGPROBS and name not in _ABSENT:
                raise invalid("include", f"include knows {', '.join(sorted({LOGPROBS, *_ABSENT}))}, not {name!r}.")
        if self.top_logprobs and LOGPROBS not in (self.include or []):
            raise invalid("top_logprobs", f"top_logprobs needs include to have {LOGPROBS!r}.")
        if self.background and self.store is False:
            raise invalid("background", "background needs store: the response could not be retrieved otherwise.")
        check_metadata(self.metadata)
        if self.input == []:
            raise invalid("input", "input is empty: give a text, or at least one item.")
        return self


# ---------------------------------------------------------------- replies


class OutputText(Reply, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Reply, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningText(Reply, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(Reply, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText]
    status: str


class FunctionCallItem(Reply, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class CustomCallItem(Reply, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: str


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class InputDetails(Reply, kw_only=True):
    cached_tokens: int


class OutputDetails(Reply, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(Reply, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Reply, kw_only=True):
    code: str
    message: str


class ResponseReply(Reply, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: float
    status: str  # queued, in_progress, completed, incomplete, cancelled, failed
    background: bool
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class InputTokensReply(Reply, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItemList(Reply, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
