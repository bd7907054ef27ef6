"""Grammars of calls: they take what the model writes, refuse what the schema does not allow, and are of its format."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvasir.errors import RequestError
from kvasir.parsers.formats import TOOL_FORMATS, reasoning_format
from kvasir.parsers.grammar import CallableTool, GrammarWriter
from kvasir.parsers.templates import write_calls

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
