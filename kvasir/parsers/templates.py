"""What a chat template tells about its model's format, and what it is given where it says nothing. API process.

`detect` finds the format. A template that shows calls of earlier turns is asked: it renders a call, and the format that
reads that call back is the model's. Other templates only describe the format to the model; its markers are in the
template's text. A model whose template reads no tools gets them in a system message, and calls and results of earlier
turns as content (`with_tools`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvasir.errors import RequestError
from kvasir.frontend.text.chat_template import compile_template, part_text
from kvasir.frontend.text.compiled_template import with_function_calls
from kvasir.parsers.base import calls_of, content_of
from kvasir.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat, ReasoningFormat, ToolFormat
from kvasir.parsers.scanner import make_parser

# Texts of templates by which a format is known, the more telling ones first. All texts of a line must be there.
_TOOL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "to=functions")),
    ("deepseek_v4", ("\uff5cDSML\uff5ctool_calls",)),
    ("deepseek_v32", ("\uff5cDSML\uff5c",)),
    ("deepseek_v3", ("<\uff5ctool▁sep\uff5c>", "```json")),
    ("deepseek_v31", ("<\uff5ctool▁sep\uff5c>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("step3", ("steptml:invoke",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_v1", ("[TOOL_CALLS]",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("granite", ("<|tool_call|>",)),
    ("internlm", ("<|action_start|>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("gigachat3", ("<|function_call|>",)),
    ("olmo3", ("<function_calls>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("phi4_mini_json", ("functools",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("jamba", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": ', "ipython")),
)
_NAME, _ARGUMENTS = "kvasir_probe", {"kvasir_key": "kvasir value"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"kvasir_key": {"type": "string", "description": "A key."}},
            "required": ["kvasir_key"],
        },
    },
}


@dataclass(frozen=True)
class Detected:
    """A format, and how it was found."""

    format: AnswerFormat
    why_tools: str
    why_reasoning: str


@lru_cache(maxsize=64)
def detect(source: str) -> Detected:
    """The format of the model that has this chat template."""
    tools, why_tools = _tools(source)
    reasoning, why_reasoning = _reasoning(source, tools)
    return Detected(AnswerFormat(tools, reasoning), why_tools, why_reasoning)


def reads_tools(source: str) -> bool:
    """Whether a template shows the request's tools to the model."""
    return compile_template(source).reads("tools")


def _tools(source: str) -> tuple[ToolFormat | None, str]:
    shown = _shown_call(source)
    if shown:
        fits = [
            (left, place, row) for place, row in enumerate(TOOL_FORMATS.values()) if (left := _left(row, shown)) >= 0
        ]
        if fits:
            return min(fits)[2], "it reads the call that the chat template shows for an earlier turn"
    if not reads_tools(source):
        return None, "the chat template reads no tools and shows no calls"
    for name, marks in _TOOL_MARKS:
        if all(mark in source for mark in marks):
            return TOOL_FORMATS[name], f"the chat template has {' and '.join(map(repr, marks))}"
    return None, "the chat template reads tools, but has no marker of a known format"


def _shown_call(source: str) -> str:
    """What a template writes for a call of an earlier turn."""
    user: dict[str, Any] = {"role": "user", "content": "kvasir probe"}
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"id": "call00001", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    before = _render(source, [user], add_generation_prompt=True)
    after = _render(source, [user, answer], add_generation_prompt=False)
    pairs = enumerate(zip(before, after, strict=False))
    common = next((place for place, (one, other) in pairs if one != other), min(len(before), len(after)))
    if common < len(before):  # the call's marker may begin like what a generation prompt has in its place
        common = max(after.rfind("<", 0, common), after.rfind("[", 0, common), 0)
    return after[common:]


def _render(source: str, messages: list[Mapping[str, Any]], **variables: Any) -> str:
    special: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
    try:
        return compile_template(source).render(messages, tools=[_TOOL], **special, **variables)
    except RequestError:
        return ""


def _left(row: ToolFormat, text: str) -> int:
    """Number of characters of a shown call that a format leaves as content: the fewer, the better it fits. -1 if it
    does not read the call."""
    parser = make_parser(AnswerFormat(row), {_NAME: _TOOL["function"]["parameters"]})  # type: ignore[index]
    parts = [*parser.feed(text.lstrip()), *parser.finish()]
    calls = calls_of(parts)
    if len(calls) != 1 or calls[0].name != _NAME or _NAME in content_of(parts):
        return -1
    try:
        return len(content_of(parts)) if json.loads(calls[0].arguments) == _ARGUMENTS else -1
    except ValueError:
        return -1


def _reasoning(source: str, tools: ToolFormat | None) -> tuple[ReasoningFormat | None, str]:
    if tools is not None and tools.name == "openai":
        return REASONING_FORMATS["openai_gptoss"], "its channels go with its tool calls"
    for row in REASONING_FORMATS.values():
        if row.name in ("think", "think_response", "think_answer", "kimi_k2", "openai_gptoss"):
            continue  # their markers are in other templates, too
        mark = next((mark for mark in (*row.open, *row.close) if mark.strip() in source), None)
        if mark is not None:
            return row, f"the chat template has {mark!r}"
    mark = next((mark for mark in ("</think>", "<think>") if mark in source), None)
    if mark is None:
        return None, "the chat template has no marker of reasoning"
    name = "kimi_k2" if tools is not None and tools.name == "kimi_k2" else "think"
    for other in ("think_response", "think_answer"):
        if REASONING_FORMATS[other].answer[1] in source:
            name = other
    return REASONING_FORMATS[name], f"the chat template has {mark!r}"


Call = tuple[str, Mapping[str, Any]]  # name, arguments


def write_calls(form: ToolFormat, calls: Sequence[Call]) -> str:
    """Write calls as the model writes them."""
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
            written = write_calls(form, [_read(call) for call in with_function_calls(message)["tool_calls"]])
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
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("A tool call of a message needs function, an object with its name.", "messages")
    given = function.get("arguments")
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError):
            given = {"arguments": given}
    return function["name"], given if isinstance(given, Mapping) else {"arguments": given} if given else {}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join(map(part_text, parts))
