"""What is wrong with a body is said in a sentence that names the field as the client wrote it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvasir.server.errors import complaint
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
        ({"messages": MESSAGES, "stop": 5}, "stop must be a string or a list, not 5.", "stop"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature must be a number, not 'hot'.", "temperature"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens must be at least 1, not 0.", "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": 1.5}, "max_tokens must be an integer, not 1.5.", "max_tokens"),
        ({"messages": MESSAGES, "stream": "yes"}, "stream must be true or false, not 'yes'.", "stream"),
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
