"""Structured output over HTTP, in the words of each interface, by a live server without a model.

The fake model writes arbitrary allowed tokens, so what comes out shows what is allowed.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests import web
from tests.server_process import LiveServer, events

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64, "temperature": 0}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def chat(server: LiveServer, **fields: Any) -> Any:
    reply = web.post(f"{server.url}/v1/chat/completions", json={**CHAT, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def text_of(reply: Any) -> str:
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def check(text: str, spaced: bool = True) -> None:
    found = json.loads(text)
    jsonschema.validate(found, SCHEMA)
    assert text == json.dumps(found, separators=(", ", ": ") if spaced else (",", ":"))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": JSON_SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA, "guided_decoding_backend": "guidance"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_json_of_a_schema(fake_server: LiveServer, fields: dict[str, Any]) -> None:
    reply = chat(fake_server, **fields)
    check(text_of(reply))
    streamed = web.post(f"{fake_server.url}/v1/chat/completions", json={**CHAT, **fields, "stream": True})
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events(streamed.text)]
    assert "".join(pieces) == text_of(reply)
    prompt, written = reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]
    plain = chat(fake_server, max_tokens=1)["usage"]
    assert prompt == plain["prompt_tokens"] and 10 < written < 64, "forced tokens count as output"


def test_compact_and_flexible_json(fake_server: LiveServer) -> None:
    check(text_of(chat(fake_server, structured_outputs={"json": SCHEMA, "whitespace": "compact"})), spaced=False)
    check(text_of(chat(fake_server, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})), spaced=False)
    many = {"json": SCHEMA, "whitespace": "flexible"}
    text = chat(fake_server, structured_outputs=many, max_tokens=400)["choices"][0]["message"]["content"]
    assert not re.search(r"\s{9}", text), "whitespace is bounded"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-f]{3}-\\d"}}, "[a-f]{3}-[0-9]"),
        ({"guided_regex": "[a-f]{3}-\\d"}, "[a-f]{3}-[0-9]"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, "x[0-9]y"),
        ({"guided_grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
    ],
    ids=str,
)
def test_other_constraints(fake_server: LiveServer, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, text_of(chat(fake_server, **fields)))
    reply = web.post(f"{fake_server.url}/v1/completions", json={"prompt": "a", "max_tokens": 32, **fields})
    assert re.fullmatch(pattern, reply.json()["choices"][0]["text"])


def test_older_fields_that_ask_for_nothing(fake_server: LiveServer) -> None:
    off = chat(fake_server, max_tokens=4, guided_json_object=False)
    assert off["choices"][0]["message"] == chat(fake_server, max_tokens=4)["choices"][0]["message"]
    assert text_of(chat(fake_server, guided_json_object=False, guided_choice=["yes"])) == "yes"


def test_any_object_and_a_structural_tag(fake_server: LiveServer) -> None:
    reply = chat(fake_server, response_format={"type": "json_object"}, max_tokens=300)
    if reply["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text_of(reply)), dict)
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}
    text = text_of(chat(fake_server, response_format={"type": "structural_tag", "format": tag}))
    check(text.removeprefix("<a>").removesuffix("</a>"))


def test_several_completions_stop_strings_and_logprobs(fake_server: LiveServer) -> None:
    many = {"response_format": JSON_SCHEMA, "temperature": 1, "n": 3, "seed": 1}
    for choice in chat(fake_server, **many)["choices"]:
        check(choice["message"]["content"])
    stopped = chat(fake_server, response_format=JSON_SCHEMA, stop=['"count"'])
    assert text_of(stopped).endswith(", ") and stopped["choices"][0]["stop_reason"] == '"count"'
    assert chat(fake_server, response_format={"type": "text"}, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_responses_and_messages(fake_server: LiveServer) -> None:
    shape = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
    reply = web.post(f"{fake_server.url}/v1/responses", json={"input": "Hi", "text": {"format": shape}}).json()
    check(reply["output"][0]["content"][0]["text"])
    assert reply["text"]["format"] == shape and reply["status"] == "completed"
    body = {"model": "fake", "max_tokens": 64, "messages": CHAT["messages"]}
    for fields in ({"output_config": {"format": shape}}, {"output_format": shape}):
        message = web.post(f"{fake_server.url}/v1/messages", json={**body, **fields}).json()
        check(message["content"][0]["text"])
        assert message["stop_reason"] == "end_turn"


def test_vllms_fields_hold_on_responses_and_messages_too(fake_server: LiveServer) -> None:
    message = {"model": "fake", "max_tokens": 64, "messages": CHAT["messages"]}
    for fields in ({"structured_outputs": {"choice": ["yes"]}}, {"guided_choice": ["yes"]}, {"guided_regex": "yes"}):
        reply = web.post(f"{fake_server.url}/v1/responses", json={"input": "Hi", **fields}).json()
        assert reply["output"][0]["content"][0]["text"] == "yes"
        reply = web.post(f"{fake_server.url}/v1/messages", json={**message, **fields}).json()
        assert reply["content"][0]["text"] == "yes"
    for path, body, words in (
        ("responses", {"input": "Hi"}, "say it as text.format"),
        ("messages", message, "say it as output_config.format"),
    ):
        refused = web.post(f"{fake_server.url}/v1/{path}", json={**body, "response_format": JSON_SCHEMA})
        assert refused.status_code == 400 and words in refused.text


def test_over_a_websocket(fake_server: LiveServer) -> None:
    with web.connect(fake_server.ws_url) as socket:
        socket.send(json.dumps({**CHAT, "response_format": JSON_SCHEMA}))
        text = ""
        while (message := socket.recv(web.PATIENCE)) != "[DONE]":
            text += json.loads(message)["choices"][0]["delta"].get("content", "")
    check(text)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 65, "schema": {}}}},
            "response_format",
            "64",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
            'keys: ["not"]. Remove it, or set strict to false',
        ),
        ({"response_format": {**JSON_SCHEMA, "schema": SCHEMA}}, "response_format", "'schema'"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", "the type json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strickt": True}}},
            "response_format",
            "Did you mean strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": False}}},
            "response_format",
            "no value fits",
        ),
        ({"response_format": JSON_SCHEMA["json_schema"]}, "response_format", "type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            "response_format",
            'response_format.json_schema is a schema itself; put it under "schema"',
        ),
        ({"structured_outputs": {"regex": "a{600000}"}}, "structured_outputs", "too many expressions"),
        ({"structured_outputs": {"grammar": 'start: ("a"{1000}){1000}'}}, "structured_outputs", "Too many items"),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "nothing"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "nothing"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "but json and regex were given"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "a list of strings, not [1]"),
        ({"structured_outputs": {"jason": {}}}, "structured_outputs", "json"),
        ({"structured_outputs": {"starts_after": "x", "json": {}}}, "structured_outputs", "starts_after"),
        ({"structured_outputs": {"whitespace": "tabs", "json": {}}}, "structured_outputs", "flexible"),
        ({"guided_json": {}, "response_format": JSON_SCHEMA}, "response_format", "guided_json"),
        ({"guided_json": {}, "guided_decoding_backend": "outlines"}, "guided_decoding_backend", "outlines"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        ({"guided_whitespace_pattern": " ", "guided_regex": "a"}, "guided_whitespace_pattern", "guided_regex"),
        ({"structured_outputs": {"whitespace": "compact", "regex": "a"}}, "structured_outputs", "is for JSON"),
        ({"guided_json": {}, "use_beam_search": True, "n": 2}, "guided_json", "beam search"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "odd"}}}, "structural_tag", "odd"),
    ],
    ids=str,
)
def test_what_is_wrong_is_a_400_that_names_it(
    fake_server: LiveServer, fields: dict[str, Any], param: str, words: str
) -> None:
    reply = web.post(f"{fake_server.url}/v1/chat/completions", json={**CHAT, **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and words in error["message"], reply.text


@pytest.mark.parametrize(
    ("choices", "words"),
    [(["\U00099aca"], "cannot write"), (["a\U00099aca", "b\U000577a1"], "no longer be held to its grammar")],
)
def test_text_that_the_models_tokens_cannot_write_is_the_requests_fault(
    fake_server: LiveServer, choices: list[str], words: str
) -> None:
    """The starter model has no tokens for some bytes, of characters that nobody uses. llguidance leaves them out."""
    reply = web.post(f"{fake_server.url}/v1/chat/completions", json={**CHAT, "guided_choice": choices})
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
    assert text_of(chat(fake_server, guided_choice=["red"])) == "red"


def test_a_schema_that_is_not_strict_is_enforced_as_far_as_possible(fake_server: LiveServer) -> None:
    schema = {**SCHEMA, "not": {"type": "string"}}
    shape = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": False}}
    before = _guided(fake_server)["guided_lenient"]
    for _ in range(2):
        check(text_of(chat(fake_server, response_format=shape)))
    assert _guided(fake_server)["guided_lenient"] == before + 2, "each request is counted"
    chat(fake_server, response_format=JSON_SCHEMA)
    assert _guided(fake_server)["guided_lenient"] == before + 2


def _guided(server: LiveServer) -> dict[str, float]:
    """The metrics kvasir:guided_*."""
    text = web.get(f"{server.url}/metrics").text
    pattern = r"^kvasir:(guided_\w+)_total\{[^}]*\} (\S+)$"
    return {name: float(value) for name, value in re.findall(pattern, text, flags=re.MULTILINE)}


def test_metrics_count_passes_and_jumps(fake_server: LiveServer) -> None:
    chat(fake_server, response_format=JSON_SCHEMA)
    found = _guided(fake_server)
    assert found["guided_tokens"] > found["guided_passes"] > 0
    assert found["guided_tokens_jumped"] > found["guided_jumps"] > 0
    assert found["guided_steps"] > 0 < found["guided_mask_seconds"]
