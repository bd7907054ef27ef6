"""Take the pictures in docs/images: both pages of a real server, in a real browser, while the starter model works.

usage: screenshots.py   (needs Chromium and the extra dev)
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvasir.models.hub import STARTER_GENERATION, find_starter_model
from tests.server_process import LiveServer

FOLDER = Path(__file__).parent.parent / "docs" / "images"
MINUTE = 60_000  # milliseconds


def playground(browser: Browser, url: str) -> None:
    page = open_page(browser, url, 1280, 760)
    page.fill("#parameter-seed", "3")
    for question in ("What is the capital of France?", "Write two sentences about the sea."):
        page.fill("#message", question)
        page.press("#message", "Enter")
        expect(page.locator(".again")).to_be_visible(timeout=MINUTE)
    unsure = page.locator(".turn.assistant").last.locator(".token[data-sure='0'], .token[data-sure='1']")
    page.locator("#panel").evaluate("panel => panel.scrollTo(0, 0)")
    unsure.nth(1).hover()
    expect(page.locator("#tooltip")).to_be_visible()
    page.screenshot(path=FOLDER / "playground.png")


def engine_view(browser: Browser, url: str) -> None:
    page = open_page(browser, f"{url}/engine", 1280, 1010)
    page.click("#demo")
    expect(page.locator("#requests li")).to_have_count(6, timeout=MINUTE)
    expect(page.locator("#demo")).to_be_enabled(timeout=MINUTE)
    page.click("#demo")  # the second time there is something in the cache, and something to compare with
    expect(page.locator("#requests li")).to_have_count(6, timeout=MINUTE)
    page.wait_for_timeout(1500)
    page.screenshot(path=FOLDER / "engine.png")


def open_page(browser: Browser, url: str, width: int, height: int) -> Page:
    page = browser.new_context(viewport={"width": width, "height": height}).new_page()
    page.goto(url)
    return page


def main() -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("There is no Chromium; on Debian `apt-get install chromium` brings it.")
    flags = ["--max-model-len", "2048", "--served-model-name", "SmolLM2-135M-Instruct"]
    flags += ["--override-generation-config", json.dumps(STARTER_GENERATION)]
    with LiveServer.real(find_starter_model(), *flags) as server, sync_playwright() as driver:
        server.wait_until_ready()
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        playground(browser, server.url)
        engine_view(browser, server.url)
        browser.close()


if __name__ == "__main__":
    main()
