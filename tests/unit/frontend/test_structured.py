"""Structured outputs in the API process: grammars from parameters, what they accept, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import is_lark_syntax
from pydantic import BaseModel

from kvasir.config.engine import ModelConfig
from kvasir.engine.grammar_compile import CompiledGrammars, compile_grammar, parser_limits
from kvasir.engine.grammar_guide import GrammarGuide
from kvasir.engine.grammar_lexers import GrammarLexers
from kvasir.errors import RequestError
from kvasir.executor.fake import fake_config
from kvasir.frontend.requests import structured
from kvasir.frontend.requests.structured import StructuredOutputs, jumps_are_exact
from kvasir.frontend.text.grammar import _IS_LARK, JsonStyle, build_grammar, from_triggers, json_rule, literal
from kvasir.messages import Extras, RowSampling
from kvasir.sampling_params import GrammarTag, SamplingParams, StructuredOutputsParams
from tests.grammars import CALL, EOS, THINK_END, small_tokenizer, small_vocabulary, token_id

THING = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": THING}, "end": "</f>"}


def accepts(grammar: str, text: str) -> bool:
    """Whether a text is a complete output of a grammar."""
    matcher = compile_grammar(small_vocabulary(), grammar).deep_copy()
    ids = small_tokenizer().encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar_of(style: JsonStyle | None = None, **given: Any) -> str:
    return build_grammar(StructuredOutputsParams(**given), style or JsonStyle()).text


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"json": THING}, '{"a": 1}', '{"a":1}'),
        ({"json": json.dumps(THING)}, '{"a": -3, "b": [1, 2]}', '{"b": 1}'),
        ({"json": THING, "disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
        ({"json": THING, "whitespace": "compact"}, '{"a":1}', '{"a": 1}'),
        ({"json": THING, "whitespace": "flexible"}, '{ "a" :\n  1\n}', '{"a":' + 9 * " " + "1}"),
        ({"json": THING, "whitespace_pattern": "_?"}, '{"a":_1}', '{"a": 1}'),
        ({"json": THING, "disable_additional_properties": True}, '{"a": 1}', '{"a": 1, "b": 2}'),
        ({"json": True}, "[1, null]", "[1"),
        ({"json_object": True}, "{}", "[]"),
        ({"regex": "a/b\\d"}, "a/b7", "a/b\u0667"),
        ({"choice": ["yes", 'n"o\n']}, 'n"o\n', "no"),
        ({"choice": ["", "x"]}, "", "y"),
        ({"choice": ["x", "x y", ""]}, "x y", "x z"),
        ({"choice": [""]}, "", "y"),
        ({"grammar": 'start: "a" B\nB: /[0-9]+/'}, "a12", "a"),
        ({"grammar": '?start: "a" B | c\nB: /[0-9]+/\n?c: "c"'}, "a12", "a"),
        ({"grammar": '  !start : "a" B\nB: /[0-9]+/'}, "a1", "1"),
        ({"grammar": 'start[max_tokens=5]: /a[0-9]/'}, "a1", "1"),
        ({"grammar": 'root ::= "a" [0-9]+ | x\nx ::= "x"'}, "x", "ax"),
        ({"grammar": 'root ::= "start" start # start\nstart ::= [start] start-up\nstart-up ::= "x"'}, "startax", "ax"),
        ({"structural_tag": {"format": {"type": "tag", **TAG}}}, '<f=x>{"a": 1}</f>', '{"a": 1}'),
        (
            {"structural_tag": {"format": {"type": "sequence", "elements": [
                {"type": "const_string", "value": "hi "},
                {"type": "or", "elements": [{"type": "regex", "pattern": "x/+"}, {"type": "tag", "begin": "<b>",
                 "content": {"type": "any_text"}, "end": ["</b>", "!"]}]},
            ]}}},
            "hi <b>some text</b>", "hi <b>some text",
        ),
        (
            {"structural_tag": json.dumps({"format": {"type": "tags_with_separator", "separator": ",",
             "at_least_one": True, "tags": [{"type": "tag", **TAG}]}})},
            '<f=x>{"a": 1}</f>,<f=x>{"a": 2}</f>', "",
        ),
        (
            {"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<f"], "at_least_one": True,
             "tags": [TAG]}}},
            'text <f=x>{"a": 1}</f> text', "text",
        ),
    ],
)  # fmt: skip
def test_what_a_constraint_accepts(given: dict[str, Any], good: str, bad: str) -> None:
    grammar = grammar_of(**given)
    assert accepts(grammar, good) and not accepts(grammar, bad)


def test_optional_properties_are_bounded_because_they_take_time_by_their_square() -> None:
    def properties(count: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(count)}}

    many = properties(4000)
    assert grammar_of(json={**many, "required": list(many["properties"])}), "required ones cost nothing"
    assert grammar_of(json={"anyOf": [properties(500)] * 4})
    for wrong in (many, {"anyOf": [[{"a": properties(1500)}]] * 2}, {"items": {"not": json.loads(json.dumps(many))}}):
        with pytest.raises(RequestError, match="too many optional properties"):
            grammar_of(json=wrong)


def test_gbnf_is_bounded_because_converting_it_takes_time_by_its_square() -> None:
    comments = "# a comment\n" * 9000
    assert accepts(grammar_of(grammar=f'{comments}root ::= "a"'), "a")
    assert accepts(grammar_of(grammar=f'{2 * comments.replace("#", "//")}start: "a"'), "a"), "Lark is not converted"
    for wrong in (f'{2 * comments}root ::= "a"', 500_000 * "\n"):  # llguidance would take minutes for the second
        with pytest.raises(RequestError, match="at most 131072 are allowed in GBNF"):
            grammar_of(grammar=wrong)


@pytest.mark.parametrize(
    "text", ["\n \tstart :a", "x\n\r\n %llguidance {}", "a: start:", "%llguidances", "\v\nstart\n:", ""]
)
def test_lark_is_known_as_llguidance_knows_it(text: str) -> None:
    assert (_IS_LARK.search(text) is not None) == is_lark_syntax(text)


@pytest.mark.parametrize(("text", "words"), [('a: "b"', "a rule called start"), ('a ::= "b"', "No 'root' rule")])
def test_a_grammar_without_its_first_rule_is_refused(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        grammar_of(grammar=text)


def test_as_many_optional_properties_as_are_allowed_can_be_written() -> None:
    names = [f"a{i}" for i in range(2000)]
    grammar = grammar_of(json={"type": "object", "properties": {name: {"type": "integer"} for name in names}})
    assert accepts(grammar, '{"a3": 1, "a1999": 2}')


def test_equal_parameters_are_one_grammar_and_the_engines_style_is_the_default() -> None:
    assert grammar_of(json=THING) == grammar_of(json=json.dumps(THING, indent=2))
    assert grammar_of(JsonStyle("compact"), json=THING) == grammar_of(json=THING, whitespace="compact")
    lenient = {"json": {**THING, "not": {"type": "string"}}}
    assert accepts(grammar_of(JsonStyle(lenient=True), **lenient), '{"a": 1}')
    with pytest.raises(RequestError, match='"not"'):
        compile_grammar(small_vocabulary(), grammar_of(**lenient))
    with pytest.raises(RequestError, match='"not"'):
        compile_grammar(small_vocabulary(), grammar_of(JsonStyle(lenient=True), **lenient, lenient=False))


def test_a_pydantic_model_is_a_schema() -> None:
    class Thing(BaseModel):
        a: int

    for schema in (Thing, Thing.model_json_schema()):
        params = StructuredOutputsParams(json=schema)
        assert accepts(build_grammar(params).text, '{"a": 4}')


def test_closed_objects_are_closed_at_every_depth_and_keep_their_examples() -> None:
    inner = {"type": "object", "properties": {"b": {"const": {"properties": {}}}}}
    closed = json.loads(grammar_of(JsonStyle(closed=True), json={"properties": {"a": inner}}))["grammars"][0]
    schema = closed["json_schema"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"]["additionalProperties"] is False
    assert schema["properties"]["a"]["properties"]["b"] == {"const": {"properties": {}}}


def test_words_of_a_schema_are_names_where_the_caller_names_things() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"properties": {"const": inner, "format": {"type": "string", "format": "path"}}, "default": inner}
    made = json.loads(grammar_of(JsonStyle(closed=True), json=schema))["grammars"][0]["json_schema"]
    assert made["properties"]["const"]["additionalProperties"] is False
    assert made["properties"]["format"] == {"type": "string"} and made["default"] == inner


@pytest.mark.parametrize("name", ["int32", "password", "path", "binary"])
def test_a_format_that_json_schema_does_not_define_says_nothing(name: str) -> None:
    assert accepts(grammar_of(json={"type": "string", "format": name}), '"any text"')
    with pytest.raises(RequestError, match="regex"):
        compile_grammar(small_vocabulary(), grammar_of(json={"type": "string", "format": "regex"}))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, r'enforced: Unimplemented keys: \["not"\]. Remove it, or set structured_outputs.lenient to skip'),
        ({"oneOf": [{"type": "object"}, {"minProperties": 1}]}, "Use anyOf, or set structured_outputs.lenient"),
        ({"minProperties": 1, "properties": {"a": {}}}, "min/maxProperties .* or set structured_outputs.lenient"),
        ({"$ref": "#"}, "The JSON schema cannot be used: no text fits it."),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_said_in_the_callers_words(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        structured_outputs().check(StructuredOutputsParams(json=schema))
    assert "coerce" not in str(caught.value) and "backtrace" not in str(caught.value)


def test_a_schema_within_a_grammar_is_said_without_the_grammar() -> None:
    text = f'start: "<call>" {json_rule({"not": {}})}'
    with pytest.raises(RequestError) as caught:
        structured_outputs().check(StructuredOutputsParams(grammar=text, source="tools"))
    assert str(caught.value) == (
        'tools: The JSON schema cannot be enforced: Unimplemented keys: ["not"]. Remove it, or set strict to false to '
        "skip what cannot be enforced."
    )


def test_a_wrong_regex_is_said_without_the_grammar_around_it() -> None:
    with pytest.raises(RequestError) as caught:
        structured_outputs().check(StructuredOutputsParams(regex="(?=a)b"))
    assert str(caught.value) == (
        "structured_outputs: The regular expression cannot be used: regex parse error:\n    (?=a)b\n    ^^^\n"
        "error: look-around, including look-ahead and look-behind, is not supported."
    )


def test_an_error_is_said_of_the_part_that_has_it() -> None:
    parts = [("The tool 'a'", {}), ("The tool 'b'", {"not": {}})]
    made = tuple((name, StructuredOutputsParams(json=schema, source="tools")) for name, schema in parts)
    grammar = f"start: {json_rule({})} {json_rule({'not': {}})}"
    with pytest.raises(RequestError, match="^tools: The tool 'b': The JSON schema cannot be enforced") as caught:
        structured_outputs().check(StructuredOutputsParams(grammar=grammar, parts=made))
    assert caught.value.parameter == "tools"


def test_an_error_that_repeats_the_callers_text_is_read_in_linear_time() -> None:
    pattern = "failed to compile JSON schema: " * 30_000 + "("  # minutes, if each of these began a search of its own
    with pytest.raises(RequestError, match="The JSON schema cannot be used: regex parse error"):
        structured_outputs().check(StructuredOutputsParams(json={"type": "string", "pattern": pattern}))


def test_the_texts_of_checked_grammars_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_MAX_CHECKED_CHARACTERS", 3000)
    checks = structured_outputs()
    for i in (0, 1, 2, 3, 3):
        checks.check(StructuredOutputsParams(choice=[f"{i}" + 1000 * "a"]))
    assert [grammar.size > 1000 for grammar in checks._checked] == [True, True]
    assert checks._checked_characters == sum(grammar.size for grammar in checks._checked)
    checks.check(StructuredOutputsParams(regex="a"))
    assert len(checks._checked) == 3 and checks.compiled.num_compiled == 5


def structured_outputs() -> StructuredOutputs:
    """The checks of a model with the small vocabulary."""
    made = StructuredOutputs(ModelConfig(model="small"), StandInTokenizer())  # type: ignore[arg-type]
    made.compiled = CompiledGrammars(small_vocabulary)
    return made


class StandInTokenizer:
    """What the checks ask of a tokenizer."""

    can_serialize = True

    def added_tokens(self, skip_special_tokens: bool) -> dict[int, str]:
        return {token_id(text): text for text in (EOS, THINK_END, CALL)}


def chained(depth: int) -> dict[str, dict[str, Any]]:
    """Constraints in which each rule or definition is reached through the one before."""
    rules = [f'r{i}: "x" r{i + 1}?' for i in range(depth)]
    terminals = [f'R{i}: "x" R{i + 1}?' for i in range(depth)]
    definitions = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(depth // 10)}
    last = {f"d{depth // 10}": {"type": "integer"}}
    return {
        "rules": {"grammar": "\n".join(["start: r0", *rules, f'r{depth}: "y"'])},
        "terminals": {"grammar": "\n".join(["start: R0", *terminals, f'R{depth}: "y"'])},
        "definitions": {"json": {"$ref": "#/$defs/d0", "$defs": {**definitions, **last}}},
    }


@pytest.mark.parametrize("kind", chained(0))
def test_long_chains_of_rules_do_not_overflow_the_stack(kind: str) -> None:
    """Five thousand levels were more than the stack of an ordinary thread, and the process ended."""
    text = build_grammar(StructuredOutputsParams(**chained(10_000)[kind])).text
    matcher = compile_grammar(small_vocabulary(), text).deep_copy()
    _follow(matcher)
    assert not matcher.is_error()


def test_a_limit_that_forced_tokens_reach_ends_the_request_alone() -> None:
    """llguidance knows these forced tokens, but cannot take them in."""
    text = grammar_of(regex="a{600000}")
    with pytest.raises(RequestError, match="too many expressions"):
        compile_grammar(small_vocabulary(), text)
    matcher = LLMatcher(small_vocabulary(), text, log_level=0, limits=parser_limits())
    with ThreadPoolExecutor() as threads:
        guide = GrammarGuide(GrammarLexers(matcher, lambda: matcher, threads), None, {})
    assert guide.jump(1, 60, ()) == []
    assert guide.error is not None and "too many expressions" in guide.error


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of"),
        ({"json": THING, "regex": "a"}, "json and regex"),
        ({"json": 7}, "json must be a JSON schema as a dict or as text, not 7"),
        ({"json": False}, "no value fits"),
        ({"regex": 7}, "regex must be a string, not 7"),
        ({"choice": [1]}, "choice"),
        ({"json": THING, "whitespace": "tabs"}, "spaced, compact, flexible"),
        ({"json_object": "yes"}, "True or False"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is for JSON, but the output is held"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace is for JSON"),
        ({"grammar": "start: /a/", "whitespace": "compact"}, "whitespace is for JSON"),
        ({"regex": "a", "disable_additional_properties": True}, "disable_additional_properties is for JSON"),
        ({"regex": "a", "lenient": True}, "lenient is for JSON"),
        ({"json": {}, "whitespace": "spaced", "disable_any_whitespace": True}, "both say how JSON is spaced"),
        ({"json": {}, "whitespace": "spaced", "whitespace_pattern": ""}, "both say how JSON is spaced"),
    ],
)
def test_wrong_parameters_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.parameter is not None
    with pytest.raises(RequestError):
        SamplingParams(structured_outputs=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("{", "not valid JSON"),
        ([], "structural_tag"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}, "none of its triggers"),
        ({"structures": [], "triggers": ["<b"]}, "at least one entry in tags"),
        ({"structures": [{"begin": "<a>"}], "triggers": []}, "triggers"),
        ({"format": {"type": "odd"}}, "odd"),
        ({"format": {"type": "tag", "begin": "a"}}, "content"),
        ({"format": {**TAG, "type": "tag", "end": None}}, "neither a string nor a list"),
        ({"structures": [{"begin": "<b", "end": 5}], "triggers": ["<b"]}, "neither a string nor a list"),
        ({"format": {"type": "regex", "pattern": 5}}, r"needs pattern, which must be a string\.$"),
        ({"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG], "excludes": ["x"]}}, "excludes"),
    ],
)
def test_a_wrong_structural_tag_is_refused(tag: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        build_grammar(StructuredOutputsParams(structural_tag=tag))


def test_markers_in_a_literal_are_single_tokens() -> None:
    markers = {CALL: token_id(CALL), THINK_END: token_id(THINK_END)}
    assert literal(f"a{CALL}b", markers) == f'"a" <[{token_id(CALL)}]> "b"'
    assert literal(CALL) == f'"{CALL}"' and literal("") == '""'
    grammar = grammar_of(grammar=f"start: {literal(f'x{CALL}', markers)} {json_rule(THING)}")
    assert accepts(grammar, f'x{CALL}{{"a": 1}}')


@pytest.mark.parametrize("after", ["", THINK_END, "</done>"])
@pytest.mark.parametrize("trigger", [CALL, "<f="])
def test_constraints_that_begin_in_free_text(after: str, trigger: str) -> None:
    markers = {CALL: token_id(CALL), THINK_END: token_id(THINK_END)}
    call = f'start: {json_rule(THING)} "</f>"'
    params = StructuredOutputsParams(tags=(GrammarTag(trigger, call),), starts_after=after)
    grammar = from_triggers(build_grammar(params), markers)
    before = f"some thought{after}" if after else ""
    assert accepts(grammar, f"{before}hello")
    assert accepts(grammar, f'{before}hello {trigger}{{"a": 1}}</f> and {trigger}{{"a": 2}}</f>')
    assert not accepts(grammar, f"{before}hello {trigger}oops")
    if after:
        whole = from_triggers(build_grammar(StructuredOutputsParams(json=THING, starts_after=after)), markers)
        assert accepts(whole, f'{before}{{"a": 1}}') and not accepts(whole, f"{before}oops")


def test_threads_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.platforms.limits.allowed_cpus", lambda: 16)
    monkeypatch.setattr(structured, "allowed_cpus", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = fake_config()
    assert structured.mask_threads(config) == 1, "the threads that compute the model"
    config = replace(config, device=replace(config.device, device="cuda"))
    assert structured.mask_threads(config) == 14
    config = replace(config, parallel=replace(config.parallel, data_parallel_size=8))
    assert structured.mask_threads(config) == 2, "each engine has its part of the machine"


def test_jumps_are_left_out_where_something_else_is_asked_about_a_token() -> None:
    def exact(**extras: Any) -> bool:
        return jumps_are_exact(RowSampling(extras=Extras(3, **extras)))

    assert jumps_are_exact(RowSampling()) and jumps_are_exact(RowSampling(temperature=1, seed=3))
    assert exact(presence_penalty=1.0, logit_bias=((1, 2.0),))
    assert not jumps_are_exact(RowSampling(logprobs=0)) and not jumps_are_exact(RowSampling(banned_until=4))
    for extras in ({"bad_words": ((1,),)}, {"forbidden_token_ids": (1,)}, {"top_ema_p": 0.5}, {"prompt_logprobs": 1}):
        assert not exact(**extras)


# ---------------------------------------------------------------- what clients may send

_pieces = st.sampled_from(
    [
        *'abst:|()[]{}*+?."\\/<>%@~,-=\n 019',
        "start",
        "root",
        "::=",
        "%json ",
        "[lazy]",
        "{1,99999}",
        "/x*/",
        "(?i)",
        "\\p{L}",
    ]
)
_text = st.one_of(st.lists(_pieces, max_size=30).map("".join), st.text(max_size=30))
_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.sampled_from(["string", "object", "#"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs", "pattern", "enum", "const",
                 "required", "minimum", "maximum", "minLength", "maxLength", "format", "x-guidance", "multipleOf"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=10,
)  # fmt: skip
asked = st.one_of(
    st.builds(lambda text: {"regex": text}, _text),
    st.builds(lambda text: {"grammar": text}, _text),
    st.builds(lambda text: {"grammar": f"start: {text}"}, _text),
    st.builds(lambda texts: {"choice": texts}, st.lists(_text, min_size=1, max_size=4)),
    st.builds(lambda value: {"json": value}, st.one_of(_text, st.dictionaries(st.text(max_size=4), _json), _json)),
    st.builds(lambda value: {"structural_tag": value}, st.one_of(_text, st.dictionaries(st.text(max_size=4), _json))),
)


@given(asked)
def test_arbitrary_grammars_are_compiled_or_refused(params: dict[str, Any]) -> None:
    """Nothing but a RequestError comes out, and what is compiled can be followed."""
    try:
        grammar = build_grammar(StructuredOutputsParams(**params))
        texts = [grammar.text] if grammar.text else [text for _, text in grammar.tags]
        compiled = [compile_grammar(small_vocabulary(), text) for text in texts]
    except RequestError:
        return
    for matcher in compiled:
        _follow(matcher.deep_copy())


def _follow(matcher: LLMatcher) -> None:
    for _ in range(8):
        if matcher.is_stopped():
            return
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]
        assert allowed, "a grammar that goes on allows some token"
        if allowed[-1] == token_id(EOS) or not matcher.consume_token(allowed[-1]):
            return
