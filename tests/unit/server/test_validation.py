"""What is wrong with a body is said in a sentence that names the field as the client wrote it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st
from pydantic import ValidationError

from kvasir.server import body_limits
from kvasir.server.body_limits import json_counts
from kvasir.server.errors import complaint
from kvasir.server.http import decode_json, without_unknown_fields
from kvasir.server.routes.completions import CompletionRequest
from kvasir.server.schema.chat import ChatRequest

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "messages is missing.", "messages"),
        ({"messages": []}, "messages must have at least 1 entry.", "messages"),
        ({"messages": "Hi"}, "messages must be a list, not 'Hi'.", "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role is missing.", "messages"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content must be a string or a list, not 5.",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": ["a", 5]}]},
            "messages[0].content[1] must be a string or an object, not 5.",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"] * 70_000}]},
            "messages[0].content must have at most 32768 entries.",
            "messages",
        ),
        ({"messages": MESSAGES, "timeout": "inf"}, "timeout must be a finite number, not 'inf'.", "timeout"),
        ({"messages": MESSAGES, "stop": 5}, "stop must be a string or a list, not 5.", "stop"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature must be a number, not 'hot'.", "temperature"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens must be at least 1, not 0.", "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": 1.5}, "max_tokens must be an integer, not 1.5.", "max_tokens"),
        ({"messages": MESSAGES, "stream": "maybe"}, "stream must be true or false, not 'maybe'.", "stream"),
        ({"messages": MESSAGES, "top_logprobs": -(10**60)}, "top_logprobs must be", "top_logprobs"),
        ({"messages": MESSAGES, "tempratur": 1}, "Unrecognized request argument supplied: tempratur. Did", "tempratur"),
    ],
)
def test_fields(body: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    errors: Any = caught.value.errors()
    found = complaint(errors)
    assert (found.message[: len(message)], found.param) == (message, param)
    assert len(found.message) < 200 and "0" * 50 not in found.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "The request has no body, or null; it must be a JSON object."),
        (b"{}", "Send the body as JSON, with Content-Type: application/json."),
        ([1], "The body must be a JSON object, not a list."),
    ],
)
def test_bodies(given: object, message: str) -> None:
    error = {"type": "model_attributes_type", "loc": ("body",), "msg": "Input should be", "input": given}
    assert complaint([error]) == (message, None)


# ---------------------------------------------------------------- the size of JSON

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('"\\\\[]{},:é\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\\\[{', max_size=3), inner, max_size=4),
    max_leaves=30,
)


def shape(value: Any) -> tuple[int, int, int]:
    """Depth, number of lists and objects, number of texts and names."""
    if isinstance(value, str):
        return 0, 0, 1
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inside = [shape(each) for each in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    depth = 1 + max((each[0] for each in inside), default=0)
    return depth, 1 + sum(each[1] for each in inside), names + sum(each[2] for each in inside)


@pytest.mark.parametrize("block", [7, 1 << 20])
@examples(value=JSON, ascii=st.booleans())
def test_json_is_counted_before_it_is_decoded(block: int, value: Any, ascii: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_limits, "_BLOCK", block)
        *_, counts = json_counts(json.dumps(value, ensure_ascii=ascii).encode())
    assert counts[:3] == shape(value)


@pytest.mark.parametrize(
    "data",
    [
        b'{"messages":[{"role":"user","content":[' + b"1," * (5 << 20) + b"1]}]}",
        b'{"a":[' + b"[]," * (1 << 18) + b"1]}",
        b'{"a":[' + b"{}," * (1 << 18) + b"1]}",
        b'{"a":[' + b'"a",' * (1 << 20) + b"1]}",
        b'{"chat_template_kwargs":' + b'{"a":' * 65 + b"1" + b"}" * 65 + b"}",
        b'{"chat_template_kwargs":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["numbers", "lists", "objects", "texts", "deep objects", "deep lists"],
)
def test_too_much_json_is_refused_quickly(data: bytes) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match="The body (has more than|is nested more than)"):
        decode_json(data, "The body", CompletionRequest)
    assert time.process_time() - started < 1


def test_long_texts_may_contain_anything() -> None:
    text = '[{"a": [1, 2, "x\\\\"]}, \\\\' * 200_000
    assert decode_json(json.dumps({"prompt": text}), "The body") == {"prompt": text}


# ---------------------------------------------------------------- unknown fields


def test_unknown_fields_are_removed_and_named(log_lines: list[str]) -> None:
    body = {"messages": MESSAGES, "new\nfield": 1, "x" * 1000: 2, "n": 1}
    kept, names = without_unknown_fields(body, ChatRequest, "warn", "id-1")
    assert kept == {"messages": MESSAGES, "n": 1} and names == ("new?field", "x" * 64)
    assert log_lines == ["WARNING id-1 has unknown fields, which are ignored: new?field, " + "x" * 64]
    assert without_unknown_fields(body, ChatRequest, "refuse", "id-2") == (body, ())
    assert without_unknown_fields(body, ChatRequest, "ignore", "id-3")[0] == kept
    assert len(log_lines) == 1
    _, names = without_unknown_fields({f"x{i}": 0 for i in range(1000)}, ChatRequest, "warn", "id-4")
    assert len(names) == 17 and names[-1] == "and 984 more"
