"""Whatever is sent, the answer is a 4xx or a 200, and the server goes on."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests import web
from tests.server_process import ROOT, LiveServer

POSTS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/generate", "/generative_scoring", "/v1/chat/completions/batch"),
    *("/v1/responses/input_tokens", "/v1/batches"),
]
GOOD: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/generate": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/generative_scoring": {"query": "Hi", "items": ["x"], "label_token_ids": [1]},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "Hi"}]], "max_tokens": 2},
}
PROFILE = os.environ.get("KVASIR_HYPOTHESIS_PROFILE")
DEEP = 100_000
CLIENT = httpx.Client(timeout=web.PATIENCE)
BROKEN = {
    "nothing": b"",
    "half an object": b'{"messages": [{"role": "user", "conte',
    "no object": b"[1, 2]",
    "a number": b"17",
    "null": b"null",
    "NaN": b'{"prompt": "x", "messages": [], "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "bad UTF-8": b'{"prompt": "\xff\xfe", "messages": [{"role": "user", "content": "\xc3\x28"}]}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a lone surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a deep field": b'{"prompt": "x", "messages": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "a huge number": b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    "a huge exponent": b'{"prompt": "x", "temperature": 1e99999}',
    "a repeated key": b'{"prompt": "x", "prompt": 3}',
    "nulls": b"\0" * 1000,
    "trailing rubbish": b'{"prompt": "x"} x',
}
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, "", "x", "\0", "𝕏" * 50),
    *([], {}, [[]], [None], [{}], {"": 0}, {"type": "text"}, [{"role": "user"}], [-1], [2**40], {"a": {"b": [1]}}),
]


@pytest.fixture(scope="module")
def server(starter_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its answers are short, whatever max_tokens a test thinks up, and it may take templates."""
    files = str(tmp_path_factory.mktemp("files"))
    options = {"trust_request_chat_template": True, "request_timeout": 120.0, "files_dir": files}
    engine = {"max_model_len": 64}
    executor = "tests.scoring_echo:scoring_echo"
    with LiveServer.fake(starter_model, engine=engine, server=options, executor=executor) as found:
        yield found.wait_until_ready()


def check(reply: httpx.Response, what: object) -> None:
    assert reply.status_code < 500, f"{what}: {reply.status_code} {reply.text[:500]}"
    assert "internal_error" not in reply.text, f"{what}: {reply.text[:500]}"  # an event of a stream may say so
    if reply.status_code >= 400:
        assert reply.json()["error"]["message"]


KINDS = ("text/plain", "", "application/json; charset=utf-16")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("every_kind", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_broken_bodies(server: LiveServer, path: str, every_kind: bool) -> None:
    for number, (what, body) in enumerate(BROKEN.items()):
        for kind in ("application/json", *(KINDS if every_kind else [KINDS[number % len(KINDS)]])):
            reply = CLIENT.post(server.url + path, content=body, headers={"Content-Type": kind} if kind else {})
            check(reply, (what, kind))
            assert reply.status_code >= 400, (what, kind, reply.text[:200])


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("values", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_odd_values_of_every_field(server: LiveServer, path: str, values: int) -> None:
    schema = web.get(f"{server.url}/openapi.json").json()
    reference = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    names = schema["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    rng = random.Random(path)
    for number, name in enumerate(names):
        for value in rng.sample(ODD_VALUES, values):
            for stream in ({}, {"stream": True}) if values > 1 else ({"stream": True} if number % 2 else {},):
                body = {**GOOD[path], **stream, name: value}
                headers = {"Content-Type": "application/json"}
                check(CLIENT.post(server.url + path, content=json.dumps(body), headers=headers), body)


@pytest.mark.parametrize(
    "greedy",
    [
        {"stop": "x" * 1_000_000},
        {"stop": [str(i) for i in range(100_000)]},
        {"bad_words": [str(i) for i in range(100_000)]},
        {"repetition_detection": {"max_pattern_size": 10**12}},
        {"allowed_token_ids": [1] * 2_000_000},
        {"logit_bias": {str(i): 1 for i in range(500_000)}},
        {"n": 4096, "best_of": 16384},
        {"chat_template_kwargs": {"self": 1}},
        {"chat_template_kwargs": {"messages": [], "tools": 3}},
        {"chat_template_kwargs": {"a": [[[]]] * 100_000}},
        {"messages": [{"role": "user", "content": "x"}] * 100_000},
        {"messages": [{"role": "user", "content": "x", "y": {"z": [1] * 100_000}}]},
    ],
    ids=lambda body: next(iter(body)),
)
def test_greedy_requests_are_refused_and_hold_nobody_up(server: LiveServer, greedy: dict[str, Any]) -> None:
    body, before = {**GOOD["/v1/chat/completions"], **greedy}, server.cpu_seconds()
    reply = CLIENT.post(f"{server.url}/v1/chat/completions", json=body)
    check(reply, str(greedy)[:80])
    assert server.cpu_seconds() - before < 10
    assert CLIENT.post(f"{server.url}/v1/chat/completions", json=GOOD["/v1/chat/completions"]).status_code == 200


def test_templates_of_clients(server: LiveServer) -> None:
    for template in ("{% for %}", "{{ 1 / 0 }}", "{{ ''.__class__ }}", "", "{{ messages", "{{ range(10**9) | list }}"):
        body = {**GOOD["/v1/chat/completions"], "chat_template": template}
        check(web.post(f"{server.url}/v1/chat/completions", json=body), template)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"rubbish\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=range(7),
)
def test_broken_http(server: LiveServer, data: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=web.PATIENCE) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while more := sock.recv(4096):
                answer += more
        except ConnectionResetError:
            pass
    assert b" 5" not in answer.split(b"\r\n")[0]
    assert web.get(f"{server.url}/ready").status_code == 200


@schemathesis.hook
def before_call(context: Any, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Send no deadlines: a 504 is what they ask for."""
    if isinstance(case.body, dict):
        case.body.pop("timeout", None)


# Rules between fields and the model's limits are not in the description: a body that fits it may still be refused.
NOT_CHECKED = [schemathesis.checks.positive_data_acceptance]


@pytest.mark.slow
def test_schemathesis_finds_nothing_in_any_phase(server: LiveServer, tmp_path: Path) -> None:
    command = [Path(sys.executable).parent / "schemathesis", "run", f"{server.url}/openapi.json"]
    command += ["--max-examples=50", "--no-color"]
    if PROFILE != "soak":
        command.append("--seed=1")  # the same examples in every run, as in all tests
    command += ["--exclude-checks=" + ",".join(check.__name__ for check in NOT_CHECKED)]
    hooks = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.e2e.test_fuzz", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=hooks, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:]


def operations(server: LiveServer) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


def try_operations(server: LiveServer, found: list[Any], num_examples: int) -> None:
    examples = settings(
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        database=None,
        derandomize=PROFILE != "soak",
    )
    for operation in found:

        @given(case=operation.as_strategy())
        @examples
        def try_it(case: Any) -> None:
            reply = case.call(timeout=web.PATIENCE)
            case.validate_response(reply, excluded_checks=NOT_CHECKED)

        try_it()
    assert web.get(f"{server.url}/ready").status_code == 200


def test_every_route_answers_as_described(server: LiveServer) -> None:
    found = operations(server)
    assert len(found) > 15
    try_operations(server, found, num_examples=2)


PARTS = 10  # of all routes: each part is a test of its own, so that none takes long and several run at once


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_route_answers_many_requests_as_described(server: LiveServer, part: int) -> None:
    try_operations(server, operations(server)[part::PARTS], num_examples=2000 if PROFILE == "soak" else 100)
