"""Reads the tools of a request and its choice among them from the words of each interface.

OpenAI's chat nests what a tool is under its type, its responses write it flat, and Anthropic's messages have another
schema field and other words for the choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.errors import RequestError
from kvasir.server.answers import Choice, RequestTools, Tool

_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_MAX_TOOLS = 1024


# ---------------------------------------------------------------- OpenAI


def chat_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None) -> RequestTools:
    """Read the tools of /v1/chat/completions."""
    found = [_openai_tool(tool, nested=True) for tool in tools or ()]
    return _chosen(found, choice, parallel, nested=True)


def responses_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None) -> RequestTools:
    """Read the tools of /v1/responses."""
    found = [_openai_tool(tool, nested=False) for tool in tools or ()]
    return _chosen(found, choice, parallel, nested=False)


def _openai_tool(given: Mapping[str, Any], nested: bool) -> Tool:
    kind = given.get("type", "function")
    if kind not in ("function", "custom"):
        message = f"Tools of the type {kind!r:.80} are not available: this server calls no tools itself. Use function."
        raise RequestError(message, "tools")
    if nested and not isinstance(given.get(kind), Mapping) and "name" not in given:
        raise RequestError(f"A tool of the type {kind!r} needs {kind}, an object with its name.", "tools")
    said: Mapping[str, Any] = given[kind] if isinstance(given.get(kind), Mapping) else given
    name, description = _name(said.get("name")), _description(said)
    if "input_schema" in said:
        raise RequestError(f"The tool {name!r} has input_schema, which is Anthropic's: use parameters.", "tools")
    if kind == "custom":
        regex, lark = _grammar(said.get("format"))
        return Tool(name, description, is_custom=True, regex=regex, lark=lark)
    return Tool(name, description, _parameters(name, said.get("parameters"), "parameters"), _strict(said))


def _grammar(given: Any) -> tuple[str | None, str | None]:
    """Read the grammar of a custom tool, as (regex, lark)."""
    if given is None:
        return None, None
    if not isinstance(given, Mapping) or given.get("type") not in ("text", "grammar"):
        raise RequestError("The format of a custom tool must have the type 'text' or 'grammar'.", "tools")
    if given["type"] == "text":
        return None, None
    said = given.get("grammar") if isinstance(given.get("grammar"), Mapping) else given
    assert said is not None, "it is one of two mappings"
    syntax, definition = said.get("syntax"), said.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        message = "The grammar of a custom tool needs syntax, 'lark' or 'regex', and definition, a text."
        raise RequestError(message, "tools")
    return (definition, None) if syntax == "regex" else (None, definition)


def _chosen(tools: list[Tool], choice: Any, parallel: bool | None, nested: bool) -> RequestTools:
    known = _unique(tools)
    several = parallel is not False
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            message = f"tool_choice must be 'none', 'auto', 'required' or an object, not {choice!r:.80}."
            raise RequestError(message, "tool_choice")
        if choice == "required" and not tools:
            raise RequestError("tool_choice is 'required', but there are no tools.", "tool_choice")
        return RequestTools(tuple(tools), choice if tools else "none", None, several)  # type: ignore[arg-type]
    if not isinstance(choice, Mapping):
        raise RequestError("tool_choice must be a string or an object.", "tool_choice")
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(tools, known, choice, several, nested)
    if kind in ("function", "custom"):
        name = _chosen_name(choice, str(kind), nested)
        _check_known(name, known)
        return RequestTools(tuple(tools), "required", frozenset((name,)), False)
    message = f"tool_choice has the type {kind!r:.80}; known are function, custom and allowed_tools."
    raise RequestError(message, "tool_choice")


def _allowed(
    tools: list[Tool], known: frozenset[str], choice: Mapping[str, Any], several: bool, nested: bool
) -> RequestTools:
    said = choice.get("allowed_tools") if isinstance(choice.get("allowed_tools"), Mapping) else choice
    assert said is not None, "it is one of two mappings"
    mode, listed = said.get("mode"), said.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        message = "tool_choice of the type allowed_tools needs mode, 'auto' or 'required', and a list of tools."
        raise RequestError(message, "tool_choice")
    names = []
    for each in listed:
        if not isinstance(each, Mapping):
            raise RequestError("The tools of tool_choice must be objects with a type and a name.", "tool_choice")
        name = _chosen_name(each, str(each.get("type", "function")), nested)
        _check_known(name, known)
        names.append(name)
    return RequestTools(tuple(tools), mode, frozenset(names), several)


def _chosen_name(given: Mapping[str, Any], kind: str, nested: bool) -> str:
    inside = given.get(kind)
    name = inside.get("name") if isinstance(inside, Mapping) else given.get("name")
    if not isinstance(name, str):
        where = f"{kind}.name" if nested else "name"
        raise RequestError(f"tool_choice of the type {kind!r:.80} needs {where}.", "tool_choice")
    return name


# ---------------------------------------------------------------- Anthropic

_ANTHROPIC_CHOICES: Mapping[str, Choice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def anthropic_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None) -> RequestTools:
    """Read the tools of /v1/messages."""
    found = [_anthropic_tool(tool) for tool in tools or ()]
    known = _unique(found)
    said = choice or {"type": "auto"}
    kind = said.get("type")
    if kind not in _ANTHROPIC_CHOICES:
        message = f"tool_choice has the type {kind!r:.80}; known are auto, any, tool and none."
        raise RequestError(message, "tool_choice")
    if kind in ("any", "tool") and not found:
        raise RequestError(f"tool_choice has the type {kind!r}, but there are no tools.", "tool_choice")
    single = said.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        raise RequestError("disable_parallel_tool_use must be true or false.", "tool_choice")
    if kind == "tool":
        name = said.get("name")
        if not isinstance(name, str):
            raise RequestError("tool_choice of the type 'tool' needs name.", "tool_choice")
        _check_known(name, known)
        return RequestTools(tuple(found), "required", frozenset((name,)), False)
    mode = _ANTHROPIC_CHOICES[str(kind)] if found else "none"
    return RequestTools(tuple(found), mode, None, not single)


def _anthropic_tool(given: Mapping[str, Any]) -> Tool:
    kind = given.get("type", "custom")
    if kind != "custom":
        message = f"Tools of the type {kind!r:.80} are not available: this server calls no tools itself."
        raise RequestError(message, "tools")
    name = _name(given.get("name"))
    if "parameters" in given:
        raise RequestError(f"The tool {name!r} has parameters, which are OpenAI's: use input_schema.", "tools")
    return Tool(name, _description(given), _parameters(name, given.get("input_schema"), "input_schema"), _strict(given))


# ---------------------------------------------------------------- checks


def _name(given: Any) -> str:
    if not isinstance(given, str) or not _NAME.fullmatch(given):
        message = "A tool needs a name of 1 to 128 letters, digits and the characters _ . : / -"
        raise RequestError(f"{message}, not {given!r:.80}.", "tools")
    return given


def _description(given: Mapping[str, Any]) -> str | None:
    text = given.get("description")
    if not isinstance(text, str | None):
        raise RequestError("The description of a tool must be a text.", "tools")
    return text


def _parameters(name: str, given: Any, field: str) -> Mapping[str, Any] | None:
    if given is None or given == {}:
        return None
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        message = f"The tool {name!r} has {field} that are no JSON schema of the type 'object'."
        raise RequestError(message, "tools")
    return {"type": "object", **given}


def _strict(given: Mapping[str, Any]) -> bool:
    strict = given.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError("strict of a tool must be true or false.", "tools")
    return bool(strict)


def _unique(tools: Sequence[Tool]) -> frozenset[str]:
    if len(tools) > _MAX_TOOLS:
        raise RequestError(f"A request may have at most {_MAX_TOOLS} tools, not {len(tools)}.", "tools")
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise RequestError(f"Two tools have the name {tool.name!r}.", "tools")
        seen.add(tool.name)
    return frozenset(seen)


def _check_known(name: str, known: frozenset[str]) -> None:
    if name not in known:
        raise RequestError(f"tool_choice names {name!r:.80}, but tools have no such tool.", "tool_choice")
