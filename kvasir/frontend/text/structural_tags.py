"""Structural tags as grammars: text in which some parts are held to a schema. API process.

Two forms are read: vLLM's older one with `structures` and `triggers`, and the newer one with a `format`, which nests
formats by their `type`. Text that is free up to triggers becomes tags; everything else becomes one Lark grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from kvasir.errors import RequestError, did_you_mean
from kvasir.sampling_params import GrammarTag

_PARAMETER = "structured_outputs"
_ANY_TEXT = r"/(.|\n)*/"
_MAX_DEPTH = 32
JsonRule = Callable[[Any], str]  # a Lark expression for a schema


Literal = Callable[[str], str]  # a Lark expression for a text


def read_structural_tag(
    value: str | Mapping[str, Any], json_rule: JsonRule, literal: Literal
) -> str | tuple[GrammarTag, ...]:
    """A Lark grammar for the whole output, or tags if the output is free up to triggers."""
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
    """The older form as a format of the newer one."""
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
        """Any of these tags, of which only the given rest of the beginning is left to write."""
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
            "regex": lambda: self.rule(f"/{regex_to_lark(_member(found, 'pattern', str), 'd')}/"),
            "any_text": lambda: self.rule(_ANY_TEXT),
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
        choices = [ends] if isinstance(ends, str) else list(ends)
        if not choices or not all(isinstance(end, str) for end in choices):
            raise _wrong("has a tag whose end is neither a string nor a list of strings")
        end = " | ".join(map(self._literal, choices))
        if content.get("type") == "any_text" and all(choices):  # free up to the end
            lazy = self.rule(f"{_ANY_TEXT} ({end})", "" if "<[" in end else "[lazy]")
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
            begin = self.rule(f"{_ANY_TEXT} {marker}", "" if "<[" in marker else "[lazy]")
            parts.append(self.rule(f"{begin} ({self.tags_after(tags)})"))
        one = f"({' | '.join(parts)})"
        if found.get("stop_after_first"):
            return self.rule(one if found.get("at_least_one") else f"{one} | {_ANY_TEXT}")
        return self.rule(f"{one}{'+' if found.get('at_least_one') else '*'} {_ANY_TEXT}")


def _member(found: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = found.get(name)
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str)):
        words: dict[Any, str] = {str: "a string", Mapping: "an object", Sequence: "a list"}
        raise _wrong(f"needs {name}, which must be {words[kind]}{did_you_mean(name, list(map(str, found)))}")
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
    return RequestError(f"structural_tag {what}.", _PARAMETER)
