"""The formats of tool calls and reasoning: every one whole, cut at every place, damaged, and at length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.errors import ConfigError
from kvasir.outputs import CompletionOutput
from kvasir.parsers.base import (
    Content,
    OutputParser,
    OutputPart,
    PartReader,
    PlainTextParser,
    Reasoning,
    ToolCall,
    calls_of,
    content_of,
    joined,
    reasoning_of,
)
from kvasir.parsers.formats import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    VLLM_FORMATS,
    AnswerFormat,
    reasoning_format,
    tool_format,
)
from kvasir.parsers.scanner import make_parser
from kvasir.server.config import ServerConfig

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}},
    },
    "g": {"type": "object", "properties": {}},
}
ARGUMENTS: dict[str, Any] = {"a": 'x "y"\n é', "n": 3, "l": [1, {"b": "}"}]}
F = json.dumps(ARGUMENTS, ensure_ascii=False)
_TAGS = 'x "y"\n é'
_LIST = '[1, {"b": "}"}]'

# One answer for each format with the calls f(**ARGUMENTS) and g(), as its model writes them.
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{_TAGS}\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    f"<parameter=l>\n{_LIST}\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n<function=f>\n<parameter=a>{_TAGS}</parameter>\n<parameter=n>3</parameter>\n"
    f"<parameter=l>{_LIST}</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
    "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{_TAGS}</arg_value>\n<arg_key>n</arg_key>\n"
    f"<arg_value>3</arg_value>\n<arg_key>l</arg_key>\n<arg_value>{_LIST}</arg_value>\n</tool_call>\n"
    "<tool_call>g\n</tool_call>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{_TAGS}</parameter>\n'
    f'<parameter name="n">3</parameter>\n<parameter name="l">{_LIST}</parameter>\n</invoke>\n'
    '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
    f'<steptml:parameter name="a">{_TAGS}</steptml:parameter><steptml:parameter name="n">3</steptml:parameter>'
    f'<steptml:parameter name="l">{_LIST}</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="g"></steptml:invoke><｜tool_call_end｜>'
    "<｜tool_calls_end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    f'<｜DSML｜parameter name="a" string="true">{_TAGS}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="l" string="false">{_LIST}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    f'<｜DSML｜parameter name="a" string="true">{_TAGS}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="l" string="false">{_LIST}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "llama3_json": f'{{"name": "f", "parameters": {F}}}; {{"name": "g", "parameters": {{}}}}',
    "pythonic": "[f(a='x \"y\"\\n é', n=3, l=[1, {'b': '}'}]), g()]",
    "llama4_pythonic": "<|python_start|>[f(a='x \"y\"\\n é', n=3, l=[1, {'b': '}'}]), g()]<|python_end|>",
    "olmo3": '<function_calls>f(a="x \\"y\\"\\n é", n=3, l=[1, {"b": "}"}])\ng()</function_calls>',
    "lfm2": "<|tool_call_start|>[f(a='x \"y\"\\n é', n=3, l=[1, {'b': '}'}]), g()]<|tool_call_end|>",
    "mistral_v1": f'[TOOL_CALLS][{{"name": "f", "arguments": {F}}}, {{"name": "g", "arguments": {{}}}}]',
    "mistral": f"[TOOL_CALLS]f[ARGS]{F}[TOOL_CALLS]g[ARGS]{{}}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    f"{F}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{F}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{F}"
    "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "functiongemma": '<start_function_call>call:f{a:<escape>x "y"\n é<escape>,n:3,l:[1,{b:<escape>}<escape>}]}'
    "<end_function_call><start_function_call>call:g{}<end_function_call>",
    "gemma4": '<|tool_call>call:f{a:<|"|>x "y"\n é<|"|>,n:3,l:[1,{b:<|"|>}<|"|>}]}<tool_call|>'
    "<|tool_call>call:g{}<tool_call|>",
    "granite": f'<|tool_call|>[{{"name": "f", "arguments": {F}}}, {{"name": "g", "arguments": {{}}}}]',
    "granite-20b-fc": f'<function_call> {{"name": "f", "arguments": {F}}}'
    '<function_call> {"name": "g", "arguments": {}}',
    "gigachat3": f'<|function_call|>{{"name": "f", "arguments": {F}}}'
    '<|function_call|>{"name": "g", "arguments": {}}',
    "phi4_mini_json": f'functools[{{"name": "f", "arguments": {F}}}, {{"name": "g", "arguments": {{}}}}]',
    "xlam": f'[{{"name": "f", "arguments": {F}}}, {{"name": "g", "arguments": {{}}}}]',
    "jamba": f'<tool_calls>[\n    {{"name": "f", "arguments": {F}}},\n'
    '    {"name": "g", "arguments": {}}\n]</tool_calls>',
    "minimax": f'<tool_calls>\n{{"name": "f", "arguments": {F}}}\n{{"name": "g", "arguments": {{}}}}\n</tool_calls>',
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "f", "parameters": {F}}}<|action_end|>\n'
    '<|action_start|><|plugin|>\n{"name": "g", "parameters": {}}<|action_end|>',
    "cohere_command3": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "f", "parameters": {F}}},\n'
    '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
    "longcat": f'<longcat_tool_call>{{"name": "f", "arguments": {F}}}</longcat_tool_call>\n'
    '<longcat_tool_call>{"name": "g"}</longcat_tool_call>',
    "openai": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{F}<|call|>"
    "<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>",
}


def make(form: AnswerFormat, **options: Any) -> OutputParser:
    options.setdefault("schemas", SCHEMAS)
    return make_parser(form, options.pop("schemas"), make_id=lambda: "id", **options)


def read(form: AnswerFormat, pieces: Sequence[str], **options: Any) -> list[OutputPart]:
    parser = make(form, **options)
    found = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*found, *parser.finish()])


def both_calls(parts: Sequence[OutputPart]) -> bool:
    first, second = calls_of(parts)
    return (first.name, json.loads(first.arguments), second.name, second.arguments) == ("f", ARGUMENTS, "g", "{}")


# ---------------------------------------------------------------- every format


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *(("qwen2.5", "hermes"), ("qwen3", "hermes"), ("ernie45", "hermes"), ("deepseek_r1", "deepseek_v3")),
        *(("gpt-oss", "openai"), ("harmony", "openai"), ("gemma", "functiongemma"), ("hunyuan", "jamba")),
        *(("command-r", "cohere_command3"), ("qwen3_xml", "qwen3_coder"), ("glm47", "glm45")),
    ],
)
def test_names_that_models_are_known_by(name: str, row: str) -> None:
    assert tool_format(name).name == row


def test_every_format_has_an_answer_here() -> None:
    assert CALLS.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_format(name: str) -> None:
    parts = read(AnswerFormat(tool_format(name)), [CALLS[name]])
    assert both_calls(parts) and content_of(parts) == "", parts


@pytest.mark.parametrize("name", CALLS)
def test_parts_do_not_depend_on_cuts(name: str) -> None:
    form = AnswerFormat(tool_format(name), reasoning_format("openai_gptoss" if name == "openai" else "qwen3"))
    thought = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        if name == "openai"
        else "<think>\nHm.\n</think>\n\n"
    )
    text = thought + CALLS[name]
    whole = read(form, [text])
    assert whole[0] == Reasoning("Hm.") and both_calls(whole[1:]) and content_of(whole) == ""
    for cut in range(1, len(text)):
        assert read(form, [text[:cut], text[cut:]]) == whole, text[:cut]
    assert read(form, list(text)) == whole


@pytest.mark.parametrize("name", [name for name in CALLS if not tool_format(name).is_bare and name != "openai"])
def test_text_around_calls_is_content(name: str) -> None:
    parts = read(AnswerFormat(tool_format(name)), ["Let me see.\n" + CALLS[name] + "\nDone."])
    assert both_calls(parts)
    assert content_of(parts) == "Let me see.\nDone."


@pytest.mark.parametrize("name", CALLS)
def test_arguments_come_before_the_call_is_complete(name: str) -> None:
    """Only a marker's beginning is held back, so a long string argument is passed on while it is written."""
    parser = make(AnswerFormat(tool_format(name)))
    text = CALLS[name]
    at = text.index("x ") + 2
    parts = joined(parser.feed(text[:at]))
    assert isinstance(parts[0], ToolCall) and parts[0].name == "f"
    assert calls_of(parts)[0].arguments.replace(" ", "").startswith('{"a":"x')


@pytest.mark.parametrize("name", CALLS)
def test_without_tools_calls_stay_text(name: str) -> None:
    form = AnswerFormat(tool_format(name))
    assert read(form, [CALLS[name]], schemas=None) == [Content(CALLS[name])]


@pytest.mark.parametrize("name", CALLS)
def test_one_call_where_parallel_calls_are_off(name: str) -> None:
    parts = read(AnswerFormat(tool_format(name)), [CALLS[name]], parallel=False)
    assert [call.name for call in calls_of(parts)] == ["f"] and content_of(parts) == ""


# ---------------------------------------------------------------- single formats

_HERMES = AnswerFormat(tool_format("hermes"), reasoning_format("qwen3"))


def test_the_name_may_come_after_the_arguments() -> None:
    parts = read(_HERMES, ['<tool_call>{"arguments": {"a": "x"}, "name": "f"}</tool_call>'])
    assert calls_of(parts)[0].arguments == '{"a": "x"}'


def test_arguments_may_be_the_text_of_an_object() -> None:
    parts = read(_HERMES, [r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\u00e9\ud83d\ude00\"}"}</tool_call>'])
    assert json.loads(calls_of(parts)[0].arguments) == {"a": "é😀"}


def test_mistral_reads_its_older_form_and_ids() -> None:
    form = AnswerFormat(tool_format("mistral"))
    assert both_calls(read(form, [CALLS["mistral_v1"]]))
    parts = read(form, ["[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}"])
    assert [call.id for call in calls_of(parts)] == ["abcdefghi"]
    assert len(calls_of(make_and_read(form, CALLS["mistral"]))[0].id) == 9


def make_and_read(form: AnswerFormat, text: str) -> list[OutputPart]:
    parser = make_parser(form, SCHEMAS)
    return [*parser.feed(text), *parser.finish()]


def test_kimi_ids_are_the_models() -> None:
    parts = read(AnswerFormat(tool_format("kimi_k2")), [CALLS["kimi_k2"]])
    assert [call.id for call in calls_of(parts)] == ["functions.f:0", "functions.g:1"]


@pytest.mark.parametrize("name", ["llama3_json", "pythonic", "xlam"])
def test_bare_formats_call_only_tools_of_the_request(name: str) -> None:
    text = CALLS[name].replace('"f"', '"h"').replace("f(", "h(")
    assert read(AnswerFormat(tool_format(name)), [text]) == [Content(text)]


def test_values_in_tags_follow_the_schema() -> None:
    schema = {
        "properties": {
            "s": {"type": "string"},
            "b": {"type": "boolean"},
            "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "d": {"type": "object"},
            "e": {"enum": ["1", "2"]},
        }
    }
    values = {"s": "1", "b": "True", "o": "null", "d": "{'k': None}", "e": "2", "unknown": "7", "text": "seven"}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    parts = read(
        AnswerFormat(tool_format("qwen3_coder")),
        [f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"],
        schemas={"f": schema},
    )
    expected = {"s": "1", "b": True, "o": None, "d": {"k": None}, "e": "2", "unknown": 7, "text": "seven"}
    assert json.loads(calls_of(parts)[0].arguments) == expected


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "[1e999, None]", "{1: 2}", "{1, 2}", "[" * 5000, "9" * 9999, "1e999", "\u0000", ""]
)
@pytest.mark.parametrize("kind", [{"type": "number"}, {"type": "array"}, {"type": ["integer", "string"]}, {}])
def test_odd_values_in_tags_are_json_all_the_same(value: str, kind: dict[str, Any]) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    parts = read(AnswerFormat(tool_format("qwen3_coder")), [text], schemas={"f": {"properties": {"a": kind}}})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    arguments = calls_of(parts)[0].arguments
    assert "a" in json.loads(arguments.replace("9" * 9999, "9"), parse_constant=refuse)


def test_python_values_become_json() -> None:
    text = """[f('by position', n=-1_000, a=r, l=[True, None, (1, .5), {'k': "q\\x41\\u00e9\\'"}, ''])]"""
    parts = read(AnswerFormat(tool_format("pythonic")), [text])
    found = json.loads(calls_of(parts)[0].arguments)
    assert found == {"a": "r", "n": -1000, "l": [True, None, [1, 0.5], {"k": "qAé'"}, ""]}


def test_gpt_oss_channels() -> None:
    form = AnswerFormat(tool_format("openai"), reasoning_format("openai_gptoss"))
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
    )
    parts = read(form, [text])
    assert (reasoning_of(parts), content_of(parts), len(calls_of(parts))) == ("Hm.", "I look.", 1)
    assert read(form, ["<|channel|>final<|message|>Hi"]) == [Content("Hi")]
    assert read(form, ["Hi"]) == [Content("Hi")]


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize("name", [name for name in REASONING_FORMATS if name != "openai_gptoss"])
def test_reasoning_of_every_format(name: str) -> None:
    row = reasoning_format(name)
    for opening, closing in zip(row.open, row.close, strict=True):
        answer = f"{row.answer[0]}Yes.{row.answer[1]}"
        text = f"{opening}\nFirst.\n\nThen.\n{closing}\n\n{answer}"
        expected = [Reasoning("First.\n\nThen."), Content("Yes.")]
        for cut in range(len(text)):
            assert read(AnswerFormat(None, row), [text[:cut], text[cut:]], schemas=None) == expected
        begun = text.removeprefix(opening)
        assert read(AnswerFormat(None, row), [begun], schemas=None, in_reasoning=True) == expected


def test_reasoning_that_does_not_end() -> None:
    assert read(_HERMES, ["<think>\nHm."]) == [Reasoning("Hm.")]


def test_reasoning_is_only_at_the_beginning() -> None:
    text = "It writes <think> first. </think>"
    assert read(_HERMES, [text]) == [Content(text)]


def test_calls_in_reasoning_are_reasoning_unless_the_format_says_otherwise() -> None:
    text = f"<think>I could call {CALLS['hermes']}"
    assert [type(part) for part in read(_HERMES, [text])] == [Reasoning]
    kimi = AnswerFormat(tool_format("kimi_k2"), reasoning_format("kimi_k2"))
    parts = read(kimi, ["<think>Hm." + CALLS["kimi_k2"]])
    assert reasoning_of(parts) == "Hm." and both_calls(parts)


def test_leading_space_is_kept_where_there_is_no_reasoning() -> None:
    assert read(_HERMES, [" \n", "Hi "]) == [Content(" \nHi ")]
    assert read(_HERMES, [" \n"]) == [Content(" \n")]


# ---------------------------------------------------------------- malformed


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nno JSON\n</tool_call>",
        '<tool_call>{"nam": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}',
        f'<tool_call>{{"name": "{"f" * 1000}"}}</tool_call>',
        "<tool_call",
    ],
)
def test_malformed_calls_are_content(text: str) -> None:
    assert read(_HERMES, ["A " + text]) == [Content("A " + text)]
    assert read(_HERMES, list("A " + text)) == [Content("A " + text)]


def test_a_call_after_a_malformed_one_is_read() -> None:
    parts = read(_HERMES, ["<tool_call>oops<tool_call>" + '{"name": "g"}</tool_call>'])
    assert [call.name for call in calls_of(parts)] == ["g"] and content_of(parts) == "<tool_call>oops"


def test_truncated_arguments_are_returned_as_far_as_they_go() -> None:
    for name in ("hermes", "qwen3_coder", "pythonic"):
        text = CALLS[name]
        parts = read(AnswerFormat(tool_format(name)), [text[: text.index("x ") + 2]])
        assert calls_of(parts)[0].arguments.startswith('{"a": "x')


_FORMS = [
    AnswerFormat(tools, reasoning)
    for tools in (None, *TOOL_FORMATS.values())
    for reasoning in (None, *(reasoning_format(name) for name in ("deepseek_r1", "kimi_k2", "ernie45", "granite")))
]


def _words(form: AnswerFormat) -> list[str]:
    found = {
        *"{}[]\",:=()'\\ \n<>x1",
        '"name"',
        '"f"',
        '"arguments"',
        "f(",
        '{"name": "f", "arguments": {',
        "\\u00e9",
        "\\ud83d",
    }
    if form.tools is not None:
        found |= {word for text in form.tools.texts() for word in (text, *text.split())}
    if form.is_harmony:
        found |= {
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "analysis",
            "final",
            " to=functions.f",
        }
    if form.reasoning is not None:
        found |= {*form.reasoning.open, *form.reasoning.close, *form.reasoning.answer}
    return sorted(found - {""})


@st.composite
def damaged(draw: st.DrawFn) -> tuple[AnswerFormat, str, list[int]]:
    form = draw(st.sampled_from(_FORMS))
    noise = "".join(draw(st.lists(st.sampled_from(_words(form)), max_size=20)))
    text = CALLS[form.tools.name] if form.tools is not None and draw(st.booleans()) else ""
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, min(len(text), begin + 10)))
    text = text[:begin] + noise + text[end:] + draw(st.text(max_size=5))
    return form, text, draw(st.lists(st.integers(1, 12), min_size=1, max_size=30))


@pytest.mark.examples
@settings(deadline=None)
@given(damaged(), st.booleans(), st.booleans())
def test_damaged_answers_never_fail_and_cuts_do_not_matter(
    case: tuple[AnswerFormat, str, list[int]], in_reasoning: bool, parallel: bool
) -> None:
    form, text, sizes = case
    options = {"in_reasoning": in_reasoning, "parallel": parallel}
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    whole = read(form, [text], **options)
    assert read(form, pieces, **options) == whole
    if form.is_plain or (not any(word in text for word in _begin_words(form)) and not in_reasoning):
        assert content_of(whole) == text


def _begin_words(form: AnswerFormat) -> set[str]:
    """Texts without which an answer has only content."""
    found: set[str] = set()
    if form.tools is not None:
        texts = (form.tools.opening, *form.tools.also)
        found |= {text.split()[0] for text in texts if text} | ({"[", "{"} if form.tools.is_bare else set())
        found |= {"<|"} if form.is_harmony else set()
    if form.reasoning is not None:
        found |= {
            text.strip() for text in (*form.reasoning.open, *form.reasoning.close, *form.reasoning.answer) if text
        }
    return found


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "kimi_k2", "openai"])
def test_little_is_held_back(name: str) -> None:
    """The reader keeps only a possible marker's beginning, however long the answer and its arguments are."""
    form = AnswerFormat(tool_format(name))
    parser = make(form)
    text = CALLS[name]
    at = text.index("x ")
    parser.feed(text[:at])
    longest = 0
    for _ in range(5000):
        parser.feed("<tool< ")
        longest = max(longest, len(parser._text) - parser._at)  # type: ignore[attr-defined]
    assert longest < 100


@pytest.mark.parametrize("noise", ["<tool_call>", '<tool_call>{"a": [', '<tool_call>{"name": "', "<", "[" * 50, '"\\'])
def test_hostile_answers_are_read_once(noise: str) -> None:
    """No character is read twice: the steps of the reader are bounded by the length of the text."""
    parser = make(_HERMES)
    taken = 0
    original = parser._take  # type: ignore[attr-defined]

    def counted(end: int) -> str:
        nonlocal taken
        found: str = original(end)
        taken += len(found)
        return found

    parser._take = counted  # type: ignore[attr-defined]
    text = noise * 2000
    parts = [*parser.feed(text), *parser.finish()]
    assert taken <= len(text)
    assert content_of(parts) == text


# ---------------------------------------------------------------- names, and the reader of parts


# vLLM's names, older ones too.
VLLM_TOOLS = """
    apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 ernie45 functiongemma
    gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hunyuan_a13b hy_v3 inkling internlm jamba
    kimi_k2 kimi_k3 lfm2 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax minimax_m2 minimax_m3
    mistral olmo3 openai phi4_mini_json poolside_v1 pythonic qwen3_coder qwen3_xml seed_oss solar_open2 step3 step3p5
    xlam
"""
VLLM_REASONING = """
    cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 ernie45 gemma4 glm45 glm47 granite holo2
    hunyuan_a13b hy_v3 inkling kimi_k2 kimi_k3 mimo minimax_m2 minimax_m2_append_think minimax_m3 mistral nemotron_v3
    olmo3 openai_gptoss poolside_v1 qwen3 seed_oss solar_open2 step3 step3p5
"""


@pytest.mark.parametrize(("setting", "names"), [("tool_call_parser", VLLM_TOOLS), ("reasoning_parser", VLLM_REASONING)])
def test_vllms_names_are_known(setting: str, names: str) -> None:
    for name in names.split():
        if name not in VLLM_FORMATS:
            find = tool_format if setting == "tool_call_parser" else reasoning_format
            assert find(getattr(ServerConfig(**{setting: name}), setting))
        else:
            with pytest.raises(ConfigError, match=f"'{name}' is a format of vLLM that Kvasir does not read"):
                ServerConfig(**{setting: name})
    with pytest.raises(ConfigError, match="Did you mean qwen3_coder"):
        ServerConfig(tool_call_parser="qwen3-coder")


def test_all_names_lead_to_a_row() -> None:
    for name in (*TOOL_ALIASES, *TOOL_FORMATS):
        assert tool_format(name).name in TOOL_FORMATS
    for name in (*REASONING_ALIASES, *REASONING_FORMATS):
        assert reasoning_format(name).name in REASONING_FORMATS
    with pytest.raises(ConfigError, match="tool_call_parser='nope' is not a known format"):
        tool_format("nope")


def test_each_completion_has_its_own_parser() -> None:
    reader = PartReader(lambda: make(_HERMES))
    first = reader.read(0, CompletionOutput(0, "<think>a", [], None, None))
    second = reader.read(1, CompletionOutput(1, "b", [], None, None))
    assert (first, second) == ([Reasoning("a")], [Content("b")])
    assert isinstance(make_parser(AnswerFormat(), SCHEMAS), PlainTextParser)
