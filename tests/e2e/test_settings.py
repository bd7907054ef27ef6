"""Flags that change what a server answers, all of them at one server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.frontend.text.tokenizer import Tokenizer
from tests import web
from tests.server_process import LiveServer, echoed, events

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
TEMPLATE = "{{ messages[-1].content }}{% if reasoning_effort %} with {{ reasoning_effort }}{% endif %}"
SETTINGS = {
    "trust_request_chat_template": True,
    "enable_force_include_usage": True,
    "exclude_tools_when_tool_choice_none": True,
    "enable_request_id_headers": False,
}


@pytest.fixture(scope="module")
def server(starter_model: Path) -> Iterator[LiveServer]:
    with LiveServer.fake(starter_model, engine={"chat_template": TEMPLATE}, server=SETTINGS) as server:
        yield server.wait_until_ready()


def chat(server: LiveServer, **body: Any) -> httpx.Response:
    whole = {"messages": HI, "max_tokens": 6, "ignore_eos": True, **body}
    return web.post(f"{server.url}/v1/chat/completions", json=whole)


def text_of(reply: httpx.Response) -> str:
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def test_a_requests_own_template_is_used(server: LiveServer, tokenizer: Tokenizer) -> None:
    own = "{{ messages[0].content }} with {{ reasoning_effort }} of {{ documents[0].text }}"
    reply = chat(server, chat_template=own, reasoning_effort="care", documents=[{"text": "T"}])
    ids = tokenizer.encode("Hi with care of T", add_special_tokens=False)
    assert text_of(reply) == echoed(tokenizer, ids, 6), "what it reads is what counts, not what the server's reads"
    refused = chat(server, chat_template="{{ messages[0].content }}", reasoning_effort="care")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_effort"


def test_anthropics_effort_is_given_to_the_template(server: LiveServer, tokenizer: Tokenizer) -> None:
    def ask(**config: Any) -> httpx.Response:
        body = {"model": "fake", "messages": HI, "max_tokens": 6, "output_config": config}
        return web.post(f"{server.url}/v1/messages", json=body)

    ids = tokenizer.encode("Hi with care", add_special_tokens=False)
    assert ask(effort="care").json()["content"][0]["text"] == echoed(tokenizer, ids, 6)
    assert "output_config.effort must be a text" in ask(effort=1).text
    assert "output_config.effrt is not available" in ask(effrt="low").text


def test_usage_comes_without_being_asked_for(server: LiveServer) -> None:
    *_, last = events(chat(server, stream=True).text)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True, "stream": True}
    *_, last = events(web.post(f"{server.url}/v1/completions", json=body).text)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3


def test_tools_that_are_not_to_be_called_are_not_shown(server: LiveServer) -> None:
    own = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[0].content }}"
    with_tools = {"tools": [TOOL], "tool_choice": "none", "chat_template": own}
    assert text_of(chat(server, **with_tools)) == text_of(chat(server, chat_template=own))


def test_no_request_ids_in_headers(server: LiveServer) -> None:
    reply = chat(server)
    assert reply.status_code == 200 and "x-request-id" not in reply.headers
