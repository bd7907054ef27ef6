"""The engine view in a real browser, and its feed."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from kvasir.server.routes.pages import block_ranges, engine_state
from tests import web
from tests.builders import make_core, request
from tests.conftest import ROOT
from tests.e2e.starter.conftest import Watched
from tests.e2e.starter.test_playground import expect
from tests.server_process import LiveServer, until

PROMPT = "The mead of poetry was made of honey and of Kvasir's blood. " * 12


def complete(server: LiveServer, max_tokens: int = 60) -> Any:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
    return web.post(f"{server.url}/v1/completions", json=body).raise_for_status().json()


def state(server: LiveServer) -> Any:
    return web.get(f"{server.url}/engine/state").raise_for_status().json()


def blocks_of(seen: Any) -> list[set[int]]:
    return [{first + i for first, count in each["blocks"] for i in range(count)} for each in seen["requests"]]


def shared_blocks(seen: Any) -> set[int]:
    held = blocks_of(seen)
    return set.intersection(*held) if len(held) > 1 else set()


def test_two_requests_with_one_prompt_share_blocks_and_none_after_they_end(
    watched: Watched, scripted_server: LiveServer
) -> None:
    page = watched.open(f"{scripted_server.url}/engine")
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#idle")).to_be_visible()
    with ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(complete, scripted_server, 300) for _ in range(2)]  # which takes 6 s at least
        expect(page.locator("#requests li")).to_have_count(2)
        expect(page.locator("#running")).to_have_text("2")
        expect(page.locator("#shared")).to_have_text(re.compile("^[1-9]"))
        prompt = len(shared_blocks(state(scripted_server)))
        assert prompt >= 5 and page.locator("#shared").inner_text() == str(prompt)
        page.locator("#requests li").first.hover()
        expect(page.locator("#requests li.lit")).to_have_count(1)
        page.locator("#blocks").hover(position={"x": 4, "y": 4})
        expect(page.locator("#tooltip")).to_contain_text("Block 1")
        for answer in answers:
            answer.result()
    expect(page.locator("#requests li")).to_have_count(0)
    expect(page.locator("#shared")).to_have_text("0")
    expect(page.locator("#blocks")).to_have_attribute("data-shared", "0")
    expect(page.locator("#hit-rate")).to_have_text(re.compile(r"^\d+(\.\d)? %$"))
    names = page.locator("#ledger tr td:first-of-type").all_inner_texts()
    assert [name.partition(",")[0] for name in names if name] == [
        "Weights", "KV cache", "KV cache", "KV cache", "Activations of the largest step", "Total",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_button_fires_real_requests(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(f"{scripted_server.url}/engine")
    page.click("#demo")
    # They come and go, so both are looked for at once.
    page.wait_for_selector("body:has(#requests li:nth-child(3)):has(#shared:text-matches('^[1-9]'))")
    expect(page.locator("#demo")).to_be_enabled()
    for name in ("ttft", "itl"):
        expect(page.locator(f"#{name}-words")).to_contain_text("p99 below")


def test_on_a_phone_nothing_is_too_wide(watched: Watched, scripted_server: LiveServer) -> None:
    page = watched.open(f"{scripted_server.url}/engine", viewport={"width": 360, "height": 740})
    expect(page.locator("#connection")).to_have_text("live")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


# ---------------------------------------------------------------- the feed


def feed(server: LiveServer, query: str = "", **options: Any) -> Any:
    return web.connect(server.url.replace("http", "ws") + f"/engine/feed{query}", **options)


def test_the_feed_tells_each_step_once(scripted_server: LiveServer) -> None:
    steps: list[int] = []
    with feed(scripted_server, "?interval=0.05") as messages, ThreadPoolExecutor(1) as client:
        began = last = json.loads(messages.recv())["totals"]["steps"]
        asked = client.submit(complete, scripted_server, 30)
        end = None  # the last step, once there is one
        while end is None or last < end:
            seen = json.loads(messages.recv(timeout=web.PATIENCE))
            steps += [each["step"] for each in seen["steps"] if each["step"] > began]
            last = seen["totals"]["steps"]
            if end is None and asked.done():
                end = state(scripted_server)["totals"]["steps"]
    assert len(steps) >= 30 and steps == list(range(steps[0], steps[0] + len(steps)))


def test_pages_from_elsewhere_may_not_watch(scripted_server: LiveServer) -> None:
    with pytest.raises(InvalidStatus), feed(scripted_server, origin="http://evil.example"):
        pass
    with feed(scripted_server, origin=scripted_server.url) as messages:
        assert "blocks" in json.loads(messages.recv())


def test_wrong_questions_are_refused(scripted_server: LiveServer) -> None:
    for query in ("engine=1", "engine=-1", "since=x"):
        reply = web.get(f"{scripted_server.url}/engine/state?{query}")
        assert reply.status_code in (400, 404) and reply.json()["error"]["message"]


@pytest.mark.slow
def test_several_engines_are_seen_one_by_one(starter_model: Path) -> None:
    with LiveServer.fake(starter_model, engine={"data_parallel_size": 2}) as server:
        server.wait_until_ready()
        for engine in range(2):
            seen = web.get(f"{server.url}/engine/state?engine={engine}").json()
            assert (seen["engine"], seen["engines"]) == (engine, 2)
        assert web.get(f"{server.url}/engine/state?engine=2").status_code == 404


def test_watching_ends_with_the_connection(scripted_server: LiveServer) -> None:
    for _ in range(3):
        with feed(scripted_server, "?interval=0.05") as messages:
            messages.recv()
    until(lambda: state(scripted_server)["blocks"]["used"] == 0, "the server still answers", scripted_server)
    assert "Traceback" not in scripted_server.log


def test_block_ranges() -> None:
    import numpy as np

    assert block_ranges(np.array([4, 5, 6, 9, 3, 2], np.int32)) == [(4, 3), (9, 1), (3, 1), (2, 1)]
    assert block_ranges(np.array([], np.int32)) == []
    assert block_ranges(np.array([1], np.int32)) == [(1, 1)]


def test_the_page_of_the_docs_describes_what_is_sent() -> None:
    text = (ROOT / "docs" / "engine_view.md").read_text()
    described = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL).group(1))  # type: ignore[union-attr]
    core = make_core(lookahead=0)
    core.snapshot()
    core.add(request(0, [1, 2, 3, 4, 5]))
    core.run_step()
    sent = {**engine_state(core.snapshot(), "m", described["latency"]), "engine": 0, "engines": 1}
    assert sent.keys() == described.keys()
    assert sent["blocks"].keys() == described["blocks"].keys()
    assert sent["requests"][0].keys() == described["requests"][0].keys()
    assert sent["steps"][0].keys() == described["steps"][0].keys()
    assert described["totals"].keys() <= sent["totals"].keys()
    assert sent["memory"].keys() == described["memory"].keys()


def test_the_pages_are_plain() -> None:
    """No inline script or style, which the policy would forbid, and no address of another server."""
    for file in (ROOT / "kvasir" / "server" / "pages").iterdir():
        text = file.read_text()
        if file.suffix == ".html":
            assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", text), file
            assert not re.search(r'(src|href)="(https?:)?//', text), file
        if file.suffix == ".js":
            assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text, file
        assert Path(file).stat().st_size < 20_000, f"{file} should be small"
