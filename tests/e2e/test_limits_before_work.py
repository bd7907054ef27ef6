"""Requests that ask for much work, or for work of the wrong kind, are refused before it is done; deadlines hold even if
the engine hangs; fields of other interfaces are taken as vLLM takes them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvasir.frontend.text.tokenizer import Tokenizer
from tests import web
from tests.server_process import LiveServer, echoed_ids, until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(starter_model: Path) -> Iterator[LiveServer]:
    settings = {"max_logprob_memory": 256 * MIB}
    with LiveServer.fake(starter_model, executor="tests.scoring_echo:scoring_echo", server=settings) as found:
        found.wait_until_ready()
        assert web.post(f"{found.url}/v1/chat/completions", json=CHAT).status_code == 200
        yield found


class Peak:
    """The greatest memory of a process, counted anew from here."""

    def __init__(self, server: LiveServer) -> None:
        self.path = Path(f"/proc/{server.process.pid}")
        (self.path / "clear_refs").write_text("5")
        self.before = psutil.Process(server.process.pid).memory_info().rss

    def grown(self) -> int:
        line = next(line for line in (self.path / "status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 - self.before


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {**CHAT, **fields}


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "Hi", "max_tokens": 2, **fields}


def message(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def calls(arguments: str, number: int = 1) -> tuple[str, dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "b", "arguments": arguments}}
    return chat(messages=[{"role": "assistant", "tool_calls": [call] * number}])


def items(item: dict[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [item] * number, "max_output_tokens": 2}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


ATTACKS: dict[str, tuple[tuple[str, dict[str, Any]], int]] = {  # the request, and its status
    "numbers as content": (chat(messages=message([1] * MIB)), 400),
    "numbers as stop strings": (chat(stop=[1] * MIB), 400),
    "stop strings": (chat(stop=["a"] * MIB), 400),
    "numbers as messages": (chat(messages=[1] * MIB), 400),
    "numbers as tools": (chat(tools=[1] * MIB), 400),
    "wrong biases": (chat(logit_bias={str(i): "x" for i in range(100_000)}), 400),
    "a prompt of mixed types": (text(prompt=[*[1] * MIB, "a"]), 400),
    "prompts of mixed types": (text(prompt=[*[[1]] * 50_000, "a"]), 400),
    "many prompts": (text(prompt=["a"] * 60_000), 400),
    "many prompts of ids": (text(prompt=[[1]] * 60_000), 400),
    "many completions": (text(prompt=["a" * 1000] * 4000, n=100), 400),
    "many variables": (chat(chat_template_kwargs={f"v{i}": 1 for i in range(500_000)}), 400),
    "deep variables": (chat(chat_template_kwargs=nested(900)), 400),
    "a long key": (chat(logit_bias={"9" * 5000: 1}), 400),
    "a long name": (chat(**{"x" * MIB: 1}), 200),
    "many names": (chat(**{f"x{i}": 1 for i in range(200_000)}), 200),
    "too many names": (chat(**{f"x{i}": 1 for i in range(300_000)}), 400),
    "a message of many entries": (chat(messages=[{**message("Hi")[0], **{f"x{i}": 1 for i in range(300_000)}}]), 400),
    "many messages": (chat(messages=message("a") * 60_000), 400),
    "many parts": (chat(messages=message([{"type": "text", "text": "a"}] * 40_000)), 400),
    "long arguments": (calls('{"a":[' + "[]," * (4 * MIB) + "[]]}"), 400),
    "arguments of many names": (calls("{" + ",".join(f'"{i}":1' for i in range(MIB)) + "}"), 400),
    "arguments of many numbers": (calls("[" + "1," * (4 * MIB) + "1]"), 400),
    "arguments of many calls": (calls("[" + "[]," * 30_000 + "[]]", 100), 400),
    "deep arguments": (calls("[" * 900 + "]" * 900), 400),
    "a long schema in a text": (chat(guided_json='{"a":[' + "[]," * (4 * MIB) + "[]]}"), 400),
    "a long tag in a text": (chat(structural_tag='{"a":[' + "[]," * (4 * MIB) + "[]]}"), 400),
    "many calls in a row": (items(dict(type="function_call", call_id="a", name="b", arguments="{}"), 16_000), 400),
    "many items": (items({"role": "user", "content": "a"}, 60_000), 400),
    "a grammar that cannot be followed": (
        chat(guided_grammar="start: " + " | ".join(f'"a{i}"' for i in range(12_000))),
        400,
    ),
    "biases of many completions": (text(logit_bias={str(i): 1 for i in range(40_000)}, n=1024, temperature=1), 400),
    "stop strings of many completions": (text(stop=["x" * 1000] * 64, n=1024, temperature=1), 400),
    "many conversations": (("/v1/chat/completions/batch", {"messages": [message("Hi")] * 20_000}), 400),
    "copies of a prompt's log-probabilities": (text(prompt=[5] * 2000, prompt_logprobs=20, n=128, temperature=1), 400),
    "copies of an echo's log-probabilities": (
        text(prompt=[5] * 2000, echo=True, logprobs=5, n=128, temperature=1),
        400,
    ),
    "copies of a prompt's tokens": (text(prompt=[5] * 2000, return_token_ids=True, n=4096, temperature=1), 400),
    "copies of an echo": (
        chat(
            messages=message("one two " * (1 << 17)),
            truncate_prompt_tokens=100,
            echo=True,
            add_generation_prompt=False,
            n=128,
            temperature=1,
        ),
        400,
    ),
    "a long text": (text(prompt="1" * (10 * MIB)), 400),
    "a long text to truncate": (text(prompt="1" * (10 * MIB), truncate_prompt_tokens=100), 413),
    "long words to truncate": (text(prompt="one two " * MIB, truncate_prompt_tokens=100, temperature=0), 200),
    "a long conversation to truncate": (chat(messages=message("one two " * MIB), truncate_prompt_tokens=100), 200),
}


QUICK = {"numbers as content", "many prompts", "deep variables", "a long key", "a long text to truncate", "a long name"}
QUICK |= {"biases of many completions", "many conversations"}
QUICK |= {"copies of a prompt's log-probabilities", "copies of an echo"}
QUICK |= {"long arguments", "arguments of many calls", "many calls in a row", "a grammar that cannot be followed"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ATTACKS]
)
def test_work_is_refused_before_it_is_done(server: LiveServer, name: str) -> None:
    (path, body), status = ATTACKS[name]
    data = json.dumps(body).encode()
    peak, before = Peak(server), server.cpu_seconds()
    reply = web.post(server.url + path, content=data, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text[:300]
    assert len(reply.text) < 1000 and "Traceback" not in server.log
    assert server.cpu_seconds() - before < 2, "not even a tenth of what it took"
    assert peak.grown() < 16 * len(data) + 64 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_running_requests_are_bounded(server: LiveServer, stream: bool) -> None:
    """This server keeps a million of them, and none of those that were streamed. Nobody knows before how many a request
    will have."""
    body = {"prompt": [5] * 10, "logprobs": 20, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    peak = Peak(server)
    reply = web.post(f"{server.url}/v1/completions", json={**body, "n": 128, "temperature": 1})
    assert reply.status_code == (200 if stream else 503)
    assert reply.text.endswith("data: [DONE]\n\n") if stream else "ask for fewer of each token" in reply.text
    assert peak.grown() < 512 * MIB and "Traceback" not in server.log
    ok = web.post(f"{server.url}/v1/completions", json={**body, "n": 2, "max_tokens": 100, "temperature": 1})
    assert ok.status_code == 200


@pytest.mark.slow
def test_replies_that_nobody_reads_take_little_memory(server: LiveServer) -> None:
    """A short request may ask for megabytes that are stored, again and again."""
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 2000, "ignore_eos": True, "temperature": 1}
    body |= {"stream": True, "background": True, "include": ["message.output_text.logprobs"], "top_logprobs": 20}
    events = web.post(f"{server.url}/v1/responses", json=body).text
    found = re.search(r'"id":"(resp_\w+)"', events)
    assert found is not None and len(events) > 8 * MIB
    paths = [f"/v1/responses/{found.group(1)}{query}" for query in ("?stream=true", "")]
    for path in paths:
        whole, peak, socks = len(web.get(server.url + path).content), Peak(server), []
        for _ in range(100):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            socks.append(sock)
        time.sleep(2)
        assert web.get(f"{server.url}/v1/models").status_code == 200
        assert peak.grown() < min(100 * whole, 400 * MIB), path
        for sock in socks:
            sock.close()
    until(lambda: web.get(server.url + paths[1]).status_code == 200, "the memory is given back", server)


def test_others_are_served_meanwhile(server: LiveServer) -> None:
    """A text of many tokens is tokenized for seconds."""
    body = {"prompt": ["1" * 2000] * 1000, "max_tokens": 1, "n": 1, "echo": False}
    slowest = 0.0
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(web.post, f"{server.url}/v1/completions", json={**body, "timeout": 1})
        while not asked.done():
            started = time.monotonic()
            assert web.get(f"{server.url}/v1/models").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
    assert asked.result().status_code in (200, 504) and slowest < 1


# ---------------------------------------------------------------- what vLLM takes


def test_unknown_fields_are_named(server: LiveServer) -> None:
    for stream in (False, True):
        reply = web.post(
            server.url + "/v1/chat/completions", json={**CHAT, "stream": stream, "brand_new": 1, "ünew": 2}
        )
        assert reply.status_code == 200 and reply.headers["x-kvasir-unknown-fields"] == "brand_new, ?new"
        server.wait_for_log(f"{reply.headers['x-request-id']} has unknown fields, which are ignored: brand_new, .new")
    assert "x-kvasir-unknown-fields" not in web.post(server.url + "/v1/chat/completions", json=CHAT).headers
    nested = web.post(server.url + "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": {"new": 1}})
    assert nested.status_code == 400, "only those at the top are ignored"
    with web.connect(server.ws_url) as socket:
        socket.send(json.dumps({**CHAT, "brand_new": 1}))
        assert json.loads(socket.recv(web.PATIENCE))["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    "given",
    [{"logprobs": "true"}, {"max_tokens": 2.0}, {"n": 1.0}, {"stop": ""}, {"stream": "false"}, {"temperature": "0.5"}],
    ids=str,
)
def test_values_as_vllm_takes_them(server: LiveServer, given: dict[str, Any]) -> None:
    reply = web.post(server.url + "/v1/chat/completions", json={**CHAT, **given})
    assert reply.status_code == 200, reply.text
    assert (reply.json()["choices"][0]["logprobs"] is not None) == ("logprobs" in given)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["ids", "text"])
def test_an_echo_has_special_tokens_and_true_offsets(
    server: LiveServer, tokenizer: Tokenizer, given: str, stream: bool
) -> None:
    words = "<|im_start|>Wie süß: 🦊 日本<|im_end|> ok"
    ids = tokenizer.encode(words)
    body = {
        "prompt": ids if given == "ids" else words,
        "max_tokens": 8,
        "echo": True,
        "logprobs": 1,
        "ignore_eos": True,
    }
    body |= {"stream": stream, "skip_special_tokens": False}
    reply = web.post(f"{server.url}/v1/completions", json=body)
    lines = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [piece["choices"][0] for piece in (lines if stream else [reply.json()])]
    whole = "".join(choice["text"] for choice in choices)
    assert whole.startswith(words)
    offsets = [each for choice in choices for each in (choice["logprobs"] or {"text_offset": []})["text_offset"]]
    every = [*ids, *echoed_ids(ids, 8)]
    assert len(offsets) == len(every) and offsets == sorted(offsets)
    for index, offset in enumerate(offsets):
        before = tokenizer.decode(every[:index]).rstrip("\ufffd")  # without the bytes of half a character
        assert whole[:offset].rstrip("\ufffd") == before, index


# ---------------------------------------------------------------- an engine that hangs


@pytest.fixture(scope="module")
def fragile(starter_model: Path) -> Iterator[LiveServer]:
    options = {"health_stall_timeout": 2.5, "request_timeout": 1.0}
    with LiveServer.fake(starter_model, engine={"stall_timeout": 1.0}, server=options) as server:
        yield server.wait_until_ready()


@contextmanager
def stopped(server: LiveServer) -> Iterator[None]:
    pid = server.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def timed(method: str, url: str, **body: Any) -> tuple[httpx.Response, float]:
    started = time.monotonic()
    reply = web.request(method, url, **({"json": body} if body else {}))
    return reply, time.monotonic() - started


def test_deadlines_and_probes_of_an_engine_that_hangs(fragile: LiveServer) -> None:
    """Nothing runs when it is stopped, so pings alone can tell."""
    url, prompt = fragile.url, {"prompt": "Hi", "max_tokens": 3}
    with stopped(fragile), ThreadPoolExecutor(8) as pool:
        asked = {
            "timeout": pool.submit(timed, "POST", f"{url}/v1/completions", **prompt, timeout=0.5),
            "stream": pool.submit(timed, "POST", f"{url}/v1/completions", **prompt, timeout=0.5, stream=True),
            "several": pool.submit(timed, "POST", f"{url}/v1/completions", max_tokens=3, prompt=["a", "b"], n=2),
            "beams": pool.submit(timed, "POST", f"{url}/v1/completions", **prompt, n=2, use_beam_search=True),
            "setting": pool.submit(timed, "POST", f"{url}/v1/chat/completions", **CHAT),
        }
        for name, future in asked.items():
            reply, took = future.result()
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout"), (name, reply.text)
            assert 0.4 < took < 20, name
        for path, setting in (("/ready", "; stall_timeout=1 "), ("/health", "; health_stall_timeout=2.5 ")):
            until(lambda: web.get(url + path).status_code == 503, f"{path} says so", fragile)  # noqa: B023
            said = web.get(url + path).json()
            assert said["status"] == "stalled" and setting in said["reason"]
        reply, took = timed("GET", f"{url}/metrics")
        assert reply.status_code == 200 and took < 2, "it shows the last figures at once"
    until(lambda: web.get(f"{url}/ready").status_code == 200, "it is ready again", fragile, 20)
    assert web.get(f"{url}/health").status_code == 200
    assert web.post(f"{url}/v1/completions", json=prompt).status_code == 200


@pytest.mark.slow
def test_no_route_waits_for_an_engine_that_hangs(fragile: LiveServer) -> None:
    url = fragile.url
    with stopped(fragile), ThreadPoolExecutor(8) as pool:
        routes = [("GET", "/engine/state"), ("POST", "/reset_prefix_cache"), ("GET", "/metrics"), ("GET", "/load")]
        asked = {path: pool.submit(timed, method, url + path) for method, path in routes}
        for path, future in asked.items():
            reply, took = future.result()
            assert took < 8, path
            assert reply.status_code == (200 if path in ("/metrics", "/load") else 503), (path, reply.text[:200])
        with web.connect(url.replace("http", "ws") + "/engine/feed") as socket, pytest.raises(Exception, match="1013"):
            socket.recv(20)
    until(lambda: web.get(f"{url}/engine/state").status_code == 200, "it answers again", fragile, 20)
