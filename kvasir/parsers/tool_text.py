"""Tools and calls as text in a model's own format, for chat templates that do not write them. API process.

A model whose template reads no tools gets them in a system message, and calls and results of earlier turns as content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.parsers.formats import ToolFormat

Call = tuple[str, Mapping[str, Any]]  # name, arguments


def write_calls(form: ToolFormat, calls: Sequence[Call]) -> str:
    """Calls as the model writes them."""
    if form.arguments == "harmony":
        return "".join(
            f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}"
            "<|call|>"
            for name, given in calls
        )
    texts = [f"{form.call[0]}{_call(form, number, *call)}{form.call[1]}" for number, call in enumerate(calls)]
    between = ", " if form.array else form.separator or ("\n" if form.call[1] and not form.section[1] else "")
    inside = between.join(texts)
    return form.section[0] + (f"[{inside}]" if form.array else inside) + form.section[1]


def _call(form: ToolFormat, number: int, name: str, given: Mapping[str, Any]) -> str:
    if form.arguments == "pythonic":
        return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in given.items())})"
    if form.arguments == "gemma":
        return name + _gemma(dict(given), form.quote)
    if form.arguments == "tagged":
        tags = [form.key[0] + key + form.key[1] + _tagged(form, value) + form.value_end for key, value in given.items()]
        return name + form.name_end + "".join(tags)
    if form.name_end:
        return (f"functions.{name}:{number}" if form.numbered else name) + form.name_end + _json(given)
    head = f'"{form.id_key}": "{number}", ' if form.id_key else ""
    return f'{{{head}"{form.name_key}": {_json(name)}, "{form.arguments_keys[0]}": {_json(given)}}}'


def _tagged(form: ToolFormat, value: Any) -> str:
    text = value if isinstance(value, str) else _json(value)
    return ("true" if isinstance(value, str) else "false") + form.flag_end + text if form.flag_end else text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python(value: Any) -> str:
    return _json(value) if isinstance(value, str) else repr(value)


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(each, quote) for each in value) + "]"
    return _json(value)


def describe_tools(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """A system message about the tools, for a model whose template has none."""
    listed = "\n".join(_json(tool) for tool in tools)
    example = write_calls(form, [("NAME", {"ARGUMENT": "VALUE"})])
    return (
        "# Tools\n\nYou can call these functions, each given as JSON with a schema of its arguments:\n"
        f"<tools>\n{listed}\n</tools>\n\nTo call one, write exactly this, with its name and arguments:\n{example}"
    )


def with_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    form: ToolFormat,
    rewrites: bool = True,
) -> list[dict[str, Any]]:
    """The messages with tools as text. `rewrites`: calls and their results become text, too."""
    made: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if not rewrites:
            made.append(dict(message))
        elif role == "tool":
            _add_result(made, _text(message.get("content")))
        elif message.get("tool_calls"):
            text = _text(message.get("content"))
            written = write_calls(form, [_read(call) for call in message["tool_calls"]])
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            made.append({**rest, "content": f"{text}\n{written}" if text else written})
        else:
            made.append(dict(message))
    if not tools:
        return made
    described = describe_tools(form, tools)
    if made and made[0].get("role") in ("system", "developer"):
        first = {**made[0], "content": f"{_text(made[0].get('content'))}\n\n{described}"}
        return [first, *made[1:]]
    return [{"role": "system", "content": described}, *made]


_RESULT = "<tool_response>\n"


def _add_result(made: list[dict[str, Any]], text: str) -> None:
    """Results are messages of the user; several in a row are one, because many templates want turns to alternate."""
    result = f"{_RESULT}{text}\n</tool_response>"
    if made and made[-1].get("role") == "user" and str(made[-1].get("content")).startswith(_RESULT):
        made[-1]["content"] += "\n" + result
    else:
        made.append({"role": "user", "content": result})


def _read(call: Any) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "", {}
    given = function.get("arguments")
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError):
            given = {"arguments": given}
    return str(function.get("name", "")), given if isinstance(given, Mapping) else {}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join(part if isinstance(part, str) else str(part.get("text", "")) for part in parts)
