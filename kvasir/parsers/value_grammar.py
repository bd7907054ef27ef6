"""Grammars of values whose strings stand as they are, without JSON's escapes: in tags, and in Gemma's notation.
API process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.errors import RequestError
from kvasir.frontend.text.grammar import JsonStyle, json_rule, quote
from kvasir.parsers.schemas import Schema, branches, kinds_of, resolved, says_nothing, text_rules, values_of

MAX_DEPTH = 32  # of schemas that are written out
_MAX_PIECES = 10_000  # alternatives of all strings
_NUMBERS = ("integer", "number", "boolean", "null")
_ALWAYS = ("not", "if", "allOf")
# Keywords that are not written out, by the type that they are of.
_LEFT_OUT = {
    "string": _ALWAYS,
    "array": (*_ALWAYS, "prefixItems", "contains", "uniqueItems", "unevaluatedItems"),
    "object": (
        *(*_ALWAYS, "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties"),
    ),
}
_KEY = "/[a-zA-Z0-9_. -]{1,64}/"


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


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
        """How JSON is written: objects have only the properties that the schema names, unless it says otherwise."""
        return JsonStyle(lenient=self.lenient, closed=True)

    @property
    def arguments(self) -> Mapping[str, Any]:
        if not self.is_custom:
            return ANY_OBJECT if self.schema is None else self.schema
        text: dict[str, Any] = {"type": "string"}
        if self.regex is not None:
            text["pattern"] = f"^(?:{self.regex})$"
        return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


class Rules:
    """The rules of one grammar, with names."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def add(self, expression: str, attributes: str = "") -> str:
        name = self.reserve()
        self.define(name, expression, attributes)
        return name

    def add_terminal(self, expression: str) -> str:
        """Regular expressions, which may be joined by `&`."""
        name = f"T{len(self._found)}"
        self.define(name, expression)
        return name

    def reserve(self) -> str:
        """A name for a rule that is defined later, because it refers to itself."""
        name = f"r{len(self._found)}"
        self._found[name] = ""
        return name

    def define(self, name: str, expression: str, attributes: str = "") -> None:
        self._found[name] = f"{name}{f'[{attributes}]' if attributes else ''}: {expression}"

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._found.values()]) + "\n"


class ValueWriter:
    """Writes the values of one tool. `text_until` makes an expression of a text and the marker after it."""

    def __init__(
        self, tool: CallableTool, rules: Rules, literal: Callable[[str], str], text_until: Callable[..., str]
    ) -> None:
        self._tool = tool
        self._root = tool.arguments
        self._rules = rules
        self._literal = literal
        self._text_until = text_until
        self._left = _MAX_PIECES
        self._by_reference: dict[str, str] = {}  # rules for what references lead to

    def text(self, schema: Schema, end: str, depth: int = 0) -> str:
        """A string of this schema as it is, and the marker after it."""
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            raise self._refusal("has a string of too many alternatives")
        values = values_of(schema)
        if values is not None:
            texts = [quote(value) for value in values if isinstance(value, str)]
            return joined(alternatives(texts), self._literal(end))
        parts = branches(schema)
        if parts[0] is not schema:
            return alternatives([self.text(resolved(part, self._root), end, depth + 1) for part in parts])
        self._check(schema, "string")
        rules = text_rules(schema)
        if rules is None:
            self._cannot(f"the format {schema['format']!r:.80}")
            rules = text_rules({name: value for name, value in schema.items() if name != "format"}) or []
        if not rules:
            return self._text_until(end)
        written = [regex(rule) for rule in rules]
        return self._text_until(end, written[0] if len(written) == 1 else self._rules.add_terminal(" & ".join(written)))

    # ------------------------------------------------------------ Gemma's notation

    def gemma(self, schema: object, mark: str, depth: int = 0) -> str:
        """A value in Gemma's notation. `mark`: what stands around strings."""
        if depth > MAX_DEPTH:
            raise RequestError(f"The schema of a tool is nested more than {MAX_DEPTH} deep.", "tools")
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str):
            if reference not in self._by_reference:
                name = self._by_reference[reference] = self._rules.reserve()
                self._rules.define(name, self._gemma_of(resolved(schema, self._root), mark, depth))
            return self._by_reference[reference]
        return self._gemma_of(resolved(schema, self._root), mark, depth)

    def _gemma_of(self, found: Schema, mark: str, depth: int) -> str:
        if (values := values_of(found)) is not None:
            return alternatives([self._gemma_literal(value, mark) for value in values])
        parts = branches(found)
        if parts[0] is not found:
            return alternatives([self.gemma(part, mark, depth + 1) for part in parts])
        kind = found.get("type") or ("object" if "properties" in found else "array" if "items" in found else None)
        if kind in _NUMBERS:
            return json_rule(found, self._tool.style)
        if kind == "string":
            return joined(self._literal(mark), self.text(found, mark))
        if kind == "array":
            return self._gemma_array(found, mark, depth)
        if kind == "object":
            return self._gemma_object(found, mark, depth)
        if not says_nothing(found):
            self._cannot("a schema without a type")
        return self._gemma_any(mark)

    def _gemma_array(self, found: Schema, mark: str, depth: int) -> str:
        self._check(found, "array")
        items = found.get("items")
        item = self._rules.add(
            self.gemma(items, mark, depth + 1) if isinstance(items, Mapping) else self._gemma_any(mark)
        )
        least, most = found.get("minItems") or 0, found.get("maxItems")
        if most == 0:
            return quote("[]")
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        inside = f"{item} {more}"
        return f'"[" {inside if least else f"({inside})?"} "]"'

    def _gemma_object(self, found: Schema, mark: str, depth: int) -> str:
        self._check(found, "object")
        properties, others = found.get("properties"), found.get("additionalProperties")
        if (isinstance(properties, Mapping) and properties) or others is False:
            named = properties if isinstance(properties, Mapping) else {}
            pairs = [(f"{key}:", self.gemma(each, mark, depth + 1)) for key, each in named.items()]
            return joined(quote("{"), arguments(pairs, found, ","), quote("}"))
        value = self.gemma(others, mark, depth + 1) if isinstance(others, Mapping) else self._gemma_any(mark)
        return self._gemma_map(value)

    def _gemma_map(self, value: str) -> str:
        pair = self._rules.add(f'{_KEY} ":" {value}')
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _gemma_any(self, mark: str) -> str:
        """Any value, as a rule that refers to itself."""
        name = self._by_reference.get("")
        if name is None:
            name = self._by_reference[""] = self._rules.reserve()
            text = joined(self._literal(mark), self._text_until(mark))
            plain = json_rule({"type": ["number", "boolean", "null"]})
            self._rules.define(name, f'{text} | {plain} | {self._gemma_map(name)} | "[" ({name} ("," {name})*)? "]"')
        return name

    def _gemma_literal(self, value: Any, mark: str) -> str:
        if isinstance(value, str):
            return joined(self._literal(mark), quote(value), self._literal(mark))
        if isinstance(value, list):
            return joined(quote("["), f" {quote(',')} ".join(self._gemma_literal(v, mark) for v in value), quote("]"))
        if isinstance(value, Mapping):
            pairs = [joined(quote(f"{key}:"), self._gemma_literal(each, mark)) for key, each in value.items()]
            return joined(quote("{"), f" {quote(',')} ".join(pairs), quote("}"))
        return quote(json.dumps(value))

    # ------------------------------------------------------------ what cannot be written

    def _check(self, schema: Schema, kind: str) -> None:
        for name in _LEFT_OUT[kind]:
            if schema.get(name):
                self._cannot(name)

    def _cannot(self, what: str) -> None:
        """Refuse a keyword that the grammar leaves out, unless the tool is lenient."""
        if not self._tool.lenient:
            raise self._refusal(
                f"has {what} in its schema, which cannot be enforced in the way that this model writes calls. Remove "
                "it, or set strict to false to skip what cannot be enforced"
            )

    def _refusal(self, what: str) -> RequestError:
        return RequestError(f"The tool {self._tool.name!r} {what}.", "tools")


def joined(*expressions: str) -> str:
    return " ".join(each for each in expressions if each)


def alternatives(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else "(" + " | ".join(expressions) + ")"


def regex(pattern: str) -> str:
    """A regular expression in Lark."""
    return "/" + pattern.replace("/", "\\/") + "/"


def arguments(pairs: Sequence[tuple[str, str]], schema: Schema, separator: str) -> str:
    """Arguments in the schema's order, the required ones first; optional ones may be left out. `pairs`: the text before
    each value, and the value."""
    required, named = schema.get("required"), schema.get("properties")
    needed = required if isinstance(required, list) else []
    written = [joined(quote(before), value) for before, value in pairs]
    names = list(named) if isinstance(named, Mapping) else []
    must = [each for name, each in zip(names, written, strict=True) if name in needed]
    may = [each for name, each in zip(names, written, strict=True) if name not in needed]
    if must:
        return f" {quote(separator)} ".join(must) + "".join(f" ({quote(separator)} {each})?" for each in may)
    firsts = [
        each + "".join(f" ({quote(separator)} {other})?" for other in may[place + 1 :])
        for place, each in enumerate(may)
    ]
    return f"({' | '.join(firsts)})?" if firsts else ""


def is_text(schema: object, root: Schema) -> bool:
    """Whether all values of a schema are strings."""
    return kinds_of(schema, root) == {"string"}
