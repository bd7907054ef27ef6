"""Bodies of /v1/responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kvasir.server.schema.base import Body, Reply, example, invalid, refused

LOGPROBS = "message.output_text.logprobs"


class Reasoning(Body):
    effort: str | None = Field(default=None, description="Passed to chat templates that read it.")
    summary: Any = refused("reasoning is not separated from the answer yet.")
    generate_summary: Any = refused("reasoning is not separated from the answer yet.")


class TextOptions(Body):
    format: Any = refused("output cannot be constrained to a format yet.", {"type": "text"})
    verbosity: Any = refused("the model has no such setting.", "medium")


class ResponseStreamOptions(Body):
    include_obfuscation: Any = refused("events are not padded.", False)


class ResponsesRequest(Body):
    model_config = example(input="What is the capital of France?", max_output_tokens=32)

    model: str | None = Field(default=None, description="A name from /v1/models. Unset: the served model.")
    input: str | list[dict[str, Any]] = Field(
        description="A text, or a list of messages, tool calls and their outputs."
    )
    instructions: str | None = Field(default=None, description="A system message before the input.")
    previous_response_id: str | None = Field(
        default=None, description="Continue the conversation of this response, which must be stored."
    )
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(default=None, description="Store the response (default: yes, if the server stores any).")
    background: bool | None = Field(
        default=None, description="Reply at once and run in the background; poll with GET. Needs store."
    )
    metadata: dict[str, str] | None = Field(default=None, description="Stored with the response and returned with it.")
    include: list[str] | None = Field(default=None, description=f"Further output to return: only {LOGPROBS!r}.")
    top_logprobs: int | None = Field(
        default=None, ge=0, description=f"Number of likeliest tokens at each position, with include {LOGPROBS!r}."
    )
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="Accepted without effect: tools are not called yet."
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
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    timeout: float | None = Field(default=None, gt=0)
    cache_salt: str | None = None

    service_tier: Any = refused("there is only one tier; use priority to order requests.", "auto", "default")
    truncation: Any = refused("items are not dropped; shorten the input.", "disabled")
    max_tool_calls: Any = refused("tools are not called yet.")
    conversation: Any = refused("conversations are not stored; use previous_response_id.")
    context_management: Any = refused("input is not compacted.")
    prompt: Any = refused("prompts are not stored.")
    prompt_cache_retention: Any = refused("the prefix cache keeps prefixes as long as there is room.")

    @model_validator(mode="after")
    def _consistent(self) -> ResponsesRequest:
        if self.tools and self.tool_choice != "none":
            raise invalid("tools", "tools are not called yet: leave tools out, or set tool_choice to 'none'.")
        if self.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice must be 'none' for now: tools are not called yet.")
        for name in self.include or []:
            if name != LOGPROBS:
                raise invalid("include", f"include can have {LOGPROBS!r} only, not {name!r}.")
        if self.top_logprobs and LOGPROBS not in (self.include or []):
            raise invalid("top_logprobs", f"top_logprobs needs include to have {LOGPROBS!r}.")
        if self.background and self.store is False:
            raise invalid("background", "background needs store: the response could not be retrieved otherwise.")
        if self.background and self.stream:
            raise invalid("background", "background responses are not streamed: poll with GET.")
        if self.input == []:
            raise invalid("input", "input is empty: give a text, or at least one item.")
        return self


# ---------------------------------------------------------------- replies


class OutputText(Reply, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Reply, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


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
    output: list[OutputMessage]
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
