"""Grammars of calls: they take what the model writes, refuse what the schema does not allow, and are of its format."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from kvasir.errors import RequestError
from kvasir.parsers.base import calls_of
from kvasir.parsers.formats import TOOL_FORMATS, AnswerFormat, reasoning_format
from kvasir.parsers.grammar import GrammarWriter
from kvasir.parsers.scanner import make_parser
from kvasir.parsers.templates import write_calls
from kvasir.parsers.value_grammar import CallableTool

ARGUMENTS: dict[str, Any] = {"a": 'x "y"\n é', "n": 3, "l": [1, 2]}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer", "maximum": 9},
        "l": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["a", "n"],
}
TOOLS = [CallableTool("f", SCHEMA), CallableTool("g", {"type": "object", "properties": {}})]
BYTES = LLTokenizer("byte")
# Schemas of an argument, values that fit, and values that do not.
VALUES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "enum": ({"type": "string", "enum": ["one", "two"]}, ["one"], ["three"]),
    "const without type": ({"const": "k"}, ["k"], ["z"]),
    "enum without type": ({"enum": ["one", "two"]}, ["two"], ["three"]),
    "mixed enum": ({"enum": ["one", 2]}, ["one", 2], ["three", 3]),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abx"]),
    "pattern anywhere": ({"type": "string", "pattern": "[0-9]"}, ["a1b"], ["abx"]),
    "pattern and length": ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 3}, ["abc"], ["abcabc", "abx"]),
    "least length": ({"type": "string", "minLength": 2}, ["xy", "x y"], ["x"]),
    "lengths": ({"type": "string", "minLength": 1, "maxLength": 3}, ["xyz"], ["wxyz", ""]),
    "date": ({"type": "string", "format": "date"}, ["2020-01-02"], ["monday"]),
    "integer": ({"type": "integer", "minimum": 1, "maximum": 9}, [3], [12]),
    "integer enum": ({"type": "integer", "enum": [1, 2]}, [2], [3]),
    "number": ({"type": "number", "minimum": 0}, [1.5], [-1]),
    "text or null": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a"], []),
    "long text or null": ({"anyOf": [{"type": "string", "minLength": 3}, {"type": "null"}]}, ["abc"], ["a"]),
    "integer or null": ({"type": ["integer", "null"], "minimum": 0, "maximum": 99}, [2], ["a"]),
    "texts": ({"anyOf": [{"const": "a"}, {"type": "string", "pattern": "^[0-9]+$"}]}, ["a", "12"], ["b"]),
    "text or integer": ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 3], [[1]]),
    "array": ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1]], [[], [1, 2, 3]]),
    "object": (
        {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"], "additionalProperties": False},
        [{"y": 2}],
        [{"y": 2.5}, {}, {"y": 2, "z": 1}],
    ),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"q": 1}], [{"q": 1.5}]),
    "reference": ({"$ref": "#/$defs/word"}, ["one"], ["three"]),
    "reference with a title": ({"allOf": [{"$ref": "#/$defs/word"}], "title": "Word"}, ["one"], ["three"]),
    "tree": ({"$ref": "#/$defs/tree"}, [{"of": [{"of": []}]}], [{"of": [1]}]),
}
DEFINITIONS = {
    "word": {"type": "string", "enum": ["one", "two"]},
    "tree": {
        "type": "object",
        "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        "required": ["of"],
        "additionalProperties": False,
    },
}


def accepted(lark: str, text: str) -> int:
    """How many bytes of a text a grammar takes; all and one more if it may end there."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    count = matcher.validate_tokens(tokens)
    if count < len(tokens):
        return count
    matcher.consume_tokens(tokens)
    return count + int(matcher.is_accepting())


def takes(lark: str, text: str) -> bool:
    return accepted(lark, text) > len(text.encode())


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    text = write_calls(TOOL_FORMATS[name], calls)
    return text.removeprefix("<|start|>assistant").removesuffix("<|call|>") if name == "openai" else text


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_answer_that_must_be_calls(name: str) -> None:
    form = TOOL_FORMATS[name]
    one, two = written(name, ("f", ARGUMENTS)), written(name, ("f", ARGUMENTS), ("g", {}))
    several, single = (GrammarWriter(form, {}).whole(TOOLS, parallel) for parallel in (True, False))
    assert takes(several, one) and takes(several, two) and takes(single, one)
    assert not takes(single, two)
    assert not takes(several, "Hello.") and not takes(several, "")
    assert not takes(several, written(name, ("h", {}))), "another tool"
    assert not takes(several, written(name, ("f", {"a": "x", "n": 10}))), "beyond the maximum"
    assert not takes(several, written(name, ("f", {"a": "x"}))), "a required argument is missing"
    assert not takes(several, written(name, ("f", {**ARGUMENTS, "z": 1}))), "an argument that the schema does not name"
    assert takes(several, written(name, ("f", {"a": "x", "n": 3}))), "an optional argument may be left out"


def written_ways(name: str, value: Any) -> list[str]:
    """How a model may write a call with a value: strings as they are or as JSON, Python with JSON's quotes."""
    form = TOOL_FORMATS[name]
    ways = [written(name, ("f", {"v": value}))]
    if form.arguments == "pythonic":
        ways = [ways[0].replace(repr(value), json.dumps(value))]
    elif form.arguments == "tagged" and isinstance(value, str):
        way = ways[0].replace(f'"true">{value}', f'"false">{value}') if form.flag_end else ways[0]
        ways.append(way.replace(value + form.value_end, json.dumps(value) + form.value_end))
    return ways


def read_back(name: str, text: str, schema: dict[str, Any]) -> Any:
    parser = make_parser(AnswerFormat(TOOL_FORMATS[name]), {"f": schema})
    (call,) = calls_of([*parser.feed(text), *parser.finish()])
    return json.loads(call.arguments)


def read(name: str, grammar: str, value: Any, schema: dict[str, Any]) -> list[Any]:
    """The arguments of all the ways in which a grammar lets a value be written. They always fit."""
    found = [read_back(name, way, schema) for way in written_ways(name, value) if takes(grammar, way)]
    assert all(jsonschema.Draft202012Validator(schema).is_valid(each) for each in found)
    return found


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_arguments_are_held_to_their_schema_and_read_back(name: str) -> None:
    for case, (kind, right, wrong) in VALUES.items():
        schema = {"type": "object", "properties": {"v": kind}, "required": ["v"], "$defs": DEFINITIONS}
        grammar = GrammarWriter(TOOL_FORMATS[name], {}).whole([CallableTool("f", schema)], False)
        for value in right:
            assert {"v": value} in read(name, grammar, value, schema), f"{case}: {value!r} is refused"
        for value in wrong:
            assert {"v": value} not in read(name, grammar, value, schema), f"{case}: {value!r} is taken"


def spoken(lark: str, random: Random, most: int = 400) -> str | None:
    """A text that a grammar allows, drawn byte by byte; None if it is too long."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(lark))
    text = bytearray()
    while len(text) < most:
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if not allowed:
            assert matcher.is_accepting()
            return text.decode()
        plain = [byte for byte in allowed if chr(byte) in ' "</>}]|abc0123\n,']
        byte = random.choice(plain if plain and random.random() < 0.9 else allowed)
        assert matcher.consume_token(byte)
        text.append(byte)
        if matcher.is_stopped():
            return text.decode()
    return None


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "deepseek_v32", "pythonic", "gemma4"])
def test_whatever_a_grammar_allows_is_a_call_that_fits(name: str) -> None:
    random, finished = Random(name), 0
    for case, (kind, _, _) in VALUES.items():
        schema = {"type": "object", "properties": {"v": kind}, "required": ["v"], "$defs": DEFINITIONS}
        grammar = GrammarWriter(TOOL_FORMATS[name], {}).whole([CallableTool("f", schema)], False)
        for _ in range(4):
            text = spoken(grammar, random)
            if text is not None:
                finished += 1
                said = read_back(name, text, schema)
                assert jsonschema.Draft202012Validator(schema).is_valid(said), f"{case}: {text!r} is {said}"
    assert finished > 2 * len(VALUES)


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if TOOL_FORMATS[name].arguments != "pythonic"])
def test_arguments_that_the_schema_does_not_name(name: str) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 3}}
    grammar = GrammarWriter(TOOL_FORMATS[name], {}).whole([CallableTool("f", schema)], False)
    for given, fits in (({}, True), ({"any": "12", "b": "x"}, True), ({"any": "long"}, False)):
        text = written(name, ("f", given))
        assert takes(grammar, text) == fits
        assert not fits or read_back(name, text, schema) == given


def test_what_cannot_be_written_out_is_refused_unless_lenient() -> None:
    for kind in ({"type": "string", "format": "uri"}, {"type": "string", "not": {"const": "a"}}):
        schema = {"type": "object", "properties": {"v": kind}, "required": ["v"]}
        for name in ("qwen3_coder", "gemma4"):
            with pytest.raises(RequestError, match="The tool 'f' has .* which cannot be enforced"):
                GrammarWriter(TOOL_FORMATS[name], {}).whole([CallableTool("f", schema)], False)
            lark = GrammarWriter(TOOL_FORMATS[name], {}).whole([CallableTool("f", schema, lenient=True)], False)
            assert takes(lark, written(name, ("f", {"v": "x"})))


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "openai"])
def test_reasoning_may_come_first(name: str) -> None:
    lark = GrammarWriter(TOOL_FORMATS[name], {}).whole(TOOLS, True, ("<think>", "</think>"))
    text = written(name, ("g", {}))
    assert takes(lark, text) and takes(lark, f"<think>\nHm. {{}}\n</think>\n\n{text}")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_that_the_model_begins(name: str) -> None:
    """What follows the trigger is held to the schema, and ends with the calls."""
    form = TOOL_FORMATS[name]
    text = written(name, ("f", ARGUMENTS)) + ("<|call|>" if name == "openai" else "")
    tag = GrammarWriter(form, {}).tags(TOOLS, True)[0]
    rest = text[text.index(tag.trigger) + len(tag.trigger) :].removesuffix("<|python_end|>")
    assert takes(tag.grammar, rest)
    wrong = written(name, ("f", {"a": "x", "n": 10}))
    assert not takes(tag.grammar, wrong[wrong.index(tag.trigger) + len(tag.trigger) :])


def test_special_tokens_are_written_by_their_ids() -> None:
    form = TOOL_FORMATS["kimi_k2"]
    special = {text: 1000 + place for place, text in enumerate(sorted(form.texts()))}
    writer = GrammarWriter(form, special)
    lark = writer.whole(TOOLS, True)
    assert "<[1000]>" in lark and "tool_call_begin" not in lark
    (tag,) = GrammarWriter(form, special).tags(TOOLS, True)
    assert tag.trigger == "<|tool_calls_section_begin|>"


def test_an_answer_of_a_form_instead_of_calls() -> None:
    lark = GrammarWriter(TOOL_FORMATS["hermes"], {}).whole(TOOLS, True, None, '"yes"')
    assert takes(lark, "yes") and takes(lark, written("hermes", ("g", {}))) and not takes(lark, "no")
    writer = GrammarWriter(TOOL_FORMATS["hermes"], {}, reasoning_format("qwen3"))
    lark = writer.answer('"yes"', ("<think>", "</think>"), False)
    assert takes(lark, "yes") and takes(lark, "<think>\nHm.\n</think>\n\nyes") and not takes(lark, "<think>yes")


def test_custom_tools_have_their_grammar() -> None:
    regex = CallableTool("f", is_custom=True, regex="[0-9]+")
    lark = CallableTool("f", is_custom=True, lark='start: "a" | "b"')
    hermes, coder = TOOL_FORMATS["hermes"], TOOL_FORMATS["qwen3_coder"]
    grammar = GrammarWriter(hermes, {}).whole([regex], False)
    assert takes(grammar, written("hermes", ("f", {"input": "12"})))
    assert not takes(grammar, written("hermes", ("f", {"input": "x"})))
    for tool, right, wrong in ((regex, "12", "x"), (lark, "a", "c")):
        grammar = GrammarWriter(coder, {}).whole([tool], False)
        assert takes(grammar, written("qwen3_coder", ("f", {"input": right})))
        assert not takes(grammar, written("qwen3_coder", ("f", {"input": wrong})))
    with pytest.raises(RequestError, match="use a grammar of the syntax 'regex'"):
        GrammarWriter(hermes, {}).whole([lark], False)


def test_strings_in_tags_keep_to_their_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "e": {"type": "string", "enum": ["one", "two"]},
            "p": {"type": "string", "pattern": "^[a-c]+$"},
            "m": {"type": "string", "minLength": 1, "maxLength": 3},
        },
        "required": ["e", "p", "m"],
    }
    grammar = GrammarWriter(TOOL_FORMATS["qwen3_coder"], {}).whole([CallableTool("f", schema)], False)
    good = {"e": "two", "p": "abc", "m": "xyz"}
    assert takes(grammar, written("qwen3_coder", ("f", good)))
    for wrong in ({"e": "three"}, {"p": "abx"}, {"m": "wxyz"}):
        assert not takes(grammar, written("qwen3_coder", ("f", {**good, **wrong})))
