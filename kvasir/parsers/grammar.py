"""Grammars of tool calls in a model's own format, from the same rows as the scanner. API process.

The grammar of an answer that must be calls covers the whole answer. The grammar of calls that the model may make begins
after their marker (GrammarTag). The text is Lark of llguidance; special tokens are written by their ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.errors import RequestError
from kvasir.frontend.text.grammar import JsonStyle, json_rule, literal, quote
from kvasir.parsers.formats import ReasoningFormat, ToolFormat
from kvasir.sampling_params import GrammarTag

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_TEXT_REGEX = "/(?s:.*)/"
MAX_DEPTH = 32  # of schemas that are written out for Gemma's notation


@dataclass(frozen=True)
class CallableTool:
    """A tool as a grammar sees it."""

    name: str
    schema: Mapping[str, Any] | None = None  # None: any object
    # of a custom tool: what its text must match
    is_custom: bool = False
    regex: str | None = None
    lark: str | None = None
    lenient: bool = False  # skip keywords of the schema that cannot be enforced, instead of refusing it

    @property
    def style(self) -> JsonStyle:
        """Calls have only the arguments that the schema names, unless it says otherwise."""
        return JsonStyle(lenient=self.lenient, closed=True)

    @property
    def arguments(self) -> Mapping[str, Any]:
        if not self.is_custom:
            return ANY_OBJECT if self.schema is None else self.schema
        text: dict[str, Any] = {"type": "string"}
        if self.regex is not None:
            text["pattern"] = f"^(?:{self.regex})$"
        return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


class GrammarWriter:
    """Writes the grammars of one format. `special`: the vocabulary's special tokens with their ids."""

    def __init__(self, form: ToolFormat, special: Mapping[str, int], reasoning: ReasoningFormat | None = None) -> None:
        self.form = form
        texts = form.texts() if reasoning is None else form.texts() | {*reasoning.open, *reasoning.close}
        self._special = {token: special[token] for token in kept_tokens(texts, special)}
        self._rules = _Rules()

    # ------------------------------------------------------------ whole grammars

    def whole(
        self,
        tools: Sequence[CallableTool],
        parallel: bool,
        reasoning: tuple[str, str] | None = None,
        otherwise: str = "",
    ) -> str:
        """The answer is calls of these tools, at least one. `reasoning`: the markers of reasoning that may be first.
        `otherwise`: an expression of what the answer may be instead."""
        form = self.form
        if form.arguments == "harmony":
            return self._rules.text(self._harmony(tools, parallel, otherwise))
        elif form.call[0] and not form.section[0] and not form.array and form.call[1] == "":
            body = self._many(self._join(self.literal(form.call[0]), self._call(tools)), "", parallel)
        else:
            one = self._join(self.literal(form.call[0]), self._call(tools), self.literal(form.call[1]))
            separator = ", " if form.array else form.separator
            if not separator and form.call[1] and not form.section[1]:
                separator = "\n"
            many = self._many(one, separator, parallel)
            inside = self._join('"["', many, '"]"') if form.array else many
            body = self._join(self.literal(form.section[0]), inside, self.literal(form.section[1]))
        if otherwise:
            body = f"({body} | {otherwise})"
        if reasoning is not None:
            body = self._join(self._thought(*reasoning), body)
        return self._rules.text(body)

    def answer(self, expression: str, reasoning: tuple[str, str], is_harmony: bool) -> str:
        """The answer is of an expression, and reasoning may come first."""
        if is_harmony:
            return self._rules.text(self._join(self._harmony_thought(), self._harmony_final(expression)))
        return self._rules.text(self._join(self._thought(*reasoning), expression))

    def tags(self, tools: Sequence[CallableTool], parallel: bool) -> tuple[GrammarTag, ...]:
        """What follows the beginning of calls, once the model has written it."""
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
            one = self._join(self.literal(form.call[0]), self._call(tools), self.literal(form.call[1]))
            many = self._many(one, ", " if form.array else form.separator, parallel)
            inside = self._join('"["', many, '"]"') if form.array else many
            body = self._join(rest, inside, self.literal(form.section[1]))
        else:
            body = self._join(rest, self._call(tools), self.literal(form.call[1]))
        return (GrammarTag(trigger, self._rules.text(body)),)

    def _bare_tags(self, tools: Sequence[CallableTool], parallel: bool) -> tuple[GrammarTag, ...]:
        """Without markers a call is known by its first characters."""
        form, found = self.form, []
        for tool in tools:
            self._rules = _Rules()
            if form.arguments == "json":
                trigger = f"{{{json.dumps(form.name_key)}: {json.dumps(tool.name)}"
                before = quote(f", {json.dumps(form.arguments_keys[0])}: ")
                body = self._join(before, json_rule(tool.arguments, tool.style), quote("}"))
            else:
                trigger = f"{tool.name}("
                body = self._python_arguments(tool)
            if form.array:
                others = f"({quote(', ')} {self._call(tools)})*" if parallel else ""
                body = self._join(body, others, quote("]"))
            found.append(GrammarTag(("[" if form.array else "") + trigger, self._rules.text(body)))
        return tuple(found)

    # ------------------------------------------------------------ pieces

    def literal(self, text: str) -> str:
        """An expression for exactly this text, with its special tokens as tokens."""
        return literal(text, self._special) if text else ""

    def text_until(self, end: str, regex: str = _TEXT_REGEX) -> str:
        """Any text up to a marker, and the marker."""
        places = [end.find(token) for token in self._special if token in end]
        first = end[: min(places, default=len(end))]  # a suffix is text, and ends before the first token
        if not first:
            return self._join(regex, self.literal(end))
        name = self._rules.add(regex, f"suffix={quote(first)}")
        return self._join(name, self.literal(end[len(first) :]))

    def _thought(self, opening: str, closing: str) -> str:
        opening, closing = opening.strip(), closing.strip()
        return "(" + self._join(self.literal(opening), self.text_until(closing), r"/[ \n]{0,4}/") + ")?"

    @staticmethod
    def _join(*expressions: str) -> str:
        return " ".join(each for each in expressions if each)

    def _many(self, one: str, separator: str, parallel: bool) -> str:
        if not parallel:
            return one
        name = self._rules.add(one)
        return self._join(name, f"({self._join(self.literal(separator), name)})*")

    def _alternatives(self, expressions: Sequence[str]) -> str:
        return expressions[0] if len(expressions) == 1 else "(" + " | ".join(expressions) + ")"

    # ------------------------------------------------------------ one call, between its markers

    def _call(self, tools: Sequence[CallableTool]) -> str:
        return self._alternatives([self._call_of(tool) for tool in tools])

    def _call_of(self, tool: CallableTool) -> str:
        form, schema = self.form, tool.arguments
        if tool.lark is not None and form.arguments != "tagged":
            message = (
                f"The tool {tool.name!r} has a Lark grammar, but this model writes arguments in JSON ({form.name}), "
                "where a text is escaped: use a grammar of the syntax 'regex'."
            )
            raise RequestError(message, "tools")
        if form.arguments == "pythonic":
            return self._join(quote(f"{tool.name}("), self._python_arguments(tool))
        if form.arguments == "gemma":
            return self._join(quote(tool.name), self._gemma_value(schema, schema, 0))
        if form.arguments == "tagged":
            return self._join(self.literal(tool.name + form.name_end), self._tags(tool))
        if form.name_end:
            name: str = quote(tool.name)
            if form.numbered:
                name = self._join(quote(f"functions.{tool.name}:"), "/[0-9]{1,3}/")
            call_id = f"({self._join(self.literal(form.id_end), '/[a-zA-Z0-9]{9}/')})?" if form.id_end else ""
            return self._join(name, call_id, self.literal(form.name_end), json_rule(schema, tool.style))
        head = f'"{form.id_key}": "' if form.id_key else ""
        before = self._join(quote("{" + head), "/[0-9]{1,3}/", quote('", ')) if head else quote("{")
        named = f"{json.dumps(form.name_key)}: {json.dumps(tool.name)}, {json.dumps(form.arguments_keys[0])}: "
        return self._join(before, quote(named), json_rule(schema, tool.style), quote("}"))

    def _arguments(self, pairs: Sequence[tuple[str, str]], schema: Mapping[str, Any], separator: str) -> str:
        """Arguments in the schema's order, the required ones first; optional ones may be left out."""
        required = _required(schema)
        names = list(_properties(schema))
        written = [self._join(quote(before), value) for before, value in pairs]
        must = [each for name, each in zip(names, written, strict=True) if name in required]
        may = [each for name, each in zip(names, written, strict=True) if name not in required]
        comma = f" {quote(separator)} "
        if must:
            return comma.join(must) + "".join(f" ({quote(separator)} {each})?" for each in may)
        firsts = [
            each + "".join(f" ({quote(separator)} {other})?" for other in may[place + 1 :])
            for place, each in enumerate(may)
        ]
        return f"({' | '.join(firsts)})?" if firsts else ""

    def _tags(self, tool: CallableTool) -> str:
        form, schema = self.form, tool.arguments
        properties = _properties(schema)
        required = _required(schema)
        if not properties and schema.get("additionalProperties") is not False and tool.schema is None:
            pair = self._join(
                self.literal(form.key[0]), self.text_until(form.key[1], "/[^<>\\n]{1,64}/"), self._any_value()
            )
            return f"({pair})*"
        found = []
        for key, each in properties.items():
            value = self._nested(tool, form.value_end) if tool.is_custom else self._tagged_value(each, tool)
            pair = self._join(self.literal(form.key[0] + key + form.key[1]), value)
            found.append(pair if key in required else f"({pair})?")
        return self._join(*found)

    def _any_value(self) -> str:
        flag = self._join('("true" | "false")', self.literal(self.form.flag_end)) if self.form.flag_end else ""
        return self._join(flag, self.text_until(self.form.value_end))

    def _nested(self, tool: CallableTool, end: str) -> str:
        flag = self.literal("true" + self.form.flag_end) if self.form.flag_end else ""
        if tool.lark is not None:
            return self._join(flag, f"%lark {{\n{tool.lark}\n}}", self.literal(end))
        if tool.regex is not None:
            return self._join(flag, _regex(tool.regex), self.literal(end))
        return self._join(flag, self.text_until(end))

    def _tagged_value(self, schema: Any, tool: CallableTool) -> str:
        """A value and its closing tag. Strings stand as they are, other values as JSON."""
        form = self.form
        end = self.literal(form.value_end)
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        flag = self.literal(("true" if is_text else "false") + form.flag_end) if form.flag_end else ""
        if not is_text:
            return self._join(flag, json_rule(_with_definitions(schema, tool.arguments), tool.style), end)
        choices = schema.get("enum") if isinstance(schema.get("enum"), list) else None
        if isinstance(schema.get("const"), str):
            choices = [schema["const"]]
        if choices and all(isinstance(each, str) for each in choices):
            return self._join(flag, self._alternatives([quote(each) for each in choices]), end)
        least, most = schema.get("minLength"), schema.get("maxLength")
        if isinstance(schema.get("pattern"), str):
            return self._join(flag, _regex(_anchored(schema["pattern"])), end)
        if isinstance(least, int) or isinstance(most, int):
            return self._join(flag, f"/(?s:.){{{least or 0},{'' if most is None else most}}}/", end)
        return self._join(flag, self.text_until(form.value_end))

    def _python_arguments(self, tool: CallableTool) -> str:
        schema = tool.arguments
        pairs = [(f"{key}=", self._python_value(each, tool)) for key, each in _properties(schema).items()]
        return self._join(self._arguments(pairs, schema, ", "), quote(")"))

    def _python_value(self, schema: Any, tool: CallableTool) -> str:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "boolean" and "enum" not in schema and "const" not in schema:
            return '("True" | "False")'
        if kind == "null":
            return '"None"'
        return json_rule(_with_definitions(schema, tool.arguments), tool.style)

    def _gemma_value(self, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        if depth > MAX_DEPTH:
            raise RequestError(f"The schema of a tool is nested more than {MAX_DEPTH} deep.", "tools")
        quoted = self.literal(self.form.quote)
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "object" and (_properties(schema) or schema.get("additionalProperties") is False):
            pairs = [(f"{key}:", self._gemma_value(each, root, depth + 1)) for key, each in _properties(schema).items()]
            return self._join(quote("{"), self._arguments(pairs, schema, ","), quote("}"))
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            item = self._rules.add(self._gemma_value(schema["items"], root, depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "string":
            choices = schema.get("enum")
            if isinstance(choices, list) and all(isinstance(each, str) for each in choices):
                return self._join(quoted, self._alternatives([quote(each) for each in choices]), quoted)
            return self._join(quoted, self.text_until(self.form.quote))
        if kind in ("integer", "number", "boolean", "null"):
            return json_rule(schema)
        text = self._join(quoted, self.text_until(self.form.quote))
        return f"({text} | {json_rule({'type': ['number', 'boolean', 'null']})} | {quote('{}')})"

    # ------------------------------------------------------------ harmony

    def _harmony_thought(self) -> str:
        thought = self._join(
            self.literal("<|channel|>analysis<|message|>"),
            self.text_until("<|end|>"),
            self.literal("<|start|>assistant"),
        )
        return f"({thought})?"

    def _harmony_final(self, expression: str) -> str:
        return self._join(self.literal("<|channel|>final<|message|>"), expression)

    def _harmony(self, tools: Sequence[CallableTool], parallel: bool, otherwise: str) -> str:
        call = self._join(self.literal("<|channel|>commentary"), self._harmony_call(tools))
        if parallel:
            name = self._rules.add(call)
            call = self._join(name, f"({self._join(self.literal('<|call|><|start|>assistant'), name)})*")
        if otherwise:
            call = f"({call} | {self._harmony_final(otherwise)})"
        return self._join(self._harmony_thought(), call)

    def _harmony_call(self, tools: Sequence[CallableTool]) -> str:
        found = []
        for tool in tools:
            if tool.lark is not None:
                raise RequestError(f"The grammar of the tool {tool.name!r} must be a regex for this model.", "tools")
            head = self.literal(f" to=functions.{tool.name} <|constrain|>json<|message|>")
            found.append(self._join(head, json_rule(tool.arguments, tool.style)))
        return self._alternatives(found)

    def _harmony_tag(self, tools: Sequence[CallableTool]) -> GrammarTag:
        """Calls are messages to a function, so the tag begins at the recipient."""
        found = []
        for tool in tools:
            head = self._join(quote(tool.name), '" "?', self.literal("<|constrain|>json<|message|>"))
            found.append(self._join(head, json_rule(tool.arguments, tool.style), self.literal("<|call|>")))
        return GrammarTag("to=functions.", self._rules.text(self._alternatives(found)))


class _Rules:
    """The rules of one grammar, with names."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, expression: str, attributes: str = "") -> str:
        name = f"r{len(self._found)}"
        self._found.append(f"{name}{f'[{attributes}]' if attributes else ''}: {expression}")
        return name

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._found]) + "\n"


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


def _regex(pattern: str) -> str:
    return "/" + pattern.replace("/", "\\/") + "/"


def _anchored(pattern: str) -> str:
    """A schema's pattern, which may match anywhere, as one for the whole text."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    return before + "(?:" + pattern.removeprefix("^").removesuffix("$" if not after else "") + ")" + after


def kept_tokens(texts: Iterable[str], special: Iterable[str]) -> tuple[str, ...]:
    """The special tokens that markers consist of: text must keep them to be parsed."""
    known = tuple(texts)
    return tuple(sorted(token for token in special if any(token in text for text in known)))
