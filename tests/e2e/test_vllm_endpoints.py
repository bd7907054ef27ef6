"""Endpoints and parameters that vLLM has beside OpenAI's, at a server whose log-probabilities can be computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.frontend.text.tokenizer import Tokenizer
from tests import web
from tests.server_process import LiveServer, echoed, echoed_ids, events

HI = {"role": "user", "content": "Hi"}
KEEP_ON = {"ignore_eos": True, "max_tokens": 4}


@pytest.fixture(scope="module")
def server(starter_model: Path) -> Iterator[LiveServer]:
    options = {"return_tokens_as_token_ids": True, "enable_tokenizer_info_endpoint": False}
    executor = "tests.scoring_echo:scoring_echo"
    with LiveServer.fake(starter_model, server=options, executor=executor) as server:
        yield server.wait_until_ready()


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return web.post(server.url + path, json=body)


def chat_text(tokenizer: Tokenizer, content: str, count: int) -> str:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return echoed(tokenizer, ids, count)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what another model could answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/score", {"text_1": "Hi", "text_2": "Hi"}),
        ("/score", {"text_1": "Hi", "text_2": "Hi"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["Hi"]}),
        ("/v2/rerank", {"query": "Hi", "documents": ["Hi"]}),
        ("/rerank", {"query": "Hi", "texts": ["Hi"]}),
        ("/classify", {"input": "Hi"}),
        ("/pooling", {"input": "Hi"}),
        ("/embed", {"inputs": "Hi"}),
        ("/v2/embed", {"texts": ["Hi"]}),
        ("/api/embed", {"input": "Hi"}),
        ("/api/embeddings", {"prompt": "Hi"}),
    ],
)
def test_a_model_that_generates_does_not_pool(fake_server: LiveServer, path: str, body: dict[str, Any]) -> None:
    reply = post(fake_server, path, **body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "generates text" in message and "--runner pooling" in message


# ---------------------------------------------------------------- tokens


def test_tokenizer_info(fake_server: LiveServer, server: LiveServer, tokenizer: Tokenizer) -> None:
    found = web.get(f"{fake_server.url}/tokenizer_info").json()
    assert found["eos_token"] == tokenizer.special_tokens_map["eos_token"]
    assert found["chat_template"] == tokenizer.chat_template and found["model_max_length"] == 2048
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    every = {*found["additional_special_tokens"], *tokenizer.special_tokens_map.values()}
    assert every == set(tokenizer.all_special_tokens)
    off = web.get(f"{server.url}/tokenizer_info")
    assert off.status_code == 404 and "--no-enable-tokenizer-info-endpoint" in off.json()["error"]["message"]


@pytest.mark.parametrize(("side", "kept"), [(None, [7, 8]), ("left", [7, 8]), ("right", [5, 6])])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_truncation_side(
    fake_server: LiveServer, tokenizer: Tokenizer, path: str, side: str | None, kept: list[int]
) -> None:
    body = {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2, "truncation_side": side, **KEEP_ON}
    reply = post(fake_server, path, **body).json()
    text = reply["choices"][0]["text"] if "choices" in reply else reply["text"][0]
    assert text == echoed(tokenizer, kept, 4)


def test_truncation_side_of_a_conversation(fake_server: LiveServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([HI], add_generation_prompt=True)
    body = {"messages": [HI], "truncate_prompt_tokens": 3, "truncation_side": "right", **KEEP_ON}
    reply = post(fake_server, "/v1/chat/completions", **body).json()
    assert reply["choices"][0]["message"]["content"] == echoed(tokenizer, ids[:3], 4)  # type: ignore[arg-type]
    refused = post(fake_server, "/v1/chat/completions", messages=[HI], truncation_side="right")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "truncation_side"


def test_tokens_as_ids_for_all_requests(server: LiveServer) -> None:
    ids = echoed_ids([5, 6], 4)
    body = {"prompt": [5, 6], "logprobs": 0, **KEEP_ON}
    for asked, is_id in ((None, True), (True, True), (False, False)):
        reply = post(server, "/v1/completions", **body, return_tokens_as_token_ids=asked).json()
        tokens = reply["choices"][0]["logprobs"]["tokens"]
        assert (tokens == [f"token_id:{token}" for token in ids]) is is_id
    reply = post(server, "/v1/chat/completions", messages=[HI], logprobs=True, **KEEP_ON).json()
    assert reply["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    asked_for = {"input": "Hi", "max_output_tokens": 2, "include": ["message.output_text.logprobs"]}
    (item,) = post(server, "/v1/responses", **asked_for).json()["output"]
    assert item["content"][0]["logprobs"][0]["token"].startswith("token_id:")


# ---------------------------------------------------------------- several conversations, one path for all, scores


def test_a_batch_of_conversations(fake_server: LiveServer, tokenizer: Tokenizer) -> None:
    contents = ["Hi", "Who are you?", "Hi"]
    conversations = [[{"role": "user", "content": content}] for content in contents]
    reply = post(fake_server, "/v1/chat/completions/batch", messages=conversations, **KEEP_ON).json()
    found = [(choice["index"], choice["message"]["content"]) for choice in reply["choices"]]
    assert found == [(i, chat_text(tokenizer, content, 4)) for i, content in enumerate(contents)]
    assert reply["usage"]["completion_tokens"] == 12 and reply["object"] == "chat.completion"
    for wrong in ({"stream": True}, {"n": 2}, {"messages": [HI]}, {"messages": []}, {"messages": [[]]}):
        refused = post(fake_server, "/v1/chat/completions/batch", **{"messages": conversations, **KEEP_ON, **wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(wrong))


def test_invocations(fake_server: LiveServer, tokenizer: Tokenizer) -> None:
    reply = post(fake_server, "/invocations", messages=[HI], **KEEP_ON).json()
    assert reply["choices"][0]["message"]["content"] == chat_text(tokenizer, "Hi", 4)
    reply = post(fake_server, "/invocations", prompt=[5, 6], **KEEP_ON).json()
    assert reply["choices"][0]["text"] == echoed(tokenizer, [5, 6], 4)
    streamed = events(post(fake_server, "/invocations", prompt=[5, 6], stream=True, **KEEP_ON).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == echoed(tokenizer, [5, 6], 4)
    for wrong in ({}, {"messages": [HI], "prompt": "x"}):
        assert "with messages (chat) or prompt" in post(fake_server, "/invocations", **wrong).json()["error"]["message"]
    assert post(fake_server, "/invocations", prompt="x", max_tokens=-1).json()["error"]["param"] == "max_tokens"
    for body in ({"messages": [HI]}, {"prompt": "x"}):
        named = post(fake_server, "/invocations", new_field=1, **body, **KEEP_ON)
        assert named.status_code == 200 and named.headers["X-Kvasir-Unknown-Fields"] == "new_field"


def test_generative_scoring(server: LiveServer, tokenizer: Tokenizer) -> None:
    query, items, labels = "Is it? ", ["Paris", "Bread"], [11, 12, 13]

    def scores(**body: Any) -> list[float]:
        asked = {"query": query, "items": items, "label_token_ids": labels, **body}
        reply = post(server, "/generative_scoring", **asked).json()
        assert [item["index"] for item in reply["data"]] == [0, 1] and reply["usage"]["completion_tokens"] == 2
        return [item["score"] for item in reply["data"]]

    def expected(ids: list[int], label: int) -> float:
        body = {"prompt": ids, "max_tokens": 1, "logprobs": 0, "logprob_token_ids": labels}
        (top,) = post(server, "/v1/completions", **body).json()["choices"][0]["logprobs"]["top_logprobs"]
        return math.exp(top[f"token_id:{label}"])

    plain = [tokenizer.encode(query) + tokenizer.encode(item, add_special_tokens=False) for item in items]
    assert scores(apply_softmax=False) == pytest.approx([expected(ids, 11) for ids in plain])
    shares = [expected(ids, 11) / sum(expected(ids, label) for label in labels) for ids in plain]
    assert scores() == pytest.approx(shares)
    swapped = [tokenizer.encode(item, add_special_tokens=False) + tokenizer.encode(query) for item in items]
    assert scores(item_first=True, apply_softmax=False) == pytest.approx([expected(ids, 11) for ids in swapped])
    for wrong in ({"label_token_ids": []}, {"label_token_ids": [10**6]}, {"items": []}, {"items": ["x"] * 5000}):
        body = {"query": query, "items": items, "label_token_ids": labels, **wrong}
        assert post(server, "/generative_scoring", **body).status_code == 400, wrong


# ---------------------------------------------------------------- counting


def test_texts_longer_than_the_context_are_counted(fake_server: LiveServer, tokenizer: Tokenizer) -> None:
    """That is what clients count for: to find out whether a text fits."""
    text = "over the hills and far away " * 5000
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.render_chat(messages, add_generation_prompt=True)
    count = len(tokenizer.encode(rendered, add_special_tokens=False))
    plain = tokenizer.encode(text)
    assert len(plain) > 10 * 2048
    model = web.get(f"{fake_server.url}/v1/models").json()["data"][0]["id"]
    found = post(fake_server, "/v1/messages/count_tokens", model=model, messages=messages)
    assert found.json() == {"input_tokens": count}
    assert post(fake_server, "/v1/responses/input_tokens", model=model, input=text).json()["input_tokens"] == count
    assert post(fake_server, "/tokenize", messages=messages).json()["count"] == count
    found = post(fake_server, "/tokenize", prompt=text, return_token_strs=True)
    assert found.json()["tokens"] == plain and len(found.json()["token_strs"]) == len(plain)
    assert post(fake_server, "/v1/completions", prompt=text).status_code == 400, "nothing else takes it"
    too_much = post(fake_server, "/tokenize", prompt="a b " * (1 << 19))
    assert too_much.status_code == 413 and "--max-tokenizing-characters" in too_much.text
