"""The API page as it is served, and the description that it shows."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from kvasir.server.app import make_app
from kvasir.server.config import ServerConfig
from kvasir.server.routes import completions, messages, tokens
from kvasir.server.schema import chat, responses
from kvasir.server.schema.field_docs import FIELD_DOCS
from kvasir.server.state import ServerState


def get(path: str, **settings: Any) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(ServerState(ServerConfig(**settings), "m")))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path)

    return asyncio.run(asked())


def test_the_page_is_our_own() -> None:
    reply = get("/docs")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert reply.headers["content-security-policy"].startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'"
    )
    assert "//" not in reply.text, "nothing comes from elsewhere"
    assert get("/redoc").status_code == 404


def test_documentation_can_be_off() -> None:
    assert get("/openapi.json").status_code == 200
    off = {"disable_fastapi_docs": True}
    assert [get(path, **off).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404, 404, 404]
    for page in ("/", "/engine"):
        assert 'href="docs"' in get(page).text
        assert 'href="docs"' not in get(page, **off).text, "no link that leads nowhere"


def test_a_browser_loads_the_page_before_it_can_send_a_key() -> None:
    locked = {"api_key": ["sesame"]}
    assert get("/docs", **locked).status_code == 200
    assert get("/openapi.json", **locked).status_code == 401


def test_every_endpoint_has_a_group() -> None:
    paths = get("/openapi.json").json()["paths"]
    assert all(operation["tags"] for methods in paths.values() for operation in methods.values())


BODIES = [
    chat.ChatRequest,
    completions.CompletionRequest,
    messages.CountTokensRequest,
    messages.MessagesRequest,
    responses.ResponsesRequest,
    tokens.TokenizeRequest,
    tokens.DetokenizeRequest,
    tokens.GenerateRequest,
]


@pytest.mark.parametrize("body", BODIES)
def test_every_field_says_what_it_does(body: Any) -> None:
    schema = body.model_json_schema()
    for name, part in {body.__name__: schema, **schema.get("$defs", {})}.items():
        silent = [field for field, what in part["properties"].items() if "description" not in what]
        assert not silent, f"{name}: {silent}"


def test_no_words_are_for_fields_that_are_gone() -> None:
    fields = {name for body in BODIES for name in body.model_json_schema()["properties"]}
    assert set(FIELD_DOCS) <= fields | {"content", "role"}


@pytest.mark.parametrize("body", BODIES)
def test_examples_are_good_bodies(body: Any) -> None:
    (example,) = body.model_json_schema()["examples"]
    body.model_validate(example)
    with pytest.raises(ValueError):
        body.model_validate({**example, "temperatur": 1})  # an example does not loosen what a body takes
