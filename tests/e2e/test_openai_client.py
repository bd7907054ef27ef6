"""The official openai client, unchanged, against a live server: without a model, where every text can be computed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

from kvasir.frontend.text.tokenizer import Tokenizer
from tests import web
from tests.server_process import LiveServer, echoed, echoed_ids, events, until

MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "Who are you? 日本"}]
KEEP_ON = {"ignore_eos": True}


@pytest.fixture
def client(fake_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def aclient(fake_server: LiveServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fake_server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def chat_ids(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert isinstance(ids, list)
    return ids


# ---------------------------------------------------------------- models


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("fake").id) == ("fake", "fake")
    with pytest.raises(openai.NotFoundError, match="does not exist here. Available: fake"):
        client.models.retrieve("other/model")


def test_models_with_a_slash_are_the_list(client: openai.OpenAI, fake_server: LiveServer) -> None:
    assert web.get(f"{fake_server.url}/v1/models/").json() == web.get(f"{fake_server.url}/v1/models").json()


# ---------------------------------------------------------------- chat


def test_chat(client: openai.OpenAI, tokenizer: Tokenizer, chat_ids: list[int]) -> None:
    reply = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=20, extra_body=KEEP_ON)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == echoed(tokenizer, chat_ids, 20)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(chat_ids), 20)


def test_chat_streams_the_same_text(client: openai.OpenAI, tokenizer: Tokenizer, chat_ids: list[int]) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_completion_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=KEEP_ON,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == echoed(tokenizer, chat_ids, 200), "the fake language is full of split characters"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 200
    assert len({chunk.id for chunk in chunks}) == 1


def test_continuous_usage(client: openai.OpenAI) -> None:
    def usages() -> list[CompletionUsage]:
        stream = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "A prompt of more than one block of tokens. " * 8}],
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            extra_body=KEEP_ON,
        )
        return [chunk.usage for chunk in stream if chunk.usage is not None]

    usages()
    role, *again = usages()
    assert role.completion_tokens == 0 and role.total_tokens == role.prompt_tokens, "it has no text yet"
    counts = [usage.completion_tokens for usage in again]
    assert counts[-1] == 30 and counts == sorted(counts)
    (cached,) = {usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens for usage in again}
    assert cached, "all chunks say the same, from the first token on"


def test_async_client(aclient: openai.AsyncOpenAI, tokenizer: Tokenizer, chat_ids: list[int]) -> None:
    async def ask() -> tuple[str, str]:
        whole = await aclient.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_tokens=9,
            extra_body=KEEP_ON,  # type: ignore[arg-type]
        )
        stream = await aclient.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_tokens=9,
            stream=True,
            extra_body=KEEP_ON,  # type: ignore[arg-type]
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content or "", "".join(parts)

    assert asyncio.run(ask()) == (echoed(tokenizer, chat_ids, 9),) * 2


def test_raw_response(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=1,
        extra_headers={"X-Request-Id": "mine-1"},  # type: ignore[arg-type]
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.parse().id == "chatcmpl-mine-1"


def test_several_choices(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=4, n=3)  # type: ignore[arg-type]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    stream = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=4, n=3, stream=True)  # type: ignore[arg-type]
    texts = {0: "", 1: "", 2: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in reply.choices]


def test_a_conversation_goes_on(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    text = tokenizer.render_chat(messages, continue_final_message=True)
    reply = client.chat.completions.create(
        model="fake",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=5,
        extra_body={**KEEP_ON, "continue_final_message": True, "echo": True, "add_generation_prompt": False},
    )
    expected = echoed(tokenizer, tokenizer.encode(text, add_special_tokens=False), 5)
    assert reply.choices[0].message.content == "I am" + expected


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions(client: openai.OpenAI, tokenizer: Tokenizer, role: str) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    assert isinstance(ids, list)
    parts = [{"role": role, "content": [{"type": "text", "text": "Be brief."}]}, *MESSAGES]
    reply = client.chat.completions.create(model="fake", messages=parts, max_tokens=5, extra_body=KEEP_ON)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == echoed(tokenizer, ids, 5)


def test_a_tool_message_is_read(client: openai.OpenAI) -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    reply = client.chat.completions.create(model="fake", messages=[*MESSAGES, result], max_tokens=3)  # type: ignore[arg-type]
    assert reply.choices[0].message.content


@pytest.mark.parametrize("content", ["", None])
def test_calls_that_the_template_would_drop_are_written_as_text(client: openai.OpenAI, content: str | None) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": content, "tool_calls": [call]}]
    written = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    same = [*MESSAGES, {"role": "assistant", "content": written}]
    first, second = (
        client.chat.completions.create(model="fake", messages=each, max_tokens=3, temperature=0)  # type: ignore[arg-type]
        for each in (messages, same)
    )
    assert first.choices[0].message.content == second.choices[0].message.content


# ---------------------------------------------------------------- stored chat completions


def test_stored_chat_completions(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "max_tokens": 5, "store": True}
    plain = client.chat.completions.create(**asked, metadata={"topic": "plain"}, extra_body=KEEP_ON)
    stream = client.chat.completions.create(
        **asked, metadata={"topic": "streamed"}, stream=True, n=2, extra_body={**KEEP_ON, "return_token_ids": True}
    )
    text = {0: "", 1: ""}
    for chunk in stream:
        text[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    again = client.chat.completions.retrieve(plain.id)
    assert again.choices == plain.choices and again.usage == plain.usage and again.metadata == {"topic": "plain"}  # type: ignore[attr-defined]
    (streamed,) = client.chat.completions.list(metadata={"topic": "streamed"}).data
    assert {choice.index: choice.message.content for choice in streamed.choices} == text
    assert [choice.finish_reason for choice in streamed.choices] == ["length"] * 2
    assert all(len(choice.token_ids) == 5 for choice in streamed.choices)  # type: ignore[attr-defined]
    assert streamed.usage and streamed.usage.completion_tokens == 10
    newest = client.chat.completions.list(order="desc", limit=1)
    assert newest.data[0].id == streamed.id and newest.has_more
    (message,) = client.chat.completions.messages.list(plain.id).data
    assert (message.role, message.content) == ("user", MESSAGES[0]["content"])
    assert client.chat.completions.update(plain.id, metadata={"a": "b"}).metadata == {"a": "b"}  # type: ignore[attr-defined]
    assert client.chat.completions.delete(plain.id).deleted
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.chat.completions.retrieve(plain.id)


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="metadata is kept with stored completions"):
        client.chat.completions.create(model="fake", messages=MESSAGES, metadata={"a": "b"})  # type: ignore[arg-type]


# ---------------------------------------------------------------- completions


def test_completions(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    expected = echoed(tokenizer, tokenizer.encode("Once upon"), 12)
    reply = client.completions.create(model="fake", prompt="Once upon", max_tokens=12, extra_body=KEEP_ON)
    assert reply.choices[0].text == expected
    assert client.completions.create(model="fake", prompt="a").usage.completion_tokens <= 16, "OpenAI's default"  # type: ignore[union-attr]
    stream = client.completions.create(model="fake", prompt="Once upon", max_tokens=12, stream=True, extra_body=KEEP_ON)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_prompts_of_every_kind(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Once upon")
    one, other = (echoed(tokenizer, tokenizer.encode(text), 3) for text in ("Once upon", "b"))
    for prompt, expected in (
        (["Once upon", "b"], [one, other]),
        (ids, [one]),
        ([ids, tokenizer.encode("b")], [one, other]),
    ):
        reply = client.completions.create(model="fake", prompt=prompt, max_tokens=3, extra_body=KEEP_ON)
        assert [choice.text for choice in reply.choices] == expected
    assert reply.usage is not None and reply.usage.prompt_tokens == len(ids) + 1


def test_echo_and_scoring(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    reply = client.completions.create(model="fake", prompt="Once", max_tokens=3, echo=True, extra_body=KEEP_ON)
    assert reply.choices[0].text == "Once" + echoed(tokenizer, tokenizer.encode("Once"), 3)
    reply = client.completions.create(model="fake", prompt="Once upon", max_tokens=0, echo=True)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("Once upon", "length")
    assert reply.usage is not None and reply.usage.completion_tokens == 0
    assert reply.usage.total_tokens == reply.usage.prompt_tokens == 2


def test_stop_strings_do_not_leak(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    whole = echoed(tokenizer, tokenizer.encode("Once"), 60)
    middle = len(whole) // 2
    stop = whole[middle : middle + 7]
    expected = whole[: whole.index(stop)]
    stream = client.completions.create(
        model="fake", prompt="Once", max_tokens=60, stop=[stop], stream=True, extra_body=KEEP_ON
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == stop  # type: ignore[attr-defined]


def test_token_ids(client: openai.OpenAI, tokenizer: Tokenizer, chat_ids: list[int]) -> None:
    extra = {**KEEP_ON, "return_token_ids": True}
    reply = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=6, extra_body=extra)  # type: ignore[arg-type]
    assert reply.prompt_token_ids == chat_ids  # type: ignore[attr-defined]
    assert reply.choices[0].token_ids == echoed_ids(chat_ids, 6)  # type: ignore[attr-defined]
    stream = client.completions.create(model="fake", prompt="a", max_tokens=6, stream=True, extra_body=extra)
    ids = [token for chunk in stream for token in chunk.choices[0].token_ids]  # type: ignore[attr-defined]
    assert ids == echoed_ids(tokenizer.encode("a"), 6)


def test_truncation(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four")
    extra = {**KEEP_ON, "truncate_prompt_tokens": 2}
    reply = client.completions.create(model="fake", prompt=ids, max_tokens=4, extra_body=extra)
    assert reply.choices[0].text == echoed(tokenizer, ids[-2:], 4)
    assert reply.usage is not None and reply.usage.prompt_tokens == 2


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100000}, "n"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"logprobs": 10000}, "logprobs"),
        ({"priority": 3}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stream": True, "stream_options": {"usage": True}}, "usage"),
        ({"prompt": [999999]}, "prompt"),
        ({"prompt": [[1], [1 << 80]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"stream_interval": 3}, "stream_interval"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"truncate_prompt_tokens": 99999}, "truncate_prompt_tokens"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"seed": 2**70}, "seed"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fake_server: LiveServer, wrong: dict[str, object], param: str) -> None:
    reply = web.post(f"{fake_server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2, **wrong})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"] or param == "prompt"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"prompt": ["a", 1]},
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists.",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias must have token ids as keys, not 'x'."),
        (
            {"best_of": 3, "stream": True},
            "best_of larger than n cannot be streamed, as the best are known at the end: leave one of them out.",
        ),
        (
            {"prompt_logprobs": -1},
            "prompt_logprobs=-1 means the whole vocabulary of 49152 tokens, "
            "which is more than the engine's max_logprobs=20.",
        ),
        (
            {"vllm_xargs": {"a": 1}},
            "vllm_xargs are for start-up logits processors with a for_request method; this engine has none.",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_the_clients_words(
    fake_server: LiveServer, wrong: dict[str, object], message: str
) -> None:
    reply = web.post(f"{fake_server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2, **wrong})
    assert reply.json()["error"]["message"] == message


def test_a_body_that_is_no_text(fake_server: LiveServer) -> None:
    headers = {"Content-Type": "application/json"}
    reply = web.post(f"{fake_server.url}/v1/completions", content=b'{"prompt": "\xff"}', headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "The body is not valid JSON: it is not UTF-8."


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "documents": [{"text": "T"}]}, "documents"),
        ("/tokenize", {"messages": MESSAGES, "documents": [{"text": "T"}]}, "documents"),
        ("/v1/chat/completions", {"messages": MESSAGES, "reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "low"}}, "reasoning"),
    ],
)
def test_what_the_template_does_not_read_is_refused(
    fake_server: LiveServer, path: str, body: dict[str, object], param: str
) -> None:
    reply = web.post(fake_server.url + path, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert "template does not read it" in reply.json()["error"]["message"]


def test_a_bodys_request_id_is_the_requests_id(fake_server: LiveServer) -> None:
    asked = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": MESSAGES},
        "/generate": {"prompt": "a"},
    }
    for number, (path, body) in enumerate(asked.items()):
        name = f"named-{number}"
        reply = web.post(fake_server.url + path, json={**body, "max_tokens": 1, "request_id": name})
        assert reply.headers["x-request-id"] == name and reply.json().get("id", name).endswith(name)
        fake_server.wait_for_log(f"{name} arrived: {path}")
        fake_server.wait_for_log(f"{name} ended: ")
        for wrong in ("a\nforged line", "x" * 129, ""):
            reply = web.post(fake_server.url + path, json={**body, "request_id": wrong})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "request_id"


def test_users_stand_in_the_log(fake_server: LiveServer) -> None:
    asked = {
        "/v1/completions": {"prompt": "a", "user": "user-0"},
        "/v1/chat/completions": {"messages": MESSAGES, "safety_identifier": "user-1"},
        "/v1/messages": {"messages": MESSAGES, "model": "fake", "metadata": {"user_id": "user-2\nforged"}},
    }
    for number, (path, body) in enumerate(asked.items()):
        assert web.post(fake_server.url + path, json={**body, "max_tokens": 1}).status_code == 200
        fake_server.wait_for_log(f"arrived: {path}.* key -, user 'user-{number}")
        fake_server.wait_for_log(f"ended: .* key -, user 'user-{number}")
    assert "\nforged" not in fake_server.log


def test_echo_needs_something_to_go_on_from(fake_server: LiveServer) -> None:
    body = {"messages": MESSAGES, "echo": True}
    reply = web.post(f"{fake_server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "echo"


def test_a_wrong_input_goes_by_its_name(fake_server: LiveServer) -> None:
    body = {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}
    reply = web.post(f"{fake_server.url}/v1/responses", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "input"


def test_a_chats_number_of_alternatives_goes_by_its_name(fake_server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 21}
    reply = web.post(f"{fake_server.url}/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "top_logprobs"
    assert error["message"] == "top_logprobs=21 is more than the engine's max_logprobs=20."


def test_paths_that_nobody_serves(fake_server: LiveServer) -> None:
    reply = web.post(f"{fake_server.url}/v1/images", json={})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "Nothing is served at /v1/images; /docs lists all."
    reply = web.get(f"{fake_server.url}/v1/completions")
    assert reply.status_code == 405
    assert reply.json()["error"]["message"] == ("/v1/completions does not take GET, only POST; /docs lists all.")


def test_too_long_a_prompt(fake_server: LiveServer) -> None:
    for text in ("a b c " * 2000, "a" * 10_000_000):  # the second is refused without being tokenized
        reply = web.post(f"{fake_server.url}/v1/completions", json={"prompt": text})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["code"] == "context_length_exceeded"
        # the words that LiteLLM looks for before it asks another model
        assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, ")


def test_too_long_a_conversation(fake_server: LiveServer) -> None:
    text = "a b c " * 2000
    for path, body, field in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/v1/responses", {"input": text}, "input"),
    ):
        error = web.post(f"{fake_server.url}{path}", json=body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert "This model's maximum context length is 2048 tokens. However, " in error["message"]


# ---------------------------------------------------------------- responses


def test_input_items_of_a_response(client: openai.OpenAI) -> None:
    call = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]}
    first = client.responses.create(model="fake", input=[{"role": "user", "content": "Hi"}, call], max_output_tokens=2)  # type: ignore[list-item]
    second = client.responses.create(model="fake", input="And?", previous_response_id=first.id, max_output_tokens=2)
    page = client.responses.input_items.list(second.id, order="asc", limit=3)
    assert [(item.role, item.content[0].type) for item in page.data] == [  # type: ignore[union-attr]
        *(("user", "input_text"), ("assistant", "output_text"), ("assistant", "output_text"))
    ]
    assert page.has_more and page.data[2].content[0].text == first.output_text  # type: ignore[union-attr]
    everything = list(client.responses.input_items.list(second.id, limit=1))  # the client turns the pages
    assert [item.id for item in everything[1:]] == [item.id for item in reversed(page.data)]
    assert everything[0].content[0].text == "And?", "the newest first"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="no entry 'nobody'"):
        client.responses.input_items.list(second.id, after="nobody")


def test_input_tokens_of_a_response(client: openai.OpenAI) -> None:
    asked: dict[str, object] = {"model": "fake", "input": "How many?", "instructions": "Count."}
    counted = client.responses.input_tokens.count(**asked)  # type: ignore[arg-type]
    answered = client.responses.create(**asked, max_output_tokens=1)  # type: ignore[call-overload]
    assert counted.input_tokens == answered.usage.input_tokens and counted.object == "response.input_tokens"
    more = client.responses.input_tokens.count(model="fake", input="More", previous_response_id=answered.id)
    assert more.input_tokens > counted.input_tokens - 10
    with pytest.raises(openai.BadRequestError, match="input is empty"):
        client.responses.input_tokens.count(model="fake")


def test_responses_include_what_they_have(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model="fake", input="Hi", max_output_tokens=2, include=["reasoning.encrypted_content"], store=False
    )
    assert reply.output_text
    with pytest.raises(openai.BadRequestError, match="reasoning.encrypted_content.* not 'secrets'"):
        client.responses.create(model="fake", input="Hi", include=["secrets"])  # type: ignore[list-item]


def test_no_field_of_a_responses_item_is_dropped(client: openai.OpenAI) -> None:
    item = {"role": "user", "content": "Hi", "mood": "good"}
    with pytest.raises(openai.BadRequestError, match="'mood' in a message is not supported") as caught:
        client.responses.create(model="fake", input=[item], max_output_tokens=2)  # type: ignore[list-item]
    assert caught.value.param == "input"


def test_responses(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    first = client.responses.create(model="fake", input="Hello", max_output_tokens=4, extra_body=KEEP_ON)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert first.output_text == echoed(tokenizer, ids, 4)  # type: ignore[arg-type]
    assert first.status == "incomplete" and first.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model="fake", input="And?", previous_response_id=first.id, max_output_tokens=4, extra_body=KEEP_ON
    )
    conversation = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And?"},
    ]
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    assert second.output_text == echoed(tokenizer, ids, 4)  # type: ignore[arg-type]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="fake", input="Hi", max_output_tokens=30, extra_body=KEEP_ON)
    stream = client.responses.create(model="fake", input="Hi", max_output_tokens=30, stream=True, extra_body=KEEP_ON)
    found = list(stream)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert found[0].type == "response.created" and found[-1].type == "response.incomplete"
    deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == found[-1].response.output_text


def test_background_responses(client: openai.OpenAI) -> None:
    begun = client.responses.create(model="fake", input="Hi", background=True, max_output_tokens=1500)
    assert begun.status in ("queued", "in_progress")
    assert client.responses.cancel(begun.id).status in ("cancelled", "incomplete")
    assert client.responses.retrieve(begun.id).status in ("cancelled", "incomplete")
    done = client.responses.create(model="fake", input="Hi", background=True, max_output_tokens=2)
    until(lambda: client.responses.retrieve(done.id).status not in ("queued", "in_progress"), "its end")
    assert client.responses.retrieve(done.id).output_text


# ---------------------------------------------------------------- tokens, plain


def test_tokenize(fake_server: LiveServer, tokenizer: Tokenizer, chat_ids: list[int]) -> None:
    reply = web.post(f"{fake_server.url}/tokenize", json={"prompt": "Once upon", "return_token_strs": True}).json()
    assert reply["tokens"] == tokenizer.encode("Once upon") and reply["count"] == len(reply["tokens"])
    assert len(reply["token_strs"]) == reply["count"] and reply["max_model_len"] == 2048
    reply = web.post(f"{fake_server.url}/tokenize", json={"messages": MESSAGES}).json()
    assert reply["tokens"] == chat_ids
    text = web.post(f"{fake_server.url}/detokenize", json={"tokens": tokenizer.encode("Once upon")}).json()
    assert text == {"prompt": "Once upon"}


def test_generate(fake_server: LiveServer, tokenizer: Tokenizer) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True}
    expected = echoed(tokenizer, tokenizer.encode("Once"), 8)
    assert web.post(f"{fake_server.url}/generate", json=body).json()["text"] == [expected]
    lines = web.post(f"{fake_server.url}/generate", json={**body, "stream": True}).text.splitlines()
    assert "".join(json.loads(line)["text"][0] for line in lines) == expected
    assert all("token_ids" not in json.loads(line) for line in lines)
    more = {**body, "stream": True, "return_token_ids": True}
    lines = web.post(f"{fake_server.url}/generate", json=more).text.splitlines()
    ids = [token for line in lines for token in json.loads(line)["token_ids"][0]]
    assert ids == echoed_ids(tokenizer.encode("Once"), 8)


def test_a_stream_has_openais_shape(fake_server: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "ignore_eos": True}
    reply = web.post(f"{fake_server.url}/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = events(reply.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {} and chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)
