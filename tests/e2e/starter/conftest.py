"""Servers and a browser for the first five minutes. Chromium is Debian's package; without it tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import absent
from tests.server_process import LiveServer

NASTY = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\"> & <b>bold</b>"
LONG = 120_000  # milliseconds; a busy machine takes its time
SAID = "Look: " + NASTY + " The sea is wide, and the ship is small." * 100  # more than anybody waits for


@pytest.fixture(scope="session")
def real_server(starter_model: Path) -> Iterator[LiveServer]:
    """The starter model."""
    with LiveServer.real(starter_model, "--max-model-len", "2048") as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="session")
def scripted_server(starter_model: Path) -> Iterator[LiveServer]:
    """Says SAID, a token every 20 ms."""
    with scripted(starter_model) as server:
        yield server.wait_until_ready()


def scripted(tokenizer: Path, text: str = SAID, **settings: Any) -> LiveServer:
    executor = {"make": "tests.e2e.starter.scripted:make", "text": text, "delay": 0.02}
    engine = {"num_gpu_blocks_override": 600, "max_num_seqs": 16, **settings}
    return LiveServer.fake(tokenizer, executor=executor, engine=engine)


@pytest.fixture(scope="module")  # not longer: while it is there, an event loop runs in this thread, and others cannot
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        absent("there is no Chromium; on Debian `apt-get install chromium` brings it")
    if find_spec("playwright") is None:
        absent("playwright is not installed; `make test` does it")
    from playwright import sync_api as playwright

    with playwright.sync_playwright() as driver:
        # A container has no user namespaces for Chromium's sandbox; the pages are our own.
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=LONG)
        yield started
        started.close()


class Watched:
    """Pages, and what went wrong on them: errors, and requests to elsewhere."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.errors: list[str] = []
        self.requests: list[str] = []

    def open(self, url: str, **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        context = self.browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        context.set_default_timeout(LONG)
        page = context.new_page()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(url)
        return page


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    made = Watched(browser)
    yield made
    for context in browser.contexts:
        context.close()
    assert made.errors == []
