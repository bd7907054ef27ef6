"""Grammars of tool calls in a model's own format, from the same rows as the scanner. API process.

The grammar of an answer that must be calls covers the whole answer. The grammar of calls that the model may make begins
after their marker (GrammarTag). The text is Lark of llguidance; special tokens are written by their ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvasir.errors import RequestError
from kvasir.frontend.text.grammar import json_rule, literal, quote
from kvasir.parsers.formats import ReasoningFormat, ToolFormat
from kvasir.parsers.schemas import is_any_text_or_null, resolved, says_nothing
from kvasir.parsers.value_grammar import (
    CallableTool,
    Rules,
    ValueWriter,
    alternatives,
    arguments,
    is_text,
    joined,
    regex,
)
from kvasir.sampling_params import GrammarTag

_TEXT_REGEX = "/(?s:.*)/"


class GrammarWriter:
    """Writes the grammars of one format. `special`: the vocabulary's special tokens with their ids."""

    def __init__(self, form: ToolFormat, special: Mapping[str, int], reasoning: ReasoningFormat | None = None) -> None:
        self.form = form
        texts = form.texts() if reasoning is None else form.texts() | {*reasoning.open, *reasoning.close}
        self._special = {token: special[token] for token in kept_tokens(texts, special)}
        self._rules = Rules()

    # ------------------------------------------------------------ whole grammars

    def whole(
        self,
        tools: Sequence[CallableTool],
        parallel: bool,
        reasoning: tuple[str, str] | None = None,
        otherwise: str = "",
    ) -> str:
        """Write the grammar of an answer that is calls of these tools, at least one. `reasoning`: the markers of
        reasoning that may be first. `otherwise`: an expression of what the answer may be instead."""
        form = self.form
        if form.arguments == "harmony":
            return self._rules.text(self._harmony(tools, parallel, otherwise))
        elif form.call[0] and not form.section[0] and not form.array and form.call[1] == "":
            body = self._many(joined(self.literal(form.call[0]), self._call(tools)), "", parallel)
        else:
            one = joined(self.literal(form.call[0]), self._call(tools), self.literal(form.call[1]))
            separator = ", " if form.array else form.separator
            if not separator and form.call[1] and not form.section[1]:
                separator = "\n"
            many = self._many(one, separator, parallel)
            inside = joined('"["', many, '"]"') if form.array else many
            body = joined(self.literal(form.section[0]), inside, self.literal(form.section[1]))
        if otherwise:
            body = f"({body} | {otherwise})"
        if reasoning is not None:
            body = joined(self._thought(*reasoning), body)
        return self._rules.text(body)

    def answer(self, expression: str, reasoning: tuple[str, str], is_harmony: bool) -> str:
        """Write the grammar of an answer that matches `expression`, and that reasoning may precede."""
        if is_harmony:
            return self._rules.text(joined(self._harmony_thought(), self._harmony_final(expression)))
        return self._rules.text(joined(self._thought(*reasoning), expression))

    def tags(self, tools: Sequence[CallableTool], parallel: bool) -> tuple[GrammarTag, ...]:
        """Write the grammar of calls from their beginning on, which the model has chosen to write."""
        form = self.form
        if form.arguments == "harmony":
            return (self._harmony_tag(tools),)
        if form.is_bare:
            return self._bare_tags(tools, parallel)
        opening = form.opening.lstrip()
        first = next((token for token in self._special if opening.startswith(token)), None)
        trigger = first or opening.strip().split("\n")[0]
        rest = self.literal(opening[len(trigger) :])
        if form.section[0]:
            one = joined(self.literal(form.call[0]), self._call(tools), self.literal(form.call[1]))
            many = self._many(one, ", " if form.array else form.separator, parallel)
            inside = joined('"["', many, '"]"') if form.array else many
            body = joined(rest, inside, self.literal(form.section[1]))
        else:
            body = joined(rest, self._call(tools), self.literal(form.call[1]))
        return (GrammarTag(trigger, self._rules.text(body)),)

    def _bare_tags(self, tools: Sequence[CallableTool], parallel: bool) -> tuple[GrammarTag, ...]:
        """Write the tags of a format without markers, whose calls are known by their first characters."""
        form, found = self.form, []
        for tool in tools:
            self._rules = Rules()
            if form.arguments == "json":
                trigger = f"{{{json.dumps(form.name_key)}: {json.dumps(tool.name)}"
                before = quote(f", {json.dumps(form.arguments_keys[0])}: ")
                body = joined(before, json_rule(tool.arguments, tool.style), quote("}"))
            else:
                trigger = f"{tool.name}("
                body = self._python_arguments(tool)
            if form.array:
                others = f"({quote(', ')} {self._call(tools)})*" if parallel else ""
                body = joined(body, others, quote("]"))
            found.append(GrammarTag(("[" if form.array else "") + trigger, self._rules.text(body)))
        return tuple(found)

    # ------------------------------------------------------------ pieces

    def literal(self, text: str) -> str:
        """An expression for exactly this text, with its special tokens as tokens."""
        return literal(text, self._special) if text else ""

    def text_until(self, end: str, pattern: str = _TEXT_REGEX) -> str:
        """Any text up to a marker, and the marker. `pattern`: a regular expression or the name of a terminal."""
        places = [end.find(token) for token in self._special if token in end]
        first = end[: min(places, default=len(end))]  # a suffix is text, and ends before the first token
        if not first:
            return joined(pattern, self.literal(end))
        name = self._rules.add(pattern, f"suffix={quote(first)}")
        return joined(name, self.literal(end[len(first) :]))

    def _thought(self, opening: str, closing: str) -> str:
        opening, closing = opening.strip(), closing.strip()
        return "(" + joined(self.literal(opening), self.text_until(closing), r"/[ \n]{0,4}/") + ")?"

    def _many(self, one: str, separator: str, parallel: bool) -> str:
        if not parallel:
            return one
        name = self._rules.add(one)
        return joined(name, f"({joined(self.literal(separator), name)})*")

    # ------------------------------------------------------------ one call, between its markers

    def _call(self, tools: Sequence[CallableTool]) -> str:
        return alternatives([self._call_of(tool) for tool in tools])

    def _call_of(self, tool: CallableTool) -> str:
        form, schema = self.form, tool.arguments
        if tool.lark is not None and form.arguments != "tagged":
            message = (
                f"The tool {tool.name!r} has a Lark grammar, but this model writes arguments in JSON ({form.name}), "
                "where a text is escaped: use a grammar of the syntax 'regex'."
            )
            raise RequestError(message, "tools")
        if form.arguments == "pythonic":
            return joined(quote(f"{tool.name}("), self._python_arguments(tool))
        if form.arguments == "gemma":
            return joined(quote(tool.name), self._values(tool).gemma(schema, form.quote))
        if form.arguments == "tagged":
            return joined(self.literal(tool.name + form.name_end), self._tags(tool))
        if form.name_end:
            name: str = quote(tool.name)
            if form.numbered:
                name = joined(quote(f"functions.{tool.name}:"), "/[0-9]{1,3}/")
            call_id = f"({joined(self.literal(form.id_end), '/[a-zA-Z0-9]{9}/')})?" if form.id_end else ""
            return joined(name, call_id, self.literal(form.name_end), json_rule(schema, tool.style))
        head = f'"{form.id_key}": "' if form.id_key else ""
        before = joined(quote("{" + head), "/[0-9]{1,3}/", quote('", ')) if head else quote("{")
        named = f"{json.dumps(form.name_key)}: {json.dumps(tool.name)}, {json.dumps(form.arguments_keys[0])}: "
        return joined(before, quote(named), json_rule(schema, tool.style), quote("}"))

    def _tags(self, tool: CallableTool) -> str:
        form, schema = self.form, tool.arguments
        properties = _properties(schema)
        required = _required(schema)
        others = schema.get("additionalProperties")
        if not properties and (others or (others is None and tool.schema is None)):
            value = self._tagged_value(others, tool) if isinstance(others, Mapping) else self._any_value()
            pair = joined(self.literal(form.key[0]), self.text_until(form.key[1], '/[^<>"\\n]{1,64}/'), value)
            return f"({pair})*"
        found = []
        for key, each in properties.items():
            value = self._nested(tool, form.value_end) if tool.is_custom else self._tagged_value(each, tool)
            pair = joined(self.literal(form.key[0] + key + form.key[1]), value)
            found.append(pair if key in required else f"({pair})?")
        return joined(*found)

    def _any_value(self) -> str:
        flag = joined('("true" | "false")', self.literal(self.form.flag_end)) if self.form.flag_end else ""
        return joined(flag, self.text_until(self.form.value_end))

    def _nested(self, tool: CallableTool, end: str) -> str:
        flag = self.literal("true" + self.form.flag_end) if self.form.flag_end else ""
        if tool.lark is not None:
            return joined(flag, f"%lark {{\n{tool.lark}\n}}", self.literal(end))
        if tool.regex is not None:
            return joined(flag, self.text_until(end, regex(tool.regex)))
        return joined(flag, self.text_until(end))

    def _tagged_value(self, schema: Any, tool: CallableTool) -> str:
        """Write a value and its closing tag. Strings stand as they are, other values as JSON."""
        form, root = self.form, tool.arguments
        found = resolved(schema, root)
        if says_nothing(found):
            return self._any_value()
        if not form.flag_end and is_any_text_or_null(found, root):  # null is read as null
            return self.text_until(form.value_end)
        text = is_text(schema, root)
        flag = self.literal(("true" if text else "false") + form.flag_end) if form.flag_end else ""
        if text:
            return joined(flag, self._values(tool).text(found, form.value_end))
        return joined(flag, json_rule(_with_definitions(schema, root), tool.style), self.literal(form.value_end))

    def _values(self, tool: CallableTool) -> ValueWriter:
        return ValueWriter(tool, self._rules, self.literal, self.text_until)

    def _python_arguments(self, tool: CallableTool) -> str:
        schema = tool.arguments
        pairs = [(f"{key}=", self._python_value(each, tool)) for key, each in _properties(schema).items()]
        return joined(arguments(pairs, schema, ", "), quote(")"))

    def _python_value(self, schema: Any, tool: CallableTool) -> str:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "boolean" and "enum" not in schema and "const" not in schema:
            return '("True" | "False")'
        if kind == "null":
            return '"None"'
        return json_rule(_with_definitions(schema, tool.arguments), tool.style)

    # ------------------------------------------------------------ harmony

    def _harmony_thought(self) -> str:
        thought = joined(
            self.literal("<|channel|>analysis<|message|>"),
            self.text_until("<|end|>"),
            self.literal("<|start|>assistant"),
        )
        return f"({thought})?"

    def _harmony_final(self, expression: str) -> str:
        return joined(self.literal("<|channel|>final<|message|>"), expression)

    def _harmony(self, tools: Sequence[CallableTool], parallel: bool, otherwise: str) -> str:
        call = joined(self.literal("<|channel|>commentary"), self._harmony_call(tools))
        if parallel:
            name = self._rules.add(call)
            call = joined(name, f"({joined(self.literal('<|call|><|start|>assistant'), name)})*")
        if otherwise:
            call = f"({call} | {self._harmony_final(otherwise)})"
        return joined(self._harmony_thought(), call)

    def _harmony_call(self, tools: Sequence[CallableTool]) -> str:
        found = []
        for tool in tools:
            if tool.lark is not None:
                raise RequestError(f"The grammar of the tool {tool.name!r} must be a regex for this model.", "tools")
            head = self.literal(f" to=functions.{tool.name} <|constrain|>json<|message|>")
            found.append(joined(head, json_rule(tool.arguments, tool.style)))
        return alternatives(found)

    def _harmony_tag(self, tools: Sequence[CallableTool]) -> GrammarTag:
        """Write the tag of harmony's calls, which are messages to a function: it begins at the recipient."""
        found = []
        for tool in tools:
            head = joined(quote(tool.name), '" "?', self.literal("<|constrain|>json<|message|>"))
            found.append(joined(head, json_rule(tool.arguments, tool.style), self.literal("<|call|>")))
        return GrammarTag("to=functions.", self._rules.text(alternatives(found)))


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("required")
    return found if isinstance(found, list) else []


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema, with the definitions that it may refer to."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**shared, **schema} if shared and isinstance(schema, Mapping) else schema if schema is not None else {}


def kept_tokens(texts: Iterable[str], special: Iterable[str]) -> tuple[str, ...]:
    """The special tokens that markers consist of: text must keep them to be parsed."""
    known = tuple(texts)
    return tuple(sorted(token for token in special if any(token in text for text in known)))
