"""Anthropic's conversations as those that chat templates know."""

from __future__ import annotations

import json
from typing import Any

from kvasir.errors import RequestError
from kvasir.server.schema.chat import Message
from kvasir.server.schema.messages import AnthropicMessage, CountTokensRequest

# What a block of each kind may have. cache_control asks for what is done anyway.
_KEYS = {
    "text": {"type", "text", "cache_control"},
    "tool_use": {"type", "id", "name", "input", "cache_control"},
    "tool_result": {"type", "tool_use_id", "content", "is_error", "cache_control"},
}


def conversation(body: CountTokensRequest) -> tuple[list[Message], bool]:
    """The messages, and whether the last one is an assistant's that the model is to go on with."""
    found: list[Message] = []
    if body.system:
        found.append(Message(role="system", content=_text(body.system, "system")))
    for message in body.messages:
        found += _messages(message)
    return found, body.messages[-1].role == "assistant"


def _messages(message: AnthropicMessage) -> list[Message]:
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results = [part for part in message.content if part.get("type") == "tool_result"]
    calls = [part for part in message.content if part.get("type") == "tool_use"]
    rest = [part for part in message.content if part.get("type") not in ("tool_result", "tool_use")]
    found = [_result(part) for part in results]
    if rest or calls or not results:
        made: dict[str, Any] = {"role": message.role, "content": _text(rest, "messages") if rest else ""}
        if calls:
            made["tool_calls"] = [_call(part) for part in calls]
        found.append(Message(**made))
    return found


def _result(part: dict[str, Any]) -> Message:
    _check_keys(part, "messages")
    text = _text(part.get("content") or "", "messages")
    failed = part.get("is_error")
    if not isinstance(failed, bool | None):
        raise RequestError("is_error of a tool_result must be true or false.", "messages")
    if failed:
        text = f"Error: {text}"  # templates know results only, so the text has to say it
    made = {"role": "tool", "content": text, "tool_call_id": str(part.get("tool_use_id", ""))}
    return Message.model_validate(made)


def _call(part: dict[str, Any]) -> dict[str, Any]:
    _check_keys(part, "messages")
    function = {"name": str(part.get("name", "")), "arguments": json.dumps(part.get("input", {}))}
    return {"id": str(part.get("id", "")), "type": "function", "function": function}


def _text(content: object, where: str) -> str:
    """The text of content blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("Content must be a text or a list of blocks.", where)
    texts = []
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise RequestError(f"Content blocks of type {kind!r} are not supported: this model takes text only.", where)
        _check_keys(block, where)
        texts.append(block["text"])
    return "\n".join(texts)


def _check_keys(block: dict[str, Any], where: str) -> None:
    """Nothing in a block is overlooked. Null and an empty list ask for nothing."""
    for name, value in block.items():
        if name not in _KEYS[block["type"]] and value not in (None, []):
            raise RequestError(f"A {block['type']} block cannot have {name} here.", where)
