"""The playground in a real browser: streams, stops, explains its tokens, and shows text as text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import web
from tests.e2e.starter.conftest import LONG, NASTY, SAID, Watched, scripted
from tests.pairwise import few
from tests.server_process import LiveServer, until


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect as plain

    plain.set_options(timeout=LONG)  # of its own accord it waits for 5 s
    return plain(locator)


def ask(page: Any, text: str, max_tokens: int = 80) -> None:
    page.fill("#parameter-max_tokens", str(max_tokens))
    page.fill("#message", text)
    page.press("#message", "Enter")


def answer(page: Any) -> Any:
    return page.locator(".turn.assistant .said").last


def is_idle(server: LiveServer) -> bool:
    return not web.get(f"{server.url}/engine/state").json()["requests"]


def test_an_answer_comes_bit_by_bit(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(scripted_server.url)
    ask(page, "Tell me about the sea.", max_tokens=120)
    said = answer(page)
    page.wait_for_selector(".turn.assistant .said.streaming:has-text('bold')")  # text before the answer is complete
    expect(page.locator(".after .figures")).to_contain_text("tokens/s")
    assert SAID.startswith(said.inner_text()) and len(said.inner_text()) > len(NASTY)
    words = page.locator(".after .figures").inner_text()
    assert "first token" in words and "ms" in words
    assert page.locator(".turn.user .said").inner_text() == "Tell me about the sea."


@pytest.mark.parametrize("alternatives", few(["0", "5"], fast=["5"]))
def test_what_a_model_prints_stays_text(watched: Watched, starter_model: Path, alternatives: str) -> None:
    with scripted(starter_model, stream_interval=70) as server:  # a whole script comes in one piece
        page = watched.open(server.wait_until_ready().url)
        page.fill("#parameter-top_logprobs", alternatives)
        ask(page, "<img src=x onerror=\"document.title = 'owned'\">")
        expect(page.locator(".after .figures")).to_be_visible()
        assert SAID.startswith(answer(page).inner_text()) and NASTY in answer(page).inner_text()
        if alternatives == "0":
            assert answer(page).locator(".token", has_text=NASTY).count() == 1
        assert page.locator(".transcript script, .transcript img, .transcript b").count() == 0
        assert page.title() == "Kvasir playground"
        page.context.close()


@pytest.mark.slow
def test_a_question_may_come_before_the_list_of_models(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(scripted_server.url)
    page.route("**/v1/models", lambda route: None)  # which never arrives
    page.reload()
    assert page.locator("#model option").count() == 0
    ask(page, "Tell me about the sea.", max_tokens=8)
    expect(page.locator(".after .figures")).to_contain_text("8 tokens")
    assert page.locator(".failed").count() == 0


@pytest.mark.parametrize("by", few(["button", "key"], fast=["key"]))
def test_stopping_ends_the_request(watched: Watched, scripted_server: LiveServer, by: str) -> None:
    page = watched.open(scripted_server.url)
    ask(page, "Tell me about the sea.", max_tokens=900)
    expect(answer(page)).to_contain_text("bold")
    if by == "button":
        page.click("#stop-chat")
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".after .figures")).to_contain_text("stopped by you")
    said = answer(page).inner_text()
    assert 0 < len(said) < len(SAID) and SAID.startswith(said)
    until(lambda: is_idle(scripted_server), "the engine stops, too", scripted_server)
    expect(page.locator("#send")).to_be_visible()


def test_regenerating_replaces_the_answer_and_the_chat_goes_on(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(scripted_server.url)
    bodies: list[Any] = []
    page.on("request", lambda sent: bodies.append(sent.post_data_json) if sent.method == "POST" else None)
    ask(page, "One", max_tokens=8)
    expect(page.locator(".again")).to_be_visible()
    with page.expect_request(lambda sent: sent.method == "POST"):
        page.click(".again")  # which is gone before the request is sent
    expect(page.locator(".again")).to_be_visible()
    assert page.locator(".turn").count() == 2
    with page.expect_request(lambda sent: sent.method == "POST"):
        ask(page, "Two", max_tokens=900)
    expect(page.locator(".turn")).to_have_count(4)
    page.keyboard.press("Escape")
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    assert roles == [["user"], ["user"], ["user", "assistant", "user"]]
    expect(page.locator(".again")).to_be_visible()
    page.click("#clear")
    expect(page.locator("#welcome")).to_be_visible()


def test_hovering_shows_probabilities_and_alternatives(watched: Watched, real_server: LiveServer) -> None:
    page = watched.open(real_server.url)
    page.fill("#parameter-temperature", "0")
    ask(page, "What is the capital of France?")
    expect(page.locator(".after .figures")).to_be_visible()
    assert "Paris" in answer(page).inner_text()
    answer(page).locator(".token", has_text="Paris").hover()
    tooltip = page.locator("#tooltip")
    expect(tooltip).to_be_visible()
    lines = tooltip.locator(".line").all()
    assert len(lines) == 5, "the token, which is the likeliest, and four others"
    shares = [float(line.locator(".share").inner_text().rstrip(" %")) for line in lines]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.5
    assert tooltip.locator(".line.chosen .text").inner_text() == "␣Paris"
    page.mouse.move(5, 5)
    expect(tooltip).to_be_hidden()
    answer(page).focus()
    page.keyboard.press("ArrowRight")
    expect(tooltip.locator(".line.chosen .text")).to_have_text("The")


@pytest.mark.parametrize(
    ("text", "tokens", "spans"),
    [
        (" is Paris.", [" is", " Paris", ".", "<|im_end|>"], [(" is", 1), (" Paris", 1), (".", 1)]),
        ("a € b", ["a", " ", "�", "�", " b"], [("a", 1), (" ", 1), ("€", 2), (" b", 1)]),
        pytest.param("a €", ["a", " ", "", ""], [("a", 1), (" ", 1), ("€", 2)], marks=pytest.mark.slow),
        pytest.param("go", ["going"], [("go", 1)], marks=pytest.mark.slow),  # the rest was a stop string's
        pytest.param("aa", ["a", "a"], [("a", 1), ("a", 1)], marks=pytest.mark.slow),
        ("plain", [], [("plain", 0)]),
    ],
    ids=["the end of an answer", "a character of two tokens", "tokens without text", "cut", "twice", "no logprobs"],
)
def test_tokens_that_come_together_are_told_apart(
    watched: Watched, scripted_server: LiveServer, text: str, tokens: list[str], spans: list[tuple[str, int]]
) -> None:
    page = watched.open(scripted_server.url)
    content = [{"token": token, "logprob": -0.1, "top_logprobs": []} for token in tokens]
    choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": content}, "finish_reason": "stop"}
    sent = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    stream = {"body": sent, "content_type": "text/event-stream"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**stream))
    ask(page, "Where?")
    expect(page.locator(".after .figures")).to_be_visible()
    shown = "all => all.map(each => [each.textContent, each.tokens?.length ?? 0])"
    found = answer(page).locator(".token").evaluate_all(shown)
    assert [tuple(each) for each in found] == spans


def test_completing_text(watched: Watched, real_server: LiveServer) -> None:
    page = watched.open(real_server.url)
    page.click("#tab-chat")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#completion")).to_be_visible()
    for name, value in {"temperature": "0", "max_tokens": "8"}.items():
        page.fill(f"#parameter-{name}", value)
    page.fill("#prompt", "Once upon a time")
    page.press("#prompt", "Control+Enter")
    output = page.locator("#completion-output")
    expect(output.locator(".figures")).to_contain_text("8 tokens")
    said = output.locator(".said").inner_text()
    asked = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    reply = web.post(f"{real_server.url}/v1/completions", json=asked).json()
    assert said == "Once upon a time" + reply["choices"][0]["text"]
    output.locator(".token").nth(1).hover()
    expect(page.locator("#tooltip .line").first).to_be_visible()
    page.click("#again-completion")
    expect(output.locator(".figures")).to_contain_text("8 tokens")
    assert output.locator(".said").inner_text() == said


def copied(page: Any, button: str) -> str:
    page.evaluate("navigator.clipboard.writeText('')")
    page.click(button)
    expect(page.locator("#toast")).to_have_text("Copied")  # as it may be since the time before
    return str(until(lambda: page.evaluate("navigator.clipboard.readText()"), "something to paste"))


def test_what_is_copied_runs(watched: Watched, real_server: LiveServer) -> None:
    page = watched.open(real_server.url)
    for name, value in {"temperature": "0", "top_k": "5", "max_tokens": "12", "system": 'It\'s "brief".'}.items():
        page.fill(f"#parameter-{name}", value)
    page.fill("#parameter-min_p", "0")
    page.fill("#message", "What is the capital of France?")
    curl = copied(page, "#copy-curl")
    assert '"min_p": 0' in curl and "repetition_penalty" not in curl, "what is set is sent, even where it turns off"
    ran = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=web.PATIENCE)
    said = json.loads(ran.stdout)["choices"][0]["message"]["content"]
    python = copied(page, "#copy-python")
    ran = subprocess.run(
        [sys.executable, "-c", python], capture_output=True, text=True, check=True, timeout=web.PATIENCE
    )
    assert said and ran.stdout == said + "\n"


def test_keyboard_phone_and_themes(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(scripted_server.url)
    page.click("#tab-chat")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert page.input_value("#message") == "a\nb"
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    phone = watched.open(scripted_server.url, viewport={"width": 360, "height": 740}, color_scheme="dark")
    assert phone.evaluate("document.documentElement.scrollWidth") <= 360
    expect(phone.locator("#parameter-temperature")).to_be_hidden()
    phone.click("#open-panel")
    phone.fill("#parameter-temperature", "0.5")
    phone.click("#close-panel")
    phone.reload()
    expect(phone.locator("#parameter-temperature")).to_have_value("0.5")  # settings are remembered


def test_nothing_comes_from_elsewhere(watched: Watched, scripted_server: LiveServer) -> None:
    for path in ("/", "/engine"):
        page = watched.open(scripted_server.url + path)
        page.wait_for_load_state("load")
        policy = web.get(scripted_server.url + path).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
    assert watched.requests and all(url.startswith(scripted_server.url) for url in watched.requests)


def test_a_server_with_a_key(watched: Watched, locked_server: LiveServer) -> None:
    assert web.get(f"{locked_server.url}/engine/state").status_code == 401
    page = watched.open(locked_server.url)
    expect(page.locator("#toast")).to_contain_text("No API key")
    page.fill("#parameter-key", "sesame")
    page.press("#parameter-key", "Tab")
    expect(page.locator("#model option")).to_have_count(1)
    page.fill("#parameter-top_logprobs", "0")  # this engine has no probabilities
    ask(page, "Hello", max_tokens=4)
    expect(page.locator(".after .figures")).to_be_visible()
    page.goto(f"{locked_server.url}/engine")
    expect(page.locator("#connection")).to_have_text("live")
    page.context.close()
    watched.errors.clear()  # the browser reports the 401 that was meant


def test_reasoning_and_calls_are_folded(watched: Watched, starter_model: Path) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    said = f"<think>\nWhich <b>one</b>?\n</think>\n\nI look.{call}"
    executor = {"make": "tests.saying_executor:saying"}
    with LiveServer.fake(starter_model, server={"reasoning_parser": "qwen3"}, executor=executor) as server:
        page = watched.open(server.wait_until_ready().url)
        page.fill("#parameter-tools", '[{"name": "weather", "parameters": {"type": "object", "properties": {}}}]')
        page.fill("#parameter-top_logprobs", "0")
        ask(page, f"«{said}»«It rains.»", max_tokens=200)
        expect(page.locator(".figures")).to_contain_text("calls tools")
        assert answer(page).inner_text() == "I look."
        assert page.locator(".fold.reasoning pre").text_content() == "Which <b>one</b>?"
        assert not page.locator(".fold.reasoning pre").is_visible(), "it is folded"
        page.click(".fold.reasoning summary")
        assert page.locator(".fold.reasoning pre").is_visible()
        assert page.locator(".fold.call summary").inner_text() == "Call of weather"
        assert page.locator(".fold.call pre").text_content() == '{"city": "Rome"}'
        assert page.get_attribute("#message", "placeholder") == "Result of weather"
        ask(page, "rain", max_tokens=200)
        expect(answer(page)).to_have_text("It rains.")
        page.fill("#parameter-tools", "")
        page.fill("#parameter-schema", '{"enum": [{"a": 7}]}')
        page.click("#clear")
        ask(page, "Hello", max_tokens=50)
        expect(answer(page)).to_have_text('{"a": 7}')
