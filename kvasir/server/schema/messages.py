"""Bodies of /v1/messages, Anthropic's interface."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from kvasir.server.schema.base import Body, BoundedModel, Reply, example, invalid, refused
from kvasir.server.schema.field_docs import FIELD_DOCS
from kvasir.server.schema.sampling import CacheSalt, TemplateVariables


class AnthropicMessage(BoundedModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["user", "assistant", "system"] = Field(description=FIELD_DOCS["role"])
    content: str | list[dict[str, Any]] = Field(description=FIELD_DOCS["content"])


class Thinking(Body):
    """Whether the model reasons, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="Whether the model reasons.")
    budget_tokens: int | None = Field(default=None, ge=0, description="Most tokens of reasoning.")
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted: do not return the reasoning."
    )


class CountTokensRequest(Body):
    model_config = example(model="MODEL", messages=[{"role": "user", "content": "What is the capital of France?"}])

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = Field(default=None, description="Whether the model reasons, and how long.")
    output_config: dict[str, Any] | None = Field(
        default=None, description="format: the form of the output, of type json_schema with a schema."
    )
    output_format: dict[str, Any] | None = Field(default=None, description="Older form of output_config.format.")
    cache_control: Any = refused("prefixes are cached without marks.", {"type": "ephemeral"})
    context_management: Any = refused("the server does not edit conversations.")
    mcp_servers: Any = refused("the server calls no other servers.", [])


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
    cache_salt: CacheSalt | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _known_metadata(self) -> MessagesRequest:
        for name in self.metadata or {}:
            if name != "user_id":
                raise invalid("metadata", f"metadata can have user_id only, not {name!r}.")
        return self


class TextBlock(Reply, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Reply, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # reasoning is not signed here


class ToolUseBlock(Reply, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any


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
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class CountTokensReply(Reply, kw_only=True):
    input_tokens: int
