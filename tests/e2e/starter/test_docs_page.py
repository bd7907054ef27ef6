"""The API page in a real browser: every endpoint is there, examples run, and nothing comes from elsewhere."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests import web
from tests.e2e.starter.conftest import Watched
from tests.e2e.starter.test_playground import expect
from tests.server_process import LiveServer

NASTY = "<img src=x onerror=\"document.title = 'owned'\"><script>document.title = 'owned'</script>"


def endpoint(page: Any, name: str) -> Any:
    return page.locator(f"#{name}")


def test_every_endpoint_and_field_is_shown(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(f"{scripted_server.url}/docs")
    spec = web.get(f"{scripted_server.url}/openapi.json").json()
    expected = {(method.upper(), path) for path, methods in spec["paths"].items() for method in methods}
    expect(page.locator(".endpoint")).to_have_count(len(expected))
    shown = {tuple(each.locator(".method, .path").all_text_contents()) for each in page.locator(".endpoint").all()}
    assert shown == expected
    assert "OpenAI" in page.locator("h2").all_text_contents()
    chat = endpoint(page, "post-v1-chat-completions")
    expect(chat.locator(".inside")).to_be_hidden()
    chat.locator("summary").first.focus()
    page.keyboard.press("Enter")
    expect(chat.locator(".inside")).to_be_visible()
    for name in spec["components"]["schemas"]["ChatRequest"]["properties"]:
        assert chat.locator(f'li[data-name="{name}"]').count(), name
    words = chat.locator('li[data-name="messages"]').first
    expect(words.locator(".type").first).to_have_text("list of objects")
    expect(words.locator(".required").first).to_be_visible()
    expect(chat.locator('li[data-name="n"] .type').first).to_have_text("integer at least 1")
    page.reload()
    expect(chat.locator(".inside")).to_be_visible()  # the address names it
    assert all(url.startswith(scripted_server.url) for url in watched.requests)


@pytest.mark.slow
def test_finding_a_field(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(f"{scripted_server.url}/docs")
    expect(page.locator(".endpoint").first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("detokenize")
    expect(page.locator(".endpoint:visible")).to_have_count(1)
    page.fill("#find", "best_of")
    field = endpoint(page, "post-v1-completions").locator('li[data-name="best_of"]')
    expect(field).to_be_visible()
    expect(endpoint(page, "post-v1-completions").locator('li[data-name="prompt"]')).to_be_hidden()
    expect(endpoint(page, "get-health")).to_be_hidden()
    page.fill("#find", 'no"such\\thing')
    expect(page.locator("#status")).to_contain_text("No endpoint or field matches")
    page.fill("#find", "")
    expect(endpoint(page, "get-health")).to_be_visible()
    page.click("#toggle-all")
    expect(endpoint(page, "get-health").locator(".inside")).to_be_visible()


def test_examples_run(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(f"{scripted_server.url}/docs")
    for name in ("post-v1-chat-completions", "post-v1-messages", "post-tokenize", "get-v1-models"):
        endpoint(page, name).locator("summary").first.click()
        endpoint(page, name).get_by_role("button").click()
        expect(page.locator("#toast")).to_have_text("Copied")
        curl = page.evaluate("navigator.clipboard.readText()")
        ran = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=120)
        assert "error" not in json.loads(ran.stdout), (curl, ran.stdout)
    forget = endpoint(page, "delete-v1-responses-response_id")
    assert forget.locator("pre").text_content() == f"curl -X DELETE {scripted_server.url}/v1/responses/RESPONSE_ID"


def test_a_description_stays_text(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(f"{scripted_server.url}/docs")
    schema = {"type": "object", "properties": {NASTY: {"type": NASTY, "default": NASTY, "description": NASTY}}}
    operation = {
        "tags": [NASTY],
        "summary": NASTY,
        "description": f"`{NASTY}`",
        "requestBody": {"content": {"application/json": {"schema": schema}}},
        "responses": {NASTY: {"description": NASTY}},
    }
    spec = {"info": {"description": NASTY, "version": NASTY}, "paths": {f"/{NASTY}": {"post": operation}}}
    page.route("**/openapi.json", lambda route: route.fulfill(json=spec))
    page.reload()
    page.locator(".endpoint summary").first.click()
    expect(page.locator(".endpoint .words")).to_have_text(NASTY)
    assert page.locator("main img, main script").count() == 0 and page.title() == "Kvasir API"


@pytest.mark.slow
def test_phone_and_themes(watched: Watched, scripted_server: LiveServer) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        page = watched.open(f"{scripted_server.url}/docs", viewport={"width": 360, "height": 740}, color_scheme=scheme)
        expect(page.locator(".endpoint").first).to_be_visible()
        page.click("#toggle-all")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    for other in ("/", "/engine"):
        page = watched.open(scripted_server.url + other)
        expect(page.get_by_role("link", name="API")).to_be_visible()
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, other


@pytest.mark.slow
def test_a_server_with_a_key(watched: Watched, locked_server: LiveServer) -> None:
    page = watched.open(f"{locked_server.url}/docs")
    expect(page.locator("#status")).to_contain_text("No API key")
    page.fill("#key", "sesame")
    page.press("#key", "Enter")
    expect(page.locator(".endpoint").first).to_be_visible()
    expect(page.locator("#key-form")).to_be_hidden()
    assert "$KVASIR_API_KEY" in page.locator("pre").first.text_content()
    page.context.close()
    watched.errors.clear()  # the browser reports the 401 that was meant
