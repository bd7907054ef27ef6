"""Finds out from a chat template how its model writes tool calls and reasoning. API process.

A template that shows calls of earlier turns is asked: it renders a call, and the format that reads that call back is
the model's. Other templates only describe the format to the model; its markers are in the template's text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvasir.errors import RequestError
from kvasir.frontend.text.chat_template import compile_template
from kvasir.parsers.base import calls_of, content_of
from kvasir.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat, ReasoningFormat, ToolFormat
from kvasir.parsers.scanner import make_parser

# Texts of templates by which a format is known, the more telling ones first. All texts of a line must be there.
_TOOL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "to=functions")),
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
    """How many characters of a shown call a format leaves as content: the fewer, the better it fits. -1: it does not
    read the call."""
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
