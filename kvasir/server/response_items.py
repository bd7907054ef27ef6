"""The output of a response as items: reasoning, a message, tool calls; and the items of an input as messages.

Parts of the answer become items as they come, each with the events that OpenAI's clients know it by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvasir.errors import RequestError
from kvasir.parsers.base import Content, OutputPart, Reasoning, ToolCall
from kvasir.server.answers import ChatAnswer
from kvasir.server.http import new_id
from kvasir.server.schema.chat import Message
from kvasir.server.schema.responses import (
    CustomCallItem,
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

Event = tuple[str, dict[str, Any]]  # its type without "response.", and its fields


class OutputItems:
    """The items of one response, while its answer comes."""

    def __init__(self, answer: ChatAnswer) -> None:
        self.items: list[OutputItem] = []
        self._answer = answer
        self._is_open = False  # the last item still grows

    def add(self, parts: Sequence[OutputPart], logprobs: list[Any]) -> Iterator[Event]:
        """Add parts, and log-probabilities of the new tokens; yield what happens."""
        is_plain = self._answer.is_plain
        if logprobs and is_plain and not any(isinstance(part, Content) for part in parts):
            parts = [*parts, Content("")]
        for part in parts:
            if isinstance(part, Content):
                yield from self._text(part.text, logprobs)
                logprobs = []
            elif isinstance(part, Reasoning):
                yield from self._reason(part.text)
            elif isinstance(part, ToolCall):
                yield from self.close()
                yield from self._begin(self._call(part))
            else:
                yield from self._arguments(part.text)

    def finish(self, status: str) -> Iterator[Event]:
        """The answer has ended. It always has an item."""
        if not self.items:
            yield from self._text("", [])
        yield from self.close(status)

    # ------------------------------------------------------------ items grow

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        self.items.append(item)
        self._is_open = True
        shown: dict[str, Any] = {"content": []} if isinstance(item, OutputMessage | ReasoningItem) else {}
        yield "output_item.added", {"output_index": self._index, "item": _with(item, **shown)}
        if isinstance(item, OutputMessage | ReasoningItem):
            yield "content_part.added", {**self._place, "part": _with(item.content[0])}

    def _text(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        if not (self._is_open and isinstance(self.items[-1], OutputMessage)):
            yield from self.close()
            part = OutputText(text="", annotations=[], logprobs=[])
            yield from self._begin(OutputMessage(id=f"msg_{new_id()}", status="in_progress", content=[part]))
        item = self.items[-1]
        assert isinstance(item, OutputMessage), "a message is open"
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        if text or logprobs:
            yield "output_text.delta", {**self._place, "delta": text, "logprobs": logprobs}

    def _reason(self, text: str) -> Iterator[Event]:
        if not (self._is_open and isinstance(self.items[-1], ReasoningItem)):
            yield from self.close()
            item = ReasoningItem(id=f"rs_{new_id()}", content=[ReasoningText(text="")], status="in_progress")
            yield from self._begin(item)
        found = self.items[-1]
        assert isinstance(found, ReasoningItem), "reasoning is open"
        found.content[0].text += text
        yield "reasoning_text.delta", {**self._place, "delta": text}

    def _call(self, part: ToolCall) -> FunctionCallItem | CustomCallItem:
        if self._answer.is_custom(part.name):
            return CustomCallItem(id=f"ctc_{new_id()}", call_id=part.id, name=part.name, input="", status="in_progress")
        return FunctionCallItem(
            id=f"fc_{new_id()}", call_id=part.id, name=part.name, arguments="", status="in_progress"
        )

    def _arguments(self, text: str) -> Iterator[Event]:
        item = self.items[-1]
        if isinstance(item, CustomCallItem):
            item.input += text
            yield "custom_tool_call_input.delta", {**self._item, "delta": text}
        elif isinstance(item, FunctionCallItem):
            item.arguments += text
            yield "function_call_arguments.delta", {**self._item, "delta": text}

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The open item is done."""
        if not self._is_open:
            return
        item = self.items[-1]
        self._is_open = False
        item.status = status
        if isinstance(item, OutputMessage):
            part = item.content[0]
            yield "output_text.done", {**self._place, "text": part.text, "logprobs": part.logprobs}
            yield "content_part.done", {**self._place, "part": part}
        elif isinstance(item, ReasoningItem):
            yield "reasoning_text.done", {**self._place, "text": item.content[0].text}
            yield "content_part.done", {**self._place, "part": item.content[0]}
        elif isinstance(item, CustomCallItem):
            yield "custom_tool_call_input.done", {**self._item, "input": item.input}
        else:
            yield "function_call_arguments.done", {**self._item, "arguments": item.arguments, "name": item.name}
        yield "output_item.done", {"output_index": self._index, "item": item}

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    @property
    def _item(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": self._index}

    @property
    def _place(self) -> dict[str, Any]:
        return {**self._item, "content_index": 0}

    # ------------------------------------------------------------ as input of the next turn

    def as_input(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for item in self.items:
            if isinstance(item, OutputMessage):
                text = item.content[0].text
                found.append({"type": "message", "id": item.id, "role": "assistant", "content": text})
            elif isinstance(item, ReasoningItem):
                content = [{"type": "reasoning_text", "text": item.content[0].text}]
                found.append({"type": "reasoning", "id": item.id, "summary": [], "content": content})
            else:
                found.append(_with(item))
        return found


def _with(struct: Any, **changed: Any) -> dict[str, Any]:
    """A struct as it is now: events are encoded later than the struct changes."""
    return {**msgspec.to_builtins(struct), **changed}


# ---------------------------------------------------------------- items of the input


def messages_of(items: list[dict[str, Any]]) -> list[Message]:
    """The messages of a conversation. Reasoning, a text and calls in a row are one message of the assistant's."""
    made: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _thought(item)
            continue
        message = _message(item, str(kind))
        if message["role"] == "assistant":
            last = made[-1] if made and made[-1]["role"] == "assistant" else None
            if last is not None and message.get("tool_calls"):
                last.setdefault("tool_calls", []).extend(message["tool_calls"])  # there may be thousands in a row
                continue
            if thought:
                message["reasoning_content"] = thought
        thought = ""
        made.append(message)
    return [Message.model_validate(message) for message in made]


def as_listed(item: dict[str, Any]) -> dict[str, Any]:
    """An item as OpenAI lists it: with its status, and a message's text as a content part."""
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": kind, "text": content, **({"annotations": []} if kind == "output_text" else {})}]
    return {"status": "completed", **item, **({} if content is None else {"content": content})}


_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def _message(item: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "message":
        return _plain(item)
    if kind in _CALLS:
        given: Any = _text(item, _CALLS[kind])
        function = {"name": _text(item, "name"), "arguments": given if kind == "function_call" else {"input": given}}
        call = {"id": _text(item, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind in _OUTPUTS:
        return {"role": "tool", "content": _output(item), "tool_call_id": _text(item, "call_id")}
    known = ", ".join(("message", "reasoning", *_CALLS, *_OUTPUTS))
    raise RequestError(f"Input items of type {kind!r:.80} are not supported; use {known}.", "input")


def _thought(item: dict[str, Any]) -> str:
    found = []
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list):
            found = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if found:
            break
    return "\n".join(found)


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise RequestError("A message in input must have a role and content.", "input")
    if isinstance(content, list) and not all(isinstance(part, str | dict) for part in content):
        raise RequestError("A message's content must be a string or a list of content parts.", "input")
    message = {name: value for name, value in item.items() if name not in ("type", "id", "status", "phase")}
    calls = message.pop("tool_calls", None)
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise RequestError("tool_calls of a message in input must be a list.", "input")
    return {**message, "tool_calls": [*calls]}  # a list of its own, to which calls that follow are added


def _output(item: dict[str, Any]) -> str | list[str | dict[str, Any]]:
    output = item.get("output")
    if isinstance(output, str):
        return output
    if isinstance(output, list) and all(isinstance(part, str | dict) for part in output):
        return output
    raise RequestError(f"A {item['type']} must have output, a string.", "input")


def _text(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"An item of type {item['type']!r} must have {name}, a string.", "input")
    return value
