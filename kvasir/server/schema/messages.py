"""Bodies of /v1/messages, Anthropic's interface."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvasir.server.schema.base import Body, Reply, example, invalid, refused
from kvasir.server.schema.field_docs import FIELD_DOCS

_TOOLS = "tools are not called yet: leave tools out, or set tool_choice to {'type': 'none'}."


class AnthropicMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["user", "assistant", "system"] = Field(description=FIELD_DOCS["role"])
    content: str | list[dict[str, Any]] = Field(description=FIELD_DOCS["content"])


class CountTokensRequest(Body):
    model_config = example(model="MODEL", messages=[{"role": "user", "content": "What is the capital of France?"}])

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Any = refused("reasoning is not separated from the answer yet.", {"type": "disabled"})
    output_config: Any = refused("output cannot be constrained to a format yet.", {})
    output_format: Any = refused("output cannot be constrained to a format yet.")
    cache_control: Any = refused("prefixes are cached without marks.", {"type": "ephemeral"})
    context_management: Any = refused("the server does not edit conversations.")
    mcp_servers: Any = refused("the server calls no other servers.", [])

    @model_validator(mode="after")
    def _no_tools(self) -> CountTokensRequest:
        kind = (self.tool_choice or {}).get("type")
        if self.tools and kind != "none":
            raise invalid("tools", _TOOLS)
        if kind not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice must be {'type': 'none'} for now: tools are not called yet.")
        return self


class MessagesRequest(CountTokensRequest):
    model_config = example(
        model="MODEL", messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=32
    )

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = Field(default=None, description="user_id is shown in the server's log.")
    service_tier: Any = refused("there is only one tier.", "auto", "standard_only")
    container: Any = refused("the server runs no code.")
    inference_geo: Any = refused("the server runs in one place.")
    speed: Any = refused("there is only one speed.", "standard")
    # not in Anthropic's interface
    timeout: float | None = Field(default=None, gt=0)
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _known_metadata(self) -> MessagesRequest:
        for name in self.metadata or {}:
            if name != "user_id":
                raise invalid("metadata", f"metadata can have user_id only, not {name!r}.")
        return self


class TextBlock(Reply, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class MessageUsage(Reply, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class MessageReply(Reply, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class CountTokensReply(Reply, kw_only=True):
    input_tokens: int
