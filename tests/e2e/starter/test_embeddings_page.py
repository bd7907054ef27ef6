"""The page of an embedding server, and the playground of a server with adapters, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import web
from tests.e2e.starter.conftest import Watched
from tests.e2e.starter.test_playground import expect
from tests.e2e.test_adapters import write_adapter
from tests.pooling_builders import save_sentence_bert
from tests.server_process import LiveServer

pytestmark = pytest.mark.slow  # servers with models, and sentence-transformers takes seconds to import


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("embedder")
    save_sentence_bert(directory)
    with LiveServer.real(directory, "--served-model-name", "tiny", "--dtype", "float32") as server:
        yield server.wait_until_ready()


def test_two_texts_a_list_and_a_map(watched: Watched, embedder: LiveServer) -> None:
    page = watched.open(embedder.url)
    expect(page.locator("#model")).to_have_text("tiny")
    page.fill("#first", "the cat sat")
    page.fill("#second", "a dog barks")
    page.click("#pair button")
    asked = {"text_1": "the cat sat", "text_2": "a dog barks"}
    (score,) = web.post(f"{embedder.url}/v1/score", json=asked).json()["data"]
    expect(page.locator("#similarity")).to_have_text(f"{score['score']:.4f}")
    page.fill("#query", "the cat")
    page.fill("#documents", "grass\n\nthe cat <b>\nthe sky")
    page.click("#ranking button")
    asked_list = {"query": "the cat", "documents": ["grass", "the cat <b>", "the sky"]}
    ranked = web.post(f"{embedder.url}/v1/rerank", json=asked_list).json()["results"]
    expected = [f"{each['relevance_score']:.3f}{asked_list['documents'][each['index']]}" for each in ranked]
    expect(page.locator("#ranked li")).to_have_text(expected)
    page.fill("#lines", "the cat\nthe cat sat\ngrass\nthe sky")
    page.click("#map button")
    expect(page.locator("#plot text")).to_have_text(["the cat", "the cat sat", "grass", "the sky"])
    boxes = [(each["cx"], each["cy"]) for each in page.eval_on_selector_all("#plot circle", _PLACES)]
    assert len(set(boxes)) == 4 and all(0 <= x <= 640 and 0 <= y <= 400 for x, y in boxes)


_PLACES = "all => all.map(each => ({ cx: each.cx.baseVal.value, cy: each.cy.baseVal.value }))"


def test_what_is_wrong_is_said(watched: Watched, embedder: LiveServer) -> None:
    page = watched.open(embedder.url)
    page.click("#pair button")
    expect(page.locator("#similarity")).not_to_be_empty()
    page.fill("#lines", "one\ntwo")
    page.click("#map button")
    expect(page.locator("#problem")).to_have_text("Paste at least three lines.")
    page.fill("#second", "")
    page.click("#pair button")
    expect(page.locator("#problem")).to_contain_text("text_2 is empty")
    expect(page.locator("#similarity")).to_be_empty()  # the old number belongs to other texts
    watched.errors = [each for each in watched.errors if "400" not in each]  # the browser notes the refusal


def test_adapters_side_by_side(watched: Watched, starter_model: Path, tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "two", 2)
    flags = ["--enable-lora", "--max-lora-rank", "8", "--max-model-len", "512"]
    with LiveServer.real(starter_model, *flags, "--lora-modules", f"one={one}", f"two={two}") as server:
        page = watched.open(server.wait_until_ready().url)
        expect(page.locator("#model option")).to_have_count(3)
        page.select_option("#model", "one")
        page.select_option("#against", "two")
        page.click("#tab-completion")
        for name, value in {"temperature": "0", "max_tokens": "6"}.items():
            page.fill(f"#parameter-{name}", value)
        page.fill("#prompt", "Once upon a time")
        page.press("#prompt", "Control+Enter")
        expect(page.locator("#completion-output .figures")).to_have_count(2)
        texts: list[Any] = []
        for model in ("one", "two"):
            asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
            reply = web.post(f"{server.url}/v1/completions", json=asked).json()
            texts.append("Once upon a time" + reply["choices"][0]["text"])
        assert page.locator("#completion-output .said").all_inner_texts() == texts and texts[0] != texts[1]
