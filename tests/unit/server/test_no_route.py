"""Paths and methods that nobody serves."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from kvasir.server.app import make_app
from kvasir.server.config import ServerConfig
from kvasir.server.state import ServerState


def ask(method: str, path: str, **settings: Any) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(ServerState(ServerConfig(**settings), "m")))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path)

    return asyncio.run(asked())


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/chat/completions", "GET, POST"),
        ("PUT", "/v1/chat/completions/batch", "POST"),  # which is no stored completion's id
        ("PUT", "/v1/responses/resp_1", "DELETE, GET"),  # two routes
        ("POST", "/engine", "GET, HEAD"),
        ("POST", "/openapi.json", "GET, HEAD"),  # of the application itself
        ("DELETE", "/v1/messages", "POST"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allowed: str) -> None:
    reply = ask(method, path)
    assert reply.status_code == 405 and reply.headers["allow"] == allowed
    said = f"{path} does not take {method}, only {allowed.replace(', ', ' and ')}; /docs lists all."
    assert reply.json()["error"]["message"] == said


def test_documentation_that_is_off_is_not_pointed_to() -> None:
    assert ask("GET", "/nothing").json()["error"]["message"] == "Nothing is served at /nothing; /docs lists all."
    off = {"disable_fastapi_docs": True}
    assert ask("GET", "/nothing", **off).json()["error"]["message"] == "Nothing is served at /nothing."
    said = ask("GET", "/v1/messages", **off).json()["error"]["message"]
    assert said == "/v1/messages does not take GET, only POST."


def test_a_base_url_with_or_without_its_version_is_seen() -> None:
    for path, meant in (("/chat/completions", "/v1/chat/completions"), ("/v1/v1/models", "/v1/models")):
        reply = ask("POST", path)
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == f"Nothing is served at {path}. Did you mean {meant}?"


def test_behind_a_proxy_that_adds_a_path() -> None:
    reply = ask("GET", "/llm/v1/completions", root_path="/llm")
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_slash_at_the_end_changes_nothing(prefix: str) -> None:
    """A redirect would lead out of the prefix of a proxy that takes it away, and from https to http."""
    settings: dict[str, Any] = {"root_path": "/llm", "api_key": ["sesame"]}
    assert ask("GET", f"{prefix}/health/", **settings).status_code == 200
    assert ask("POST", f"{prefix}/v1/completions/", **settings).status_code == 401
    reply = ask("GET", f"{prefix}/v1/completions/", root_path="/llm")
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"
    assert ask("GET", f"{prefix}/docs/", **settings).status_code == 307, "links of pages are relative"


@pytest.mark.parametrize("written", ["/llm", "/llm/", "llm"])
@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxys_path_changes_neither_keys_nor_messages(prefix: str, written: str) -> None:
    settings: dict[str, Any] = {"root_path": written, "api_key": ["sesame"]}
    for path in ("/health", "/ping", "/", "/engine", "/docs", "/pages/base.css"):
        assert ask("GET", prefix + path, **settings).status_code == 200, path
    assert ask("GET", f"{prefix}/v1/models", **settings).status_code == 401
    assert ask("GET", "/llmhealth", **settings).status_code == 401, "a path of another name is not under the prefix"
    reply = ask("POST", f"{prefix}/v1/messages", **settings)
    assert reply.json()["type"] == "error", "Anthropic's error body"
    del settings["api_key"]
    said = ask("GET", f"{prefix}/nothing", **settings).json()["error"]["message"]
    assert said.startswith("Nothing is served at /nothing")
