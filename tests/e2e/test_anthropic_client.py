"""The official anthropic client against a live server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from kvasir.frontend.text.tokenizer import Tokenizer
from tests import web
from tests.server_process import LiveServer, echoed

if TYPE_CHECKING:
    import anthropic

HELLO: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(fake_server: LiveServer) -> anthropic.Anthropic:
    import anthropic  # here, because it takes two seconds, in every worker that collects the tests

    return anthropic.Anthropic(base_url=fake_server.url, api_key="any", max_retries=0)


def prompt_ids(tokenizer: Tokenizer, messages: list[dict[str, str]], **options: bool) -> list[int]:
    text = tokenizer.render_chat(messages, **options)
    return tokenizer.encode(text, add_special_tokens=False)


def test_messages(client: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    reply = client.messages.create(model="fake", max_tokens=6, system="Be brief.", messages=HELLO)
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ids = prompt_ids(tokenizer, conversation, add_generation_prompt=True)
    (block,) = reply.content
    assert block.type == "text" and block.text == echoed(tokenizer, ids, 6)
    assert (reply.stop_reason, reply.role, reply.type) == ("max_tokens", "assistant", "message")
    usage = reply.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(ids)
    assert usage.output_tokens == 6


def test_streaming(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="fake", max_tokens=40, messages=HELLO)
    with client.messages.stream(model="fake", max_tokens=40, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="fake", max_tokens=30, messages=HELLO).content[0].text  # type: ignore[union-attr]
    stop = whole[10:16]
    reply = client.messages.create(model="fake", max_tokens=30, messages=HELLO, stop_sequences=[stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert reply.content[0].text == whole[: whole.index(stop)]  # type: ignore[union-attr]


def test_an_assistants_last_message_is_continued(client: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    messages: list[anthropic.types.MessageParam] = [*HELLO, {"role": "assistant", "content": "I am"}]
    reply = client.messages.create(model="fake", max_tokens=5, messages=messages)
    conversation = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I am"}]
    ids = prompt_ids(tokenizer, conversation, continue_final_message=True)
    assert reply.content[0].text == echoed(tokenizer, ids, 5)  # type: ignore[union-attr]


def test_tool_results_are_read(client: anthropic.Anthropic) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]}
    assert client.messages.create(model="fake", max_tokens=3, messages=[*HELLO, result]).content  # type: ignore[arg-type]
    assert client.messages.create(model="fake", max_tokens=3, messages=[*HELLO, use, result]).content  # type: ignore[arg-type]


def test_a_tool_that_failed_is_shown_as_such(client: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    result: dict[str, object] = {"type": "tool_result", "tool_use_id": "1", "content": "no such file"}

    def answer(**more: object) -> str:
        messages = [{"role": "user", "content": [{**result, **more}]}]
        return client.messages.create(model="fake", max_tokens=3, messages=messages).content[0].text  # type: ignore

    assert answer(is_error=True) == answer(content="Error: no such file") != answer()
    assert answer(is_error=False) == answer()


def test_count_tokens(client: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    counted = client.messages.count_tokens(model="fake", messages=HELLO)
    assert counted.input_tokens == len(
        prompt_ids(tokenizer, [{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    )


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("fake", "model", "fake")
    assert model.created_at.year >= 2024 and client.models.retrieve("fake") == model


def test_errors_have_anthropics_shape(client: anthropic.Anthropic, fake_server: LiveServer) -> None:
    from anthropic import NotFoundError

    with pytest.raises(NotFoundError) as caught:
        client.messages.create(model="other", max_tokens=3, messages=HELLO)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    for wrong, name in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"name": "no spaces"}]}, "name"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txet": "b"}]}]}, "txet"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "is_error": "x"}]}]}, "is_error"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "x": 1}]}]}, "x"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "must have name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "must have id"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "x"}]}
                ]
            },
            "input of a tool_use must be an object",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "r"}]}]}, "have tool_use_id"),
        ({"system": [{"type": "text", "text": "a", "citations": [1]}]}, "citations"),
    ):
        body = {"model": "fake", "max_tokens": 3, "messages": HELLO, **wrong}
        reply = web.post(f"{fake_server.url}/v1/messages", json=body)
        error = reply.json()
        assert reply.status_code == 400 and error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error" and name in error["error"]["message"]
        assert error["request_id"] == reply.headers["x-request-id"]


def test_too_long_a_conversation_is_told_in_anthropics_words(fake_server: LiveServer) -> None:
    """By which its clients know that they should shorten it."""
    body = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "a b c " * 2000}]}
    error = web.post(f"{fake_server.url}/v1/messages", json=body).json()["error"]
    assert re.match(r"prompt is too long: \d+ tokens > 2047 maximum", error["message"])
