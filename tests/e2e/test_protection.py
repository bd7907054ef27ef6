"""Who may ask, how much, how long: 401, 413, 429 and time limits, each at a live server."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed

from kvasir.server.routes.models import GUARDED
from tests import web
from tests.server_process import LiveServer, until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
SLOW = {"make": "kvasir.executor.fake:delayed", "delay": 0.01, "token": 42}
SLOWER = {**SLOW, "delay": 0.03}  # the longest request takes a minute


@pytest.fixture(scope="module")
def guarded(starter_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A slow server with keys and small limits."""
    keys = {
        "keys": [
            {"name": "alice", "key": "sk-alice", "weight": 4},
            {"name": "bob", "key": "sk-bob", "requests_per_minute": 2},
            {"name": "carol", "key": "sk-carol", "tokens_per_minute": 40},
            {"name": "dave", "key": "sk-dave", "max_concurrent": 1},
            {"name": "erin", "key": "sk-erin", "tokens_per_minute": 300},
            {"name": "frank", "key": "sk-frank", "tokens_per_minute": 1000},
        ]
    }
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(json.dumps(keys))
    file.chmod(0o600)
    options = {
        "api_key": ["sk-first", "sk-second"],
        "api_key_file": str(file),
        "max_request_bytes": 10_000,
        "max_prompt_tokens": 200,
        "allowed_origins": ["https://app.example"],
        "max_choices": 8,
    }
    with LiveServer.fake(starter_model, server=options, executor=SLOW) as server:
        yield server.wait_until_ready()


def post(
    server: LiveServer, key: str | None = "sk-first", path: str = "/v1/chat/completions", **body: Any
) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return web.post(server.url + path, json={**CHAT, **body}, headers=headers)


# ---------------------------------------------------------------- 401


@pytest.mark.parametrize("key", [None, "sk-wrong", "sk-firs", "sk-first1", "ключ"])
def test_wrong_keys_get_401(guarded: LiveServer, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    reply = web.post(f"{guarded.url}/v1/chat/completions", json=CHAT, headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


def test_right_keys(guarded: LiveServer) -> None:
    for key in ("sk-first", "sk-second", "sk-alice"):
        assert post(guarded, key).status_code == 200
    reply = web.post(f"{guarded.url}/v1/chat/completions", json=CHAT, headers={"x-api-key": "sk-alice"})
    assert reply.status_code == 200, "Anthropic's clients send it so"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-no").models.list()
    guarded.wait_for_log("ended: length.* key alice")


def test_every_route_is_guarded_but_the_probes(guarded: LiveServer) -> None:
    key = {"Authorization": "Bearer sk-first"}
    paths = web.get(f"{guarded.url}/openapi.json", headers=key).json()["paths"]
    assert len(paths) > 15
    for path, methods in {**paths, "/openapi.json": {"get": 0}, "/nothing": {"get": 0}}.items():
        for method in methods:
            status = web.request(method, guarded.url + path, content=b"{}").status_code
            refused = 403 if path in GUARDED else 401  # adapters are not loaded by request without a key for that
            assert (status == refused) == (path not in ("/health", "/ready", "/ping")), (path, status)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxy_may_put_a_path_before_all_others(locked_server: LiveServer, prefix: str) -> None:
    """It may also remove that path again before it asks the server."""
    url, key = locked_server.url + prefix, {"Authorization": "Bearer sesame"}
    for path in ("/health", "/ready", "/ping", "/", "/engine", "/docs", "/pages/base.css"):
        assert web.get(url + path, follow_redirects=True).status_code == 200, path
    assert web.get(f"{url}/v1/models").status_code == 401
    assert web.get(f"{url}/v1/models", headers=key).json()["data"][0]["id"] == "fake"
    assert web.post(f"{url}/v1/chat/completions", json=CHAT, headers=key).status_code == 200
    assert web.get(f"{url}/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]
    with web.connect(url.replace("http", "ws") + "/engine/feed", additional_headers=key) as socket:
        assert "steps" in json.loads(socket.recv())


def test_a_websocket_needs_a_key_too(guarded: LiveServer) -> None:
    with web.connect(guarded.ws_url) as socket, pytest.raises(ConnectionClosed) as caught:
        socket.recv(web.PATIENCE)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 4001
    with web.connect(guarded.ws_url, additional_headers={"Authorization": "Bearer sk-first"}) as socket:
        socket.send(json.dumps(CHAT))
        assert json.loads(socket.recv(web.PATIENCE))["object"] == "chat.completion.chunk"


def test_stored_responses_are_their_keys_own(guarded: LiveServer) -> None:
    mine = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-alice")
    response = mine.responses.create(model="fake", input="secret", max_output_tokens=2)
    assert mine.responses.retrieve(response.id).id == response.id
    other = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-first")
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        other.responses.create(model="fake", input="go on", previous_response_id=response.id)


# ---------------------------------------------------------------- 429


def test_requests_per_minute(guarded: LiveServer) -> None:
    assert [post(guarded, "sk-bob").status_code for _ in range(3)] == [200, 200, 429]
    reply = post(guarded, "sk-bob")
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(reply.headers["retry-after"]) <= 30
    assert post(guarded, "sk-alice").status_code == 200, "one key's limit is not another's"
    assert (
        "kvasir:request_errors_total"
        in web.get(f"{guarded.url}/metrics", headers={"Authorization": "Bearer sk-first"}).text
    )


def test_tokens_per_minute(guarded: LiveServer) -> None:
    first = post(guarded, "sk-carol", max_tokens=20, ignore_eos=True)
    assert first.status_code == 200
    assert first.json()["usage"]["total_tokens"] > 40
    assert post(guarded, "sk-carol").status_code == 429


def test_tokens_that_are_not_returned_count_too(guarded: LiveServer) -> None:
    reply = post(guarded, "sk-erin", best_of=8, max_tokens=50, ignore_eos=True)
    assert reply.json()["usage"]["completion_tokens"] == 50, "as OpenAI counts"
    guarded.wait_for_log("ended: length, [0-9]+ tokens in, 400 out.* key erin")
    assert post(guarded, "sk-erin").status_code == 429


def test_who_leaves_early_is_charged_what_was_asked_for(guarded: LiveServer) -> None:
    async def ask_and_leave() -> None:
        task = asyncio.create_task(complete(guarded, "sk-frank", max_tokens=1900))
        await loaded(guarded, "sk-first", running=1)
        task.cancel()

    asyncio.run(ask_and_leave())
    guarded.wait_for_log(r"ended: disconnect, \d+ tokens in, [\d.]+ s, key frank")
    refused = post(guarded, "sk-frank")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 30, "far more than its prompt"


def test_requests_at_once(guarded: LiveServer) -> None:
    body = {**CHAT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer sk-dave"}
    with web.stream("POST", f"{guarded.url}/v1/chat/completions", json=body, headers=headers) as running:
        lines = running.iter_lines()  # closes the stream when it is forgotten
        next(lines)
        assert post(guarded, "sk-dave").status_code == 429
    until(lambda: post(guarded, "sk-dave").status_code == 200, "a request that ended counts no more", guarded)


# ---------------------------------------------------------------- 413


def test_bodies_and_prompts_have_limits(guarded: LiveServer) -> None:
    reply = post(guarded, messages=[{"role": "user", "content": "x" * 20_000}])
    assert reply.status_code == 413 and "--max-request-bytes" in reply.json()["error"]["message"]

    def pieces() -> Iterator[bytes]:  # a body whose length is not told
        yield b'{"messages": [{"role": "user", "content": "'
        for _ in range(20):
            yield b"x" * 1000

    headers = {"Authorization": "Bearer sk-first", "Content-Type": "application/json"}
    url = f"{guarded.url}/v1/chat/completions"
    assert web.post(url, content=pieces(), headers=headers).status_code == 413
    reply = post(guarded, messages=[{"role": "user", "content": "word " * 400}])
    assert reply.status_code == 413 and "--max-prompt-tokens" in reply.json()["error"]["message"]
    for many, param in (({"n": 9}, "n"), ({"best_of": 9}, "best_of"), ({"prompt": ["a"] * 5, "n": 2}, "prompt")):
        body = {"prompt": "a", "max_tokens": 1, **many}
        reply = web.post(f"{guarded.url}/v1/completions", json=body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    reply = post(guarded, logprobs=True, logprob_token_ids=[1] * 1025)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprob_token_ids")


# ---------------------------------------------------------------- time


def test_a_request_may_have_a_timeout(guarded: LiveServer) -> None:
    reply = post(guarded, max_tokens=1900, ignore_eos=True, timeout=3)  # far more than the first token takes
    body = reply.json()
    assert reply.status_code == 200 and body["choices"][0]["finish_reason"] == "timeout"
    assert 0 < body["usage"]["completion_tokens"] < 2000
    assert post(guarded, timeout=-1).status_code == 400
    reply = post(guarded, path="/v1/messages", model="fake", max_tokens=2000, timeout=0.3)
    assert (reply.status_code, reply.json()["error"]["type"]) == (504, "timeout_error")


# ---------------------------------------------------------------- browsers, ids, TLS


def test_cors(guarded: LiveServer) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = web.options(f"{guarded.url}/v1/chat/completions", headers={"Origin": "https://app.example", **ask})
    assert allowed.status_code == 200, "a preflight has no key"
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    refused = web.options(f"{guarded.url}/v1/chat/completions", headers={"Origin": "https://evil.example", **ask})
    assert "access-control-allow-origin" not in refused.headers


def test_request_ids(guarded: LiveServer) -> None:
    url, key = f"{guarded.url}/v1/models", {"Authorization": "Bearer sk-first"}
    assert web.get(url, headers={**key, "X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(web.get(url, headers=key).headers["x-request-id"]) == 32
    assert web.get(f"{guarded.url}/nothing").headers["x-request-id"], "errors have one, too"
    for bad in ("with space", "x" * 200):
        assert web.get(url, headers={**key, "X-Request-Id": bad}).status_code == 400
    post(guarded)
    guarded.wait_for_log("[0-9a-f]{32} arrived: /v1/chat/completions, [0-9]+ prompt tokens, key key-1")


@pytest.mark.slow
def test_a_unix_socket(starter_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with LiveServer.fake(starter_model, server={"uds": str(path)}) as server:
        server.wait_for_log("ready after")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://x/v1/models").status_code == 200
            assert client.head("http://x/health").status_code == 200
        server.process.terminate()
        assert server.wait() == 0 and not path.exists()


def test_tls(starter_model: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    options = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    with LiveServer.fake(starter_model, server=options) as server:
        assert server.url.startswith("https://")
        server.wait_until_ready()
        context = ssl.create_default_context(cafile=str(certificate))
        assert web.get(f"{server.url}/v1/models", verify=context).status_code == 200
        assert web.get(f"{server.url}/v1/models", verify=context, headers={"A": "b" * 9000}).status_code == 431
        large = web.post(f"{server.url}/v1/completions", verify=context, content=b"x" * (17 << 20))
        assert large.status_code == 413, "it is read before the connection ends"


# ---------------------------------------------------------------- a full queue


async def complete(server: LiveServer, key: str = "any", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=web.PATIENCE, headers=headers) as client:
        return await client.post(
            f"{server.url}/v1/completions", json={"prompt": "Hi", "ignore_eos": True, "max_tokens": 2, **body}
        )


@asynccontextmanager
async def taken(server: LiveServer, rows: int, key: str = "any") -> AsyncIterator[None]:
    """So many rows run requests that do not end before this block does."""
    tasks = [asyncio.create_task(complete(server, key, max_tokens=1900)) for _ in range(rows)]
    await loaded(server, key, running=rows)
    yield
    for task in tasks:
        task.cancel()


async def loaded(server: LiveServer, key: str, **expected: int) -> None:
    """Until /load says so."""
    async with httpx.AsyncClient(timeout=web.PATIENCE, headers={"Authorization": f"Bearer {key}"}) as client:
        end = time.monotonic() + web.PATIENCE
        while not expected.items() <= (found := (await client.get(f"{server.url}/load")).json()).items():
            assert time.monotonic() < end, f"{expected} is not reached: {found}"
            await asyncio.sleep(0.01)


def test_a_full_queue_answers_429(starter_model: Path) -> None:
    async def go(server: LiveServer) -> None:
        async with taken(server, 2):
            waiting = [asyncio.create_task(complete(server, stream=i % 2 == 0)) for i in range(3)]
            await loaded(server, "any", waiting=3)
            for stream in (True, False):
                refused = await complete(server, stream=stream)
                assert refused.status_code == 429, "with a status, streaming or not"
                assert refused.json()["error"]["code"] == "queue_full"
                assert int(refused.headers["retry-after"]) >= 1
            assert server.metric("kvasir:request_errors_total", cause="queue_full") == 2
        for task in waiting:
            assert (await task).status_code == 200, "those that were let in are served"

    engine = {"max_num_seqs": 2, "max_queued_requests": 3}
    with LiveServer.fake(starter_model, engine=engine, executor=SLOWER) as server:
        asyncio.run(go(server.wait_until_ready()))


@pytest.mark.slow
def test_too_many_queued_tokens_answer_429(starter_model: Path) -> None:
    async def go(server: LiveServer) -> None:
        async with taken(server, 1):
            waiting = asyncio.create_task(complete(server, prompt=[5] * 40))
            await loaded(server, "any", waiting=1)
            refused = await complete(server, prompt=[5] * 40)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert "max_queued_tokens=50" in refused.json()["error"]["message"] and refused.headers["retry-after"]
            short = asyncio.create_task(complete(server, prompt=[5] * 10))
            await loaded(server, "any", waiting=2)
        for task in (waiting, short):
            assert (await task).status_code == 200

    engine = {"max_num_seqs": 1, "max_queued_tokens": 50}
    with LiveServer.fake(starter_model, engine=engine, executor=SLOWER) as server:
        asyncio.run(go(server.wait_until_ready()))


def test_the_servers_time_limit_answers_504(starter_model: Path, tmp_path: Path) -> None:
    """The engine hangs in the step of one request; the next one's time is over before it has run at all."""
    gate = tmp_path / "gate"

    async def go(server: LiveServer) -> list[httpx.Response]:
        gate.touch()
        asked = []
        for number in range(2):
            asked.append(asyncio.create_task(complete(server, timeout=60)))
            await asyncio.to_thread(server.wait_for_log, "(?s)" + "arrived: /v1/completions.*" * (number + 1))
        late = time.monotonic() + 0.3
        await asyncio.to_thread(until, lambda: time.monotonic() > late, "time passes")
        gate.unlink()
        return list(await asyncio.gather(*asked))

    server = LiveServer.fake(
        starter_model,
        engine={"max_num_seqs": 1},
        server={"request_timeout": 0.2},
        executor="tests.e2e.test_lifecycle:stuck",
        environment={"KVASIR_TEST_GATE": str(gate)},
    )
    with server:
        _, second = asyncio.run(go(server.wait_until_ready()))
    assert (second.status_code, second.json()["error"]["type"]) == (504, "timeout_error")
    assert second.json()["error"]["message"] == "The request was ended: its deadline of 0.2 s passed while it waited."


def test_weights_of_keys_share_the_engine(starter_model: Path, tmp_path: Path) -> None:
    """Two keys with as many requests: the one of four times the weight is served first, mostly."""
    file = tmp_path / "keys.yaml"
    entries = [{"name": name, "key": name, "weight": weight} for name, weight in (("heavy", 4), ("light", 1))]
    file.write_text(json.dumps({"keys": entries}))

    async def go(server: LiveServer) -> None:
        async with taken(server, 1, "light"):
            tasks = [asyncio.create_task(complete(server, key)) for key in ["light"] * 10 + ["heavy"] * 10]
            await loaded(server, "light", waiting=20)
        assert {(await task).status_code for task in tasks} == {200}

    engine = {"max_num_seqs": 1, "scheduling_policy": "wrr"}
    with LiveServer.fake(starter_model, engine=engine, server={"api_key_file": str(file)}, executor=SLOWER) as server:
        asyncio.run(go(server.wait_until_ready()))
        ended = r" ended: length, .* key (\w+)"
        until(lambda: len(re.findall(ended, server.log)) == 20, "the last line of each", server)
        served = re.findall(ended, server.log)  # in the engine's order, which clients may hear in another
    assert served[:10].count("heavy") >= 7, served


def test_a_deadline_that_cannot_be_met_is_told_at_once_and_why(starter_model: Path) -> None:
    engine = {"scheduling_policy": "deadline"}
    with LiveServer.fake(starter_model, engine=engine, executor=SLOW) as server:
        server.wait_until_ready()
        assert post(server, max_tokens=60).status_code == 200  # by which the engine learns how fast it is
        reply = post(server, max_tokens=1900, min_tokens=1900, timeout=8)  # of at least 19 s
        assert reply.status_code == 504
        assert re.fullmatch(
            r"The request was ended: its deadline is [\d.]+ s away and it needs at least [\d.]+ s\.",
            reply.json()["error"]["message"],
        )
