"""Renders chat messages with a Jinja template, with the same result as transformers. API process; needs no tokenizer.

A template is a program from a model's repository or from a client, so it runs in a sandbox (compiled_template.py) and
gets only plain JSON data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvasir.errors import RequestError, did_you_mean
from kvasir.frontend.text.compiled_template import (
    ROLES,
    CompiledTemplate,
    Message,
    parse_arguments,
    with_function_calls,
)

# Added to the message to be continued before rendering, so that the text behind it can be cut off. Its trailing space
# shows whether the template trims messages.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Names of the reasoning of a message. Clients send any of them, and every template reads one of them.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# Fields of messages that templates need not read: names and ids, and what servers add to their replies. Reasoning
# is among them, because models are trained to answer without that of earlier turns.
_MESSAGE_FIELDS = (
    *("role", "content", "name", "tool_calls", "tool_call_id", *_REASONING_FIELDS),
    *("annotations", "reasoning_details", "provider_specific_fields", "cache_control", "id", "type", "status"),
)
# The same for content parts.
_PART_FIELDS = ("type", "text", "refusal", "annotations", "logprobs", "cache_control", "id", "index")


class ChatTemplate(CompiledTemplate):
    """Renders conversations. Use `compile_template`, which caches templates."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render the conversation. `variables` are the special tokens and other variables of the template."""
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other; set only one."
            raise RequestError(message, "continue_final_message")
        given = _checked(messages)
        if continue_final_message and given[-1].get("content") is None:
            raise _nothing_to_continue()
        chat = [self._adapt(message) for message in given]
        arguments = {
            "tools": _plain_mappings("tools", tools),
            "documents": _plain_mappings("documents", documents),
            "add_generation_prompt": add_generation_prompt,
            **_plain(variables),
        }
        if continue_final_message:
            return self._render_open_ended(chat, arguments)
        return self._render(chat, arguments)

    def _render(self, chat: list[Message], arguments: dict[str, Any]) -> str:
        try:
            return self._template.render(messages=chat, **arguments)
        except Exception as error:  # a failing template is an error of the request
            reason = str(error) or type(error).__name__
            raise RequestError(f"The chat template cannot render these messages: {reason}", "messages") from error

    def _render_open_ended(self, chat: list[Message], arguments: dict[str, Any]) -> str:
        """Render up to the end of the last message's content, so that the model continues it."""
        content = _tag_end(chat[-1])
        text = self._render(chat, arguments)
        tag = _CONTINUE_TAG.strip()
        if content.strip() not in text or tag not in text:
            message = "continue_final_message is set, but the chat template does not show the final message's content."
            raise RequestError(message, "continue_final_message")
        end = text.rindex(tag)
        # Without the tag's space the template has trimmed the message, so its own trailing space is removed too.
        return text[:end] if text.startswith(_CONTINUE_TAG, end) else text[:end].rstrip()

    def _adapt(self, message: Message) -> Message:
        """Convert a message from the form of OpenAI's API to the form that the template reads."""
        self._check_role(message["role"])
        message = _with_parsed_arguments(self._with_supported_content(message))
        if not message.keys().isdisjoint(_REASONING_FIELDS):
            message = self._with_reasoning(message)
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}  # the older name of this role
        return message

    def _check_role(self, role: str) -> None:
        """Refuse misspelt roles, which many templates would print unchanged."""
        is_word = role.isprintable() and bool(role.strip())
        if role in ROLES or (is_word and role in self._source):
            return
        near = did_you_mean(role, ROLES)
        if near or not is_word:
            known = f" Known ones are {', '.join(sorted(ROLES))}."
            raise RequestError(f"{role!r} is not a role.{near or known}", "messages")

    def _with_reasoning(self, message: Message) -> Message:
        """Give the message its reasoning under every name, in a form that the template takes."""
        given = {name: message[name] for name in _REASONING_FIELDS if name in message}
        for name, value in given.items():
            if not isinstance(value, str):
                raise RequestError(f"{name} of a message must be a string.", "messages")
        reasoning = next(filter(None, given.values()), "")
        if not reasoning:
            return message
        content = message.get("content")
        has_both = isinstance(content, str) and content != "" and bool(message.get("tool_calls"))
        if has_both and not self._takes_reasoning_beside_text:
            reasoning, message = f"{reasoning}\n\n{content}", {**message, "content": ""}
        return {**message, **dict.fromkeys(_REASONING_FIELDS, reasoning)}

    def _with_supported_content(self, message: Message) -> Message:
        """Convert content parts to text, or text to parts, if the template supports only the other form."""
        content = message.get("content")
        if isinstance(content, list):
            texts = [part_text(part) for part in content]
            if not self._shows_parts:
                return {**message, "content": "\n".join(texts)}
            return {**message, "content": [{"type": "text", "text": text} for text in texts]}
        if isinstance(content, str) and self._shows_parts and not self._shows_strings:
            return {**message, "content": [{"type": "text", "text": content}]}
        if content is None:
            takes_null = self._takes_null_with_calls if message.get("tool_calls") else self._takes_null
            return {**message, "content": None if takes_null else ""}
        return message


@lru_cache(maxsize=64)
def compile_template(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def choose_template(own: str | Mapping[str, str] | None, asked: str | None, with_tools: bool) -> str:
    """The template to use: the requested one, given by name or as text, or else the model's own."""
    if isinstance(own, Mapping):
        if asked is not None:
            return own.get(asked, asked)
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in own:
                return own[name]
        message = f"The model has several chat templates; set chat_template to one of {', '.join(sorted(own))}."
        raise RequestError(message, "chat_template")
    template = own if asked is None else asked
    if template is None:
        message = "The model has no chat template; pass one as chat_template (Jinja text), or send a plain prompt."
        raise RequestError(message, "chat_template")
    return template


def check_reads(
    source: str, messages: Sequence[Mapping[str, Any]], given: Mapping[str, object]
) -> Sequence[Mapping[str, Any]]:
    """Raise if the template does not read a given input, because it would be ignored. Returns the messages to render.

    Tool calls that the template does not read are written into the content, if its text says how the model writes them.
    """
    template = compile_template(source)
    for name, value in given.items():
        if value and not template.reads(name):
            raise _unread(name, name)
    return [_check_message(template, message) if isinstance(message, Mapping) else message for message in messages]


def _check_message(template: ChatTemplate, message: Mapping[str, Any]) -> Mapping[str, Any]:
    role, calls = message.get("role"), message.get("tool_calls")
    if calls:
        message = with_function_calls(message)
        calls = message["tool_calls"]
    if message.get("refusal") and not message.get("content"):
        message = {**message, "content": message["refusal"], "refusal": None}
    if isinstance(role, str) and role not in ("user", "assistant") and not template.shows_role(role):
        raise _unread(f"The role {role!r}", "messages")
    for name, value in message.items():
        if _asks_something(value) and name not in _MESSAGE_FIELDS and not template.reads_field(str(name)):
            raise _unread(f"{name!r} in a message", "messages", did_you_mean(name, _MESSAGE_FIELDS))
    if not calls or template.reads_field("tool_calls"):
        return message
    if (written := template.write_calls(calls)) is None:
        raise _unread("tool_calls", "tool_calls")
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + written, "tool_calls": None}
    return {**message, "content": [*content, written], "tool_calls": None}


def _asks_something(value: object) -> bool:
    return value is not False and value not in (None, "", [], {})


def _unread(what: str, parameter: str, hint: str = "") -> RequestError:
    message = f"{what} is not supported by this model: its chat template does not read it.{hint}"
    return RequestError(message, parameter)


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Check the messages and return a copy as plain data."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list with at least one message.", "messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"A message must be a dict with a role and content, not {message!r}.", "messages")
        if not isinstance(message.get("content"), str | list | tuple | None):
            raise RequestError("A message's content must be a string or a list of content parts.", "messages")
        if message["role"] in ("system", "developer", "user") and message.get("content") is None:
            raise RequestError(f"A message with role {message['role']!r} must have content.", "messages")
    return [_plain(_without_nulls(message)) for message in messages]


def _without_nulls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what says nothing: clients send back replies with all their fields, and templates look for names."""
    empty = [name for name, value in message.items() if value is None or (name == "tool_calls" and not value)]
    return {name: value for name, value in message.items() if name == "content" or name not in empty}


def part_text(part: object) -> str:
    """The text of a content part. Other kinds of parts are refused."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(f"A content part must be a string or a dict, not {part!r}.", "messages")
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        message = f"Content parts of type {kind!r} are not supported; this model accepts only text."
        raise RequestError(message, "messages")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"The content part {part!r} has no text.", "messages")
    for name, value in part.items():
        if name not in _PART_FIELDS and _asks_something(value):
            hint = did_you_mean(name, _PART_FIELDS)
            raise RequestError(f"{name!r} in a content part is not supported: only its text is read.{hint}", "messages")
    return text


def _tag_end(message: Message) -> str:
    """Append the tag to the last text of a message and return the text without it."""
    content = message.get("content")
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _CONTINUE_TAG
        return text
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_TAG
        return content
    raise _nothing_to_continue()


def _nothing_to_continue() -> RequestError:
    message = "continue_final_message is set, but the final message has no text."
    return RequestError(message, "continue_final_message")


def _with_parsed_arguments(message: Message) -> Message:
    """Parse the arguments of tool calls, which are JSON text in OpenAI's API and objects in templates."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [parse_arguments(call) for call in calls]}


def _plain_mappings(name: str, values: Sequence[Mapping[str, Any]] | None) -> list[Message] | None:
    if values is None:
        return None
    if isinstance(values, str | Mapping) or not all(isinstance(value, Mapping) for value in values):
        raise RequestError(f"{name} must be a list of dicts.", name)
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    """Copy a value with JSON types only, because the sandbox cannot tell which methods of other objects are safe."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):  # subclasses, such as enums
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"
