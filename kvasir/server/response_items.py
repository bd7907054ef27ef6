"""Items of /v1/responses as the messages of a conversation."""

from __future__ import annotations

from typing import Any

from kvasir.errors import RequestError
from kvasir.server.schema.chat import Message


def messages_of(given: str | list[dict[str, Any]], instructions: str | None, before: list[Message]) -> list[Message]:
    """`before` is the conversation so far; its instructions do not carry over, as OpenAI has it."""
    start = [] if instructions is None else [Message(role="system", content=instructions)]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [*start, *before, *(_message(item) for item in items)]


def _message(item: dict[str, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        return _plain(item)
    if kind == "function_call":
        function = {"name": _text(item, "name"), "arguments": _text(item, "arguments")}
        call = {"id": _text(item, "call_id"), "type": "function", "function": function}
        return Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    if kind == "function_call_output":
        return Message.model_validate(
            {"role": "tool", "content": _output(item), "tool_call_id": _text(item, "call_id")}
        )
    message = f"Input items of type {kind!r} are not supported; messages, function_call and function_call_output are."
    raise RequestError(message, "input")


def _plain(item: dict[str, Any]) -> Message:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise RequestError("A message in input must have a role and content.", "input")
    if isinstance(content, list) and not all(isinstance(part, str | dict) for part in content):
        raise RequestError("A message's content must be a text or a list of content parts.", "input")
    return Message(role=role, content=content)


def _output(item: dict[str, Any]) -> str | list[str | dict[str, Any]]:
    output = item.get("output")
    if isinstance(output, str):
        return output
    if isinstance(output, list) and all(isinstance(part, str | dict) for part in output):
        return output
    raise RequestError("A function_call_output must have output, a text.", "input")


def _text(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"An item of type {item['type']!r} must have {name}, a text.", "input")
    return value
