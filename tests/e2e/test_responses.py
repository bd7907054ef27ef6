"""/v1/responses at a slow server that stores two: what is deleted stays deleted, what runs is bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import web
from tests.server_process import LiveServer, until

SLOW = {"make": "kvasir.executor.fake:delayed", "delay": 0.01, "token": 42}
LONG = {"input": "Hi", "background": True, "max_output_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(starter_model: Path) -> Iterator[LiveServer]:
    with LiveServer.fake(starter_model, server={"max_stored_responses": 2}, executor=SLOW) as server:
        yield server.wait_until_ready()


def create(server: LiveServer, name: str = "any", **body: Any) -> httpx.Response:
    return web.post(f"{server.url}/v1/responses", json=body, headers={"X-Request-Id": name})


def test_one_that_is_deleted_while_it_runs_ends_and_stays_deleted(server: LiveServer) -> None:
    place = f"{server.url}/v1/responses/{create(server, 'deleted-1', **LONG).json()['id']}"
    assert web.get(place).json()["status"] == "in_progress"
    assert web.delete(place).json()["deleted"] is True
    server.wait_for_log("deleted-1 ended: abort")
    assert web.get(place).status_code == 404
    assert web.delete(place).status_code == 404


def test_no_more_run_in_the_background_than_are_stored(server: LiveServer) -> None:
    running = [create(server, **LONG).json()["id"] for _ in range(2)]
    refused = create(server, **LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert "--max-stored-responses" in refused.json()["error"]["message"] and refused.headers["retry-after"]
    assert create(server, input="Hi", max_output_tokens=2).status_code == 200, "one that somebody waits for may run"
    for each in running:
        assert web.post(f"{server.url}/v1/responses/{each}/cancel").json()["status"] == "cancelled"
    done = create(server, **{**LONG, "max_output_tokens": 2}).json()["id"]
    place = f"{server.url}/v1/responses/{done}"
    until(lambda: web.get(place).json()["status"] == "incomplete", "the end of a response", server)


def numbers(text: str) -> list[int]:
    return [json.loads(line[6:])["sequence_number"] for line in text.splitlines() if line.startswith("data: ")]


def test_a_background_stream_can_be_followed_again_from_any_event(server: LiveServer) -> None:
    body = {"input": "Hi", "background": True, "stream": True, "max_output_tokens": 60, "ignore_eos": True}
    with web.stream("POST", f"{server.url}/v1/responses", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: response.created"
        place = f"{server.url}/v1/responses/{json.loads(next(lines)[6:])['response']['id']}"
    assert web.get(place).json()["status"] == "in_progress", "the client that left has ended nothing"
    whole = web.get(f"{place}?stream=true")  # joins while it runs, and stays to the end
    assert whole.headers["content-type"].startswith("text/event-stream")
    every = numbers(whole.text)
    assert every == list(range(len(every))) and len(every) > 20
    assert whole.text.splitlines()[-3] == "event: response.incomplete", "max_output_tokens were reached"
    assert numbers(web.get(f"{place}?stream=true&starting_after=7").text) == every[8:]
    assert numbers(web.get(f"{place}?stream=true&starting_after=100000").text) == []
    assert web.get(place).json()["output"][0]["content"][0]["text"]


def test_a_background_stream_ends_with_its_response(server: LiveServer) -> None:
    body = {**LONG, "stream": True}
    with web.stream("POST", f"{server.url}/v1/responses", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        place = f"{server.url}/v1/responses/{json.loads(next(lines)[6:])['response']['id']}"
        assert web.post(f"{place}/cancel").json()["status"] == "cancelled"
        assert list(lines)[-3] == "event: response.cancelled"


@pytest.mark.parametrize("query", ["stream=true", "starting_after=3", "include[]=message.output_text.logprobs", "x=1"])
def test_a_stored_response_is_asked_for_by_its_id_alone(server: LiveServer, query: str) -> None:
    place = f"{server.url}/v1/responses/{create(server, input='Hi', max_output_tokens=1).json()['id']}"
    assert web.get(f"{place}?stream=false").status_code == web.get(place).status_code == 200
    refused = web.get(f"{place}?{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == query.partition("=")[0].removesuffix("[]")
