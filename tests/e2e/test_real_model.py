"""The starter model behind a live server: log-probabilities, searches, real chat, 32 clients at once."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import openai
import pytest
import safetensors.torch
import torch

from tests import web
from tests.e2e.test_load import RawClient, check_memory, check_nothing_is_left, memory
from tests.pairwise import few
from tests.server_process import LiveServer, events


@pytest.fixture(scope="module")
def server(starter_model: Path) -> Iterator[LiveServer]:
    flags = ["--max-model-len", "512", "--max-num-seqs", "32", "--served-model-name", "smol", "s2"]
    flags += ["--enable-prompt-embeds"]
    with LiveServer.real(starter_model, *flags) as found:
        yield found.wait_until_ready()


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=web.PATIENCE)


def test_chat_answers(client: openai.OpenAI, server: LiveServer) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    reply = client.chat.completions.create(model="smol", messages=question, temperature=0, max_tokens=12)
    assert "Paris" in (reply.choices[0].message.content or "")
    from anthropic import Anthropic  # takes two seconds, in every worker that collects the tests

    other = Anthropic(base_url=server.url, api_key="any", timeout=web.PATIENCE)
    message = other.messages.create(model="s2", max_tokens=12, messages=question, extra_body={"temperature": 0})
    assert message.content[0].text == reply.choices[0].message.content  # type: ignore[union-attr]
    response = client.responses.create(model="smol", input=question, temperature=0, max_output_tokens=12)
    assert response.output_text == reply.choices[0].message.content


def test_prompts_of_embeddings(client: openai.OpenAI, server: LiveServer, starter_model: Path) -> None:
    """The embeddings of a prompt's tokens give the same as the prompt, whoever wrote the file."""
    ids = web.post(f"{server.url}/tokenize", json={"prompt": "The capital of France is"}).json()["tokens"]
    (table,) = [each for each in gguf.GGUFReader(starter_model).tensors if each.name == "token_embd.weight"]
    rows = torch.from_numpy(gguf.dequantize(table.data, table.tensor_type)[ids]).bfloat16()
    file = io.BytesIO()
    torch.save(rows, file)
    files = [base64.b64encode(data).decode() for data in (file.getvalue(), safetensors.torch.save({"x": rows}))]
    ask: dict[str, Any] = {"model": "smol", "temperature": 0, "max_tokens": 8}
    expected = client.completions.create(prompt=ids, **ask).choices[0].text
    assert "Paris" in expected
    alone = client.completions.create(prompt="", **ask, extra_body={"prompt_embeds": files[0]})
    assert [each.text for each in alone.choices] == [expected] and alone.usage.prompt_tokens == len(ids)  # type: ignore[union-attr]
    both = client.completions.create(prompt="2 + 2 =", **ask, extra_body={"prompt_embeds": files})
    assert [each.text for each in both.choices][:2] == [expected] * 2 and len(both.choices) == 3
    chunks = client.completions.create(prompt="", **ask, stream=True, extra_body={"prompt_embeds": files[1]})
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    wrong = base64.b64encode(safetensors.torch.save({"x": rows[:, 1:].contiguous()})).decode()
    nan = base64.b64encode(safetensors.torch.save({"x": torch.full_like(rows, float("nan"))})).decode()
    for embeds, further, said in (
        ("!", {}, "base64"),
        (base64.b64encode(b"rubbish").decode(), {}, "no tensor"),
        (wrong, {}, "576"),
        (nan, {}, "finite"),
        ([], {}, "prompt_embeds"),
        (files[0], {"echo": True}, "echo"),
        (files[0], {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        (files[0], {"prompt_logprobs": 1}, "prompt_logprobs"),
    ):
        reply = web.post(f"{server.url}/v1/completions", json={"prompt_embeds": embeds, **further})
        assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text
    neither = web.post(f"{server.url}/v1/completions", json={}).json()["error"]
    assert neither["message"] == "prompt is missing." and neither["param"] == "prompt"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Say é."}]
    ask: dict[str, Any] = {"model": "smol", "messages": question, "temperature": 0, "max_tokens": 6, "logprobs": True}
    whole = client.chat.completions.create(**ask, top_logprobs=2)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens  # type: ignore[union-attr]
    for each in content:
        assert each.logprob <= 0 and len(each.top_logprobs) == 2
        assert each.top_logprobs[0].logprob == each.logprob, "greedy takes the likeliest"
    said = b"".join(bytes(each.bytes or []) for each in content if not each.token.startswith("<|")).decode()
    assert said == whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**ask, top_logprobs=2, stream=True))
    streamed = [
        each
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for each in choice.logprobs.content or []
    ]
    assert [each.token for each in streamed] == [each.token for each in content]


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    ask: dict[str, Any] = {"model": "smol", "prompt": prompt, "temperature": 0, "logprobs": 2, "echo": True}
    reply = client.completions.create(**ask, max_tokens=3)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
    assert reply.choices[0].text.startswith(prompt)
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert reply.choices[0].text.startswith(token, offset)
    scored = client.completions.create(**ask, max_tokens=0).choices[0]
    assert scored.text == prompt and scored.logprobs is not None
    assert scored.logprobs.tokens == logprobs.tokens[:-3]
    ids = client.completions.create(**ask, max_tokens=1, extra_body={"return_tokens_as_token_ids": True})
    assert all(token.startswith("token_id:") for token in ids.choices[0].logprobs.tokens or [])  # type: ignore[union-attr]


def test_log_probabilities_of_named_tokens(server: LiveServer) -> None:
    ask = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 2, "return_tokens_as_token_ids": True}
    named = {"logprobs": 0, "logprob_token_ids": [7, 9, 11]}
    (choice,) = web.post(f"{server.url}/v1/completions", json={**ask, **named}).json()["choices"]
    for token, shown in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert set(shown) == {"token_id:7", "token_id:9", "token_id:11", token}
    refused = web.post(f"{server.url}/v1/completions", json={**ask, "logprob_token_ids": [7]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprob_token_ids"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": True}
    for stream in (False, True):
        body = {**chat, "logprob_token_ids": [7, 9], "return_tokens_as_token_ids": True, "stream": stream}
        text = web.post(f"{server.url}/v1/chat/completions", json=body).text
        chunks = [json.loads(text)] if not stream else events(text)
        found = [each for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
        assert len(found) == 2
        for each in found:
            assert {top["token"] for top in each["top_logprobs"]} == {"token_id:7", "token_id:9"}


def test_best_of_and_beams(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "smol", "prompt": "Once upon a time", "max_tokens": 5}
    best = client.completions.create(**ask, n=2, best_of=4, temperature=1, seed=1)
    assert len(best.choices) == 2
    beams = client.completions.create(**ask, n=3, extra_body={"use_beam_search": True, "length_penalty": 1.0})
    texts = [choice.text for choice in beams.choices]
    assert len(set(texts)) == 3
    stream = client.completions.create(**ask, n=3, stream=True, extra_body={"use_beam_search": True})
    streamed = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_all_beams_are_counted_as_generated(server: LiveServer) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 5, "n": 1, "best_of": 4, "use_beam_search": True}
    body |= {"ignore_eos": True, "request_id": "beams-1"}
    usage = web.post(f"{server.url}/v1/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] == 5, "what is returned, as OpenAI counts"
    server.wait_for_log("beams-1 ended: length, [0-9]+ tokens in, 20 out")


def test_prompt_logprobs(server: LiveServer) -> None:
    ask = {"prompt": "Hi there", "max_tokens": 3, "prompt_logprobs": 1, "stream": True, "ignore_eos": True}
    held_back = {"temperature": 0, "stop": ["\n\n\n\n"], "logit_bias": {"198": 100}}  # newlines wait for the fourth
    chunks = events(web.post(f"{server.url}/v1/completions", json={**ask, **held_back}).text)
    first = chunks[0]["choices"][0]  # on a busy machine it may hold all tokens at once
    assert (first["text"] == "" or first["finish_reason"]) and first["prompt_logprobs"][1]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 1}
    for stream in (False, True):
        reply = web.post(f"{server.url}/v1/chat/completions", json={**body, "stream": stream})
        assert '"prompt_logprobs":[null,{' in reply.text
    found = web.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    for position in found["prompt_logprobs"][1:]:
        assert all(math.isfinite(each["logprob"]) for each in position.values())


@pytest.mark.parametrize("count", few([8, 32], fast=[8]))
def test_many_clients(server: LiveServer, count: int) -> None:
    """Greedy texts, all at once, equal those of asking alone; clients that leave leave nothing."""
    asked = [f"{i + 2} colours are" for i in range(count)]

    async def one(prompt: str, leaves: bool = False) -> str:
        async with RawClient(server.url) as client:
            client.send(prompt=prompt, max_tokens=6, temperature=0)
            text = ""
            async for chunk in client.lines():
                text += chunk["choices"][0]["text"]
                if leaves:
                    return text
            return text

    async def everybody(leaving: bool) -> list[str]:
        return list(await asyncio.gather(*(one(text, leaving and i % 2 == 0) for i, text in enumerate(asked))))

    together = asyncio.run(everybody(leaving=False))
    alone = [asyncio.run(one(text)) for text in asked[:3]]
    assert alone == together[:3] and all(together)
    assert asyncio.run(everybody(leaving=True))[1::2] == together[1::2]
    check_nothing_is_left(server)


@pytest.mark.slow
def test_a_minute_of_32_clients(starter_model: Path) -> None:
    """As the model is served: every text is the one of the first round, and memory stays what it was by then."""
    asked = [f"{i + 2} colours are" for i in range(32)]

    async def one(url: str, prompt: str, leaves: bool) -> str:
        async with RawClient(url) as client:
            client.send(prompt=prompt, max_tokens=32, temperature=0)
            text = ""
            async for chunk in client.lines():
                text += chunk["choices"][0]["text"]
                if leaves:
                    break
            return text

    async def everybody(url: str, leaving: bool) -> list[str]:
        return list(await asyncio.gather(*(one(url, text, leaving and i % 2 == 0) for i, text in enumerate(asked))))

    flags = ["--max-model-len", "512", "--max-num-seqs", "32", "--num-gpu-blocks-override", "256"]
    with LiveServer.real(starter_model, *flags) as server:
        server.wait_until_ready()
        texts = asyncio.run(everybody(server.url, False))
        for warm_up in range(20):
            asyncio.run(everybody(server.url, warm_up % 2 == 1))
        before, end, rounds = memory(server), time.monotonic() + 60, 0
        while time.monotonic() < end:
            leaving = rounds % 2 == 1
            found = asyncio.run(everybody(server.url, leaving))
            assert found[1::2] == texts[1::2] and (leaving or found == texts)
            rounds += 1
        check_nothing_is_left(server)
        check_memory(before, memory(server))
