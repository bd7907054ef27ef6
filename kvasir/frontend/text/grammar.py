"""Structured outputs as grammars of llguidance. API process; knows no tokenizer and no model.

`build_grammar` is the one way from StructuredOutputsParams to a grammar. Equal parameters give equal texts, so all
caches go by the text. `json_rule` and `literal` help those who write Lark themselves. Structural tags hold some parts
of a text to a schema; their reader stands at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvasir.errors import RequestError, excerpt
from kvasir.sampling_params import GrammarTag, StructuredOutputsParams

PARAMETER = "structured_outputs"
_ANY_SPACE = r"[\x20\x0A\x0D\x09]"
MOST_SPACES = 8  # in a row, where JSON may be spaced freely
# Options of llguidance's JSON compiler for each style.
_STYLES: Mapping[str, Mapping[str, Any]] = {
    "spaced": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "flexible": {"whitespace_flexible": True, "whitespace_pattern": f"{_ANY_SPACE}{{1,{MOST_SPACES}}}"},
}
ASCII_DIGITS = "d"  # \\d in a regular expression means 0 to 9, as in other engines
MAX_GRAMMAR_CHARACTERS = 1 << 20
_MAX_GBNF_CHARACTERS = 1 << 17  # converting GBNF takes a tenth of a second for so many, or time by their square
_MAX_OPTIONAL = 2000  # properties of one object, which take most of a second to compile
# Lark has a rule called start, perhaps with modifiers (?start, !start) and attributes; rules of GBNF have ::=.
# llguidance asks for less. This takes linear time for a text of many empty lines, too.
_IS_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|[!?]*start(?:\.-?\d+)?\s*(?:\[[^\]\n]*\]\s*)?:(?!:=))", re.MULTILINE)
_GBNF_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[A-Za-z0-9_-]+', re.DOTALL)
# Keywords of a schema that hold values, and those that hold schemas by names of the caller's own.
_VALUES = frozenset({"enum", "const", "default", "examples"})
_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
# What JSON Schema defines, and "unknown", which is llguidance's own.
FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "regex"),
        *("relative-json-pointer", "unknown"),
    }
)
Markers = Mapping[str, int]  # texts that are one token each which no other text spells, such as "</tool_call>"
NO_MARKERS: Markers = {}


@dataclass(slots=True, frozen=True)
class JsonStyle:
    """How JSON is written, and what happens to keywords of a schema that cannot be enforced."""

    whitespace: str = "spaced"  # one of WHITESPACE_STYLES
    pattern: str | None = None  # of the space between tokens, instead of `whitespace`
    lenient: bool = False  # skip such keywords instead of refusing the schema
    closed: bool = False  # objects have only the properties that the schema names

    @property
    def options(self) -> dict[str, Any]:
        """Options of llguidance's JSON compiler."""
        style = dict(_STYLES[self.whitespace])
        if self.pattern is not None:
            style = {"whitespace_flexible": True, "whitespace_pattern": self.pattern}
        return {**style, "lenient": True} if self.lenient else style


SPACED = JsonStyle()


@dataclass(slots=True, frozen=True)
class Grammar:
    """A grammar of llguidance, or several that begin at triggers."""

    text: str  # llguidance's JSON; empty if there are tags
    starts_after: str = ""  # the output is free up to this text
    tags: tuple[tuple[str, str], ...] = ()  # trigger, grammar of what follows it

    @property
    def size(self) -> int:
        """Characters of all its texts."""
        return len(self.text) + sum(len(trigger) + len(text) for trigger, text in self.tags)


def build_grammar(
    params: StructuredOutputsParams, default: JsonStyle = SPACED, markers: Markers = NO_MARKERS
) -> Grammar:
    """Build the grammar of these parameters. It need not be valid: only llguidance can tell. `default` is for
    parameters that do not say how to write JSON."""
    style = _style(params, default)
    tags = params.tags
    if params.structural_tag is not None:
        found = read_structural_tag(
            params.structural_tag, lambda schema: json_rule(schema, style), lambda text: literal(text, markers)
        )
        if isinstance(found, str):
            return _bounded(Grammar(_lark(found), params.starts_after))
        tags = found
    if tags:
        return _bounded(Grammar("", params.starts_after, tuple((tag.trigger, _lark(tag.grammar)) for tag in tags)))
    return _bounded(Grammar(_text(params, style), params.starts_after))


def json_rule(schema: str | Mapping[str, Any] | bool, style: JsonStyle = SPACED) -> str:
    """A Lark expression for JSON of this schema, for use in a rule: `start: "<call>" %json {...}`."""
    return f"%json {json.dumps(_schema(schema, style), ensure_ascii=False)}"


def expression(params: StructuredOutputsParams, default: JsonStyle = SPACED) -> str | None:
    """A Lark expression for what these parameters ask for, for use in a rule; None if they have structural tags."""
    style = _style(params, default)
    if params.json is not None:
        return json_rule(params.json, style)
    if params.json_object:
        return json_rule({"type": "object"}, style)
    if params.regex is not None:
        return _regex(params.regex)
    if params.choice is not None:
        return f"({' | '.join(map(quote, dict.fromkeys(params.choice)))})"
    return None if params.grammar is None else f"%lark {{\n{_as_lark(params.grammar)}\n}}"


def literal(text: str, markers: Markers = NO_MARKERS) -> str:
    """A Lark expression for exactly this text, in which markers are single tokens."""
    pattern = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    written = [f"<[{markers[part]}]>" if part in markers else quote(part) for part in parts if part]
    return " ".join(written) or '""'


def quote(text: str) -> str:
    """A Lark expression for this text, spelled with ordinary tokens."""
    return json.dumps(text, ensure_ascii=False)


def _style(params: StructuredOutputsParams, default: JsonStyle) -> JsonStyle:
    whitespace = params.whitespace or ("compact" if params.disable_any_whitespace else default.whitespace)
    return JsonStyle(
        whitespace,
        params.whitespace_pattern if params.whitespace_pattern is not None else default.pattern,
        default.lenient if params.lenient is None else params.lenient,
        params.disable_additional_properties or default.closed,
    )


def _text(params: StructuredOutputsParams, style: JsonStyle) -> str:
    if params.json is not None:
        return _dump({"grammars": [{"json_schema": _schema(params.json, style)}]})
    if params.json_object:
        return _dump({"grammars": [{"json_schema": _schema({"type": "object"}, style)}]})
    if params.regex is not None:
        return _lark(f"start: {_regex(params.regex)}")
    if params.choice is not None:
        return _lark(_choice(params.choice))
    assert params.grammar is not None, "one constraint is always set"
    return _lark(_as_lark(params.grammar))


def _regex(pattern: str) -> str:
    return f"/{regex_to_lark(pattern, ASCII_DIGITS)}/" if pattern else '""'


def _as_lark(grammar: str) -> str:
    return grammar if _IS_LARK.search(grammar) is not None else _from_gbnf(grammar)


@lru_cache(maxsize=64)  # a request's grammar is built several times
def _from_gbnf(grammar: str) -> str:
    if len(grammar) > _MAX_GBNF_CHARACTERS:
        message = (
            f"{PARAMETER}.grammar has {len(grammar)} characters; at most {_MAX_GBNF_CHARACTERS} are allowed in GBNF"
        )
        raise RequestError(f"{message}. Grammars in Lark may have {MAX_GRAMMAR_CHARACTERS}.", PARAMETER)
    try:
        return str(gbnf_to_lark(_without_start(grammar)))
    except Exception as error:  # the converter has several kinds
        hint = "" if "::=" in grammar else " A grammar in Lark needs a rule called start."
        said = f"{PARAMETER}.grammar cannot be read: {excerpt(str(error))}"
        raise RequestError(said + (f".{hint}" if hint else ""), PARAMETER) from error


def _without_start(grammar: str) -> str:
    """Rename a rule of GBNF called start, because the converter gives that name to root."""
    name = "start-rule"
    while name in grammar:
        name += "-"
    return _GBNF_WORD.sub(lambda found: name if found.group() == "start" else found.group(), grammar)


def _choice(texts: Sequence[str]) -> str:
    """Write the texts as one terminal, which is compiled in a tenth of the time of a rule. A terminal is never
    empty."""
    written = " | ".join(quote(text) for text in dict.fromkeys(texts) if text)
    if not written:
        return 'start: ""'
    return f"start: CHOICE{' | ' + quote('') if '' in texts else ''}\nCHOICE: {written}"


def _schema(schema: Any, style: JsonStyle) -> Any:
    """The schema as an object with llguidance's options."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The JSON schema is not valid JSON: {error}.", PARAMETER) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise RequestError("A JSON schema must be an object that describes at least one value.", PARAMETER)
    try:
        found: dict[str, Any] = json.loads(json.dumps(_written(schema, style), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"The JSON schema cannot be written as JSON: {error}.", PARAMETER) from error
    _check_optional_properties(found)
    return {**found, "x-guidance": style.options}


def _check_optional_properties(schema: dict[str, Any]) -> None:
    """Refuse a schema that would take seconds to compile. The time grows with the square of the number of an object's
    optional properties, because each may follow any before it."""
    pairs, most, todo = 0, 0, [schema]
    while todo:
        each = todo.pop()
        properties, required = each.get("properties"), each.get("required")
        if isinstance(properties, dict):
            needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
            optional = len(properties.keys() - needed)
            pairs, most = pairs + optional**2, max(most, optional)
        values = list(each.values())
        while values:
            value = values.pop()
            if isinstance(value, dict):
                todo.append(value)
            elif isinstance(value, list):
                values += value
    if pairs > _MAX_OPTIONAL**2:
        message = (
            f"The JSON schema has too many optional properties, {most} in one object; {_MAX_OPTIONAL} are possible"
        )
        raise RequestError(f"{message} if all others are required. Name them in required.", PARAMETER)


def _written(schema: Any, style: JsonStyle) -> Any:
    """A copy of a schema in which objects have only the properties that are named, if the style says so, and without
    formats that JSON Schema does not define: those say nothing about what is valid."""
    if isinstance(schema, list | tuple):
        return [_written(each, style) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    copied: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _VALUES or (name == "format" and isinstance(value, str) and value in FORMATS):
            copied[name] = value
        elif name in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            copied[name] = {key: _written(each, style) for key, each in value.items()}
        elif name != "format" or not isinstance(value, str):
            copied[name] = _written(value, style)
    named = (schema.get("properties"), schema.get("patternProperties"))
    if style.closed and any(isinstance(each, Mapping) for each in named):
        copied.setdefault("additionalProperties", False)
    return copied


def _lark(text: str) -> str:
    return _dump({"grammars": [{"lark_grammar": text}]})


def _dump(grammar: Mapping[str, Any]) -> str:
    return json.dumps(grammar, ensure_ascii=False, separators=(",", ":"))


def _bounded(grammar: Grammar) -> Grammar:
    if grammar.size > MAX_GRAMMAR_CHARACTERS:
        message = f"The grammar has {grammar.size} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed."
        raise RequestError(message, PARAMETER)
    return grammar


# ---------------------------------------------------------------- where a grammar begins


_FREE = r"/(.|\n)*/"


def from_triggers(grammar: Grammar, markers: Markers) -> str:
    """One grammar of llguidance for a Grammar that begins somewhere in the text: free text, up to which it is found, is
    part of it."""
    rules = ["%llguidance {}"]
    parts: list[dict[str, Any]] = []
    before = ""
    if grammar.starts_after:
        before = "before "
        rules.append(_up_to("before", grammar.starts_after, markers))
    if not grammar.tags:
        parts.append(_named("body", grammar.text))
        rules.append(f"start: {before}@body")
        return _dump({"grammars": [{"name": "whole", "lark_grammar": "\n".join(rules)}, *parts]})
    for i, (trigger, text) in enumerate(grammar.tags):
        parts.append(_named(f"body_{i}", text))
        rules += [_up_to(f"trigger_{i}", trigger, markers), f"tag_{i}: trigger_{i} @body_{i}"]
    tags = " | ".join(f"tag_{i}" for i in range(len(grammar.tags)))
    rules.append(f"start: {before}({tags})* {_FREE}")
    return _dump({"grammars": [{"name": "whole", "lark_grammar": "\n".join(rules)}, *parts]})


def _up_to(name: str, text: str, markers: Markers) -> str:
    """A rule for any text that ends with the first `text`."""
    if text in markers:
        return f"{name}: {_FREE} {literal(text, markers)}"
    return f"{name}[lazy]: {_FREE} {quote(text)}"


def _named(name: str, text: str) -> dict[str, Any]:
    (only,) = json.loads(text)["grammars"]
    return {**only, "name": name}


# ---------------------------------------------------------------- structural tags


_MAX_DEPTH = 32
JsonRule = Callable[[Any], str]  # a Lark expression for a schema
Literal = Callable[[str], str]  # a Lark expression for a text


def read_structural_tag(
    value: str | Mapping[str, Any], json_rule: JsonRule, literal: Literal
) -> str | tuple[GrammarTag, ...]:
    """A Lark grammar for the whole output, or tags if the output is free up to triggers.

    Two forms are read: vLLM's older one with `structures` and `triggers`, and the newer one with a `format`, which
    nests formats by their `type`.
    """
    tag: Any = value
    if isinstance(value, str):
        try:
            tag = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(f"is not valid JSON: {error}") from error
    if not isinstance(tag, Mapping):
        raise _wrong("must be an object")
    if "structures" in tag:
        return _triggered(_older(tag), json_rule, literal)
    found = _member(tag, "format", Mapping)
    if found.get("type") == "triggered_tags" and not any(found.get(name) for name in _HELD):
        return _triggered(found, json_rule, literal)
    writer = _Writer(json_rule, literal)
    return writer.grammar(writer.expression(found))


_HELD = ("at_least_one", "stop_after_first", "excludes")  # options that also hold the text outside the tags


def _older(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older form to a format of the newer one."""
    tags = []
    for structure in _member(tag, "structures", Sequence):
        if not isinstance(structure, Mapping):
            raise _wrong("structures must be a list of objects")
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        ends = {"begin": structure.get("begin"), "end": structure.get("end", "")}
        tags.append({"type": "tag", "content": content, **ends})
    return {"type": "triggered_tags", "tags": tags, "triggers": tag.get("triggers")}


def _triggered(found: Mapping[str, Any], json_rule: JsonRule, literal: Literal) -> tuple[GrammarTag, ...]:
    """One grammar for each trigger: what may follow it."""
    grammars = []
    for trigger, tags in _by_trigger(found).items():
        writer = _Writer(json_rule, literal)
        grammars.append(GrammarTag(trigger, writer.grammar(writer.tags_after(tags))))
    return tuple(grammars)


_Tags = list[tuple[str, Mapping[str, Any]]]  # what is left of a tag's beginning after the trigger, and the tag


def _by_trigger(found: Mapping[str, Any]) -> dict[str, _Tags]:
    """The tags that begin with each trigger."""
    triggers = _texts(found, "triggers")
    groups: dict[str, _Tags] = {}
    for tag in _some(found, "tags"):
        if not isinstance(tag, Mapping):
            raise _wrong("must have objects as tags")
        begin = _member(tag, "begin", str)
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise _wrong(f"has a tag that begins with {begin!r:.80}, which begins with none of its triggers")
        groups.setdefault(trigger, []).append((begin[len(trigger) :], tag))
    return groups


class _Writer:
    """Writes one Lark grammar. Expressions go into rules of their own, named by number."""

    def __init__(self, json_rule: JsonRule, literal: Literal) -> None:
        self._json_rule = json_rule
        self._literal = literal
        self._rules: list[str] = []
        self._depth = 0

    def grammar(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def tags_after(self, tags: _Tags) -> str:
        """Expression for any of these tags, of whose beginning only the given rest is still to be written."""
        return " | ".join(self.rule(self._tag(tag, begin)) for begin, tag in tags)

    def expression(self, found: Any) -> str:
        """The expression of a format, usually the name of a rule."""
        if not isinstance(found, Mapping):
            raise _wrong("has a format that is not an object")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _wrong(f"is nested more than {_MAX_DEPTH} deep")
        kind = found.get("type")
        writers = {
            "const_string": lambda: self._literal(_member(found, "value", str)),
            "json_schema": lambda: self.rule(self._json_rule(found.get("json_schema", {}))),
            "regex": lambda: self.rule(_regex(_member(found, "pattern", str))),
            "any_text": lambda: self.rule(_FREE),
            "sequence": lambda: self.rule(" ".join(map(self.expression, _member(found, "elements", Sequence))) or '""'),
            "or": lambda: self.rule(" | ".join(map(self.expression, _some(found, "elements")))),
            "tag": lambda: self.rule(self._tag(found, _member(found, "begin", str))),
            "tags_with_separator": lambda: self._separated(found),
            "triggered_tags": lambda: self._between_text(found),
        }
        if kind not in writers:
            raise _wrong(f"has a format of type {kind!r:.80}; known are {', '.join(writers)}")
        written = writers[str(kind)]()
        self._depth -= 1
        return written

    def _tag(self, tag: Mapping[str, Any], begin: str) -> str:
        content = _member(tag, "content", Mapping)
        ends = tag.get("end", "")
        choices = [ends] if isinstance(ends, str) else ends
        if not isinstance(choices, list | tuple) or not choices or not all(isinstance(end, str) for end in choices):
            raise _wrong("has a tag whose end is neither a string nor a list of strings")
        end = " | ".join(map(self._literal, choices))
        if content.get("type") == "any_text" and all(choices):  # free up to the end
            lazy = self.rule(f"{_FREE} ({end})", "" if "<[" in end else "[lazy]")
            return f"{self._literal(begin)} {lazy}"
        return f"{self._literal(begin)} {self.expression(content)} ({end})"

    def _separated(self, found: Mapping[str, Any]) -> str:
        tag = self.rule(" | ".join(map(self.expression, _some(found, "tags"))))
        again = (
            f" ({self._literal(_member(found, 'separator', str))} {tag})*" if not found.get("stop_after_first") else ""
        )
        return self.rule(f"{tag}{again}" if found.get("at_least_one") else f"({tag}{again})?")

    def _between_text(self, found: Mapping[str, Any]) -> str:
        if found.get("excludes"):
            raise _wrong("has `excludes`, which is not supported; leave it out")
        parts = []
        for trigger, tags in _by_trigger(found).items():
            marker = self._literal(trigger)
            begin = self.rule(f"{_FREE} {marker}", "" if "<[" in marker else "[lazy]")
            parts.append(self.rule(f"{begin} ({self.tags_after(tags)})"))
        one = f"({' | '.join(parts)})"
        if found.get("stop_after_first"):
            return self.rule(one if found.get("at_least_one") else f"{one} | {_FREE}")
        return self.rule(f"{one}{'+' if found.get('at_least_one') else '*'} {_FREE}")


def _member(found: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = found.get(name)
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str)):
        words: dict[Any, str] = {str: "a string", Mapping: "an object", Sequence: "a list"}
        raise _wrong(f"needs {name}, which must be {words[kind]}")
    return value


def _some(found: Mapping[str, Any], name: str) -> Any:
    values = _member(found, name, Sequence)
    if not values:
        raise _wrong(f"needs at least one entry in {name}")
    return values


def _texts(found: Mapping[str, Any], name: str) -> list[str]:
    values = list(_member(found, name, Sequence))
    if not values or not all(isinstance(value, str) and value for value in values):
        raise _wrong(f"needs {name}, a list of strings that are not empty")
    return values


def _wrong(what: str) -> RequestError:
    return RequestError(f"structural_tag {what}.", PARAMETER)
