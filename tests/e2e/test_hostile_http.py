"""A server of 2 GiB among strangers: it stays alive, other users are served within a second, its memory comes back.

To add an attack, write a function that takes a `Target` and mark it `@attack`; with `slow=True` it is among the long
tests. It runs in a thread until it returns, beside a user with a key. What each stranger is told is tested below.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import resource
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests import web
from tests.server_process import LiveServer, until

KEY = "sesame"
MIB = 1 << 20
MEMORY = 2 << 30
ROOM = 96 * MIB  # that the process may keep after an attack: Python and malloc do not give everything back
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
SHORT = {"header_timeout": 2.0, "body_timeout": 2.0, "send_timeout": 2.0, "keep_alive_timeout": 2.0}


@dataclass
class Target:
    """The server under attack, and ways to be rude to it."""

    server: LiveServer

    def connect(self) -> socket.socket:
        host, _, port = self.server.url.removeprefix("http://").rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=5)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return sock

    def head(self, *lines: str, path: str = "/v1/chat/completions", method: str = "POST", key: bool = True) -> bytes:
        named = ["Host: a", *([f"Authorization: Bearer {KEY}"] if key else []), *lines]
        return f"{method} {path} HTTP/1.1\r\n{''.join(f'{line}{chr(13)}{chr(10)}' for line in named)}".encode()

    def pour(self, start: bytes, more: bytes, seconds: float = 1.0, connections: int = 4) -> None:
        """Send without end and without reading, until nobody takes it any more or the time is over."""
        socks = [self.connect() for _ in range(connections)]
        end = time.monotonic() + seconds
        try:
            for sock in socks:
                sock.sendall(start)
                sock.settimeout(0.05)
            while socks and time.monotonic() < end:
                for sock in list(socks):
                    try:
                        sock.send(more)
                    except TimeoutError:
                        continue
                    except OSError:
                        sock.close()
                        socks.remove(sock)
        finally:
            for sock in socks:
                sock.close()

    def websocket(self, key: str = KEY, *lines: str) -> socket.socket:
        """An open WebSocket, without a library that would be polite."""
        sock = self.connect()
        handshake = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng=="]
        handshake += ["Sec-WebSocket-Version: 13", f"Authorization: Bearer {key}", *lines]
        sock.sendall(self.head(*handshake, method="GET", key=False) + b"\r\n")
        return sock

    def pour_frames(self, frames: bytes, seconds: float = 1.0, connections: int = 4, key: str = KEY) -> None:
        end, socks = time.monotonic() + seconds, []
        for _ in range(connections):
            sock = self.websocket(key)
            sock.recv(4096)
            sock.settimeout(0.05)
            socks.append(sock)
        while socks and time.monotonic() < end:
            for sock in list(socks):
                try:
                    sock.send(frames)
                except TimeoutError:
                    continue
                except OSError:
                    sock.close()
                    socks.remove(sock)
        for sock in socks:
            sock.close()

    def post(self, path: str, *bodies: bytes, times: int = 1, statuses: tuple[int, ...] = (400,)) -> None:
        """Send all bodies at once, so many times, and read the answers."""

        def send(body: bytes) -> None:
            for _ in range(times):
                headers = {**bearer(), "Content-Type": "application/json"}
                reply = httpx.post(self.server.url + path, content=body, headers=headers, timeout=120)
                if reply.status_code not in (*statuses, 503):  # there may be no memory for so many bodies
                    FAILURES.append(f"{path}: {reply.status_code} {reply.text[:300]} for {body[:80]!r}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, bodies))


FAILURES: list[str] = []  # answers that attackers should not have got
Attack = Callable[[Target], None]
ATTACKS: list[Any] = []


def attack(found: Attack | None = None, *, slow: bool = False) -> Any:
    def add(function: Attack) -> Attack:
        ATTACKS.append(pytest.param(function, id=function.__name__, marks=[pytest.mark.slow] if slow else []))
        return function

    return add if found is None else add(found)


def frame(opcode: int, payload: bytes = b"", fin: bool = True) -> bytes:
    """A WebSocket frame of a client, masked with zeros."""
    first = (0x80 if fin else 0) | opcode
    size = len(payload)
    length = struct.pack("!B", 0x80 | size) if size < 126 else struct.pack("!BQ", 0xFF, size)
    return bytes([first]) + length + bytes(4) + payload


# ---------------------------------------------------------------- attacks


@attack
def endless_headers(target: Target) -> None:
    target.pour(b"GET / HTTP/1.1\r\n", b"A:b\r\n" * 10_000)


@attack(slow=True)
def endless_header(target: Target) -> None:
    target.pour(b"GET / HTTP/1.1\r\nA: ", b"b" * 65536)


@attack(slow=True)
def endless_header_name(target: Target) -> None:
    target.pour(b"GET / HTTP/1.1\r\n", b"b" * 65536)


@attack(slow=True)
def endless_url(target: Target) -> None:
    target.pour(b"GET /", b"a" * 65536)


@attack(slow=True)
def endless_empty_lines(target: Target) -> None:
    target.pour(b"", b"\r\n" * 30_000)


@attack(slow=True)
def endless_trailers(target: Target) -> None:
    start = target.head("Transfer-Encoding: chunked", "Content-Type: application/json")
    target.pour(start + b"\r\n2\r\n{}\r\n0\r\n", b"A:b\r\n" * 10_000)


@attack(slow=True)
def endless_chunk_extension(target: Target) -> None:
    target.pour(target.head("Transfer-Encoding: chunked") + b"\r\n2;", b"e" * 65536)


@attack(slow=True)
def endless_tiny_chunks(target: Target) -> None:
    target.pour(target.head("Transfer-Encoding: chunked") + b"\r\n", b"1\r\nx\r\n" * 10_000)


@attack(slow=True)
def endless_body_without_a_key(target: Target) -> None:
    target.pour(target.head(f"Content-Length: {1 << 40}", key=False) + b"\r\n", b"x" * 65536)
    target.pour(target.head("Transfer-Encoding: chunked", key=False) + b"\r\n", b"ffff\r\n" + b"x" * 65535 + b"\r\n")


@attack
def pipelined_requests_nobody_reads(target: Target) -> None:
    target.pour(b"", b"GET /nothing HTTP/1.1\r\n\r\n" * 3000)
    target.pour(b"", (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}") * 1000)


@attack(slow=True)
def pipelined_requests_cut_anywhere(target: Target) -> None:
    """The ends of heads fall between reads, where they are hardest to see."""
    requests = b"GET /nothing HTTP/1.1\r\n\r\n" * 4000
    chance = random.Random(0)
    for _ in range(10):
        with contextlib.suppress(OSError), target.connect() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(0.2)
            at = 0
            while at < len(requests):
                size = chance.randrange(1, 5000)
                sock.sendall(requests[at : at + size])
                at += size


@attack(slow=True)
def half_sent_bodies(target: Target) -> None:
    """With a key, so that the bodies are read. 60 of them would be 900 MiB."""
    start = target.head(f"Content-Length: {16 * MIB}", "Content-Type: application/json") + b"\r\n" + b"x" * 15 * MIB
    socks = []
    for _ in range(60):
        sock = target.connect()
        socks.append(sock)
        with contextlib.suppress(OSError):
            sock.settimeout(1)
            sock.sendall(start)
    for sock in socks:
        sock.close()


@attack(slow=True)
def half_sent_heads(target: Target) -> None:
    socks = [target.connect() for _ in range(500)]
    for sock in socks:
        sock.sendall(b"GET /health HTTP/1.1\r\nA: " + b"b" * 4000)
    time.sleep(1)
    for sock in socks:
        sock.close()


@attack(slow=True)
def handshakes_with_endless_headers(target: Target) -> None:
    start = target.head("Upgrade: websocket", "Connection: Upgrade", method="GET")
    target.pour(start, b"A:b\r\n" * 10_000)


@attack(slow=True)
def empty_fragments(target: Target) -> None:
    target.pour_frames(frame(1, fin=False) + frame(0, fin=False) * 10_000)


@attack
def empty_fragments_with_a_wrong_key(target: Target) -> None:
    target.pour_frames(frame(1, fin=False) + frame(0, fin=False) * 40_000, connections=16, key="wrong")


@attack
def pings_whose_pongs_nobody_reads(target: Target) -> None:
    target.pour_frames(frame(9, b"x" * 125) * 2000, seconds=2, connections=16)
    target.pour_frames(frame(9, b"x" * 125) * 2000, connections=16, key="wrong")


@attack(slow=True)
def messages_after_the_close(target: Target) -> None:
    target.pour_frames(frame(1, b"x" * MIB), key="wrong")


@attack(slow=True)
def half_sent_messages(target: Target) -> None:
    """60 of them would be 900 MiB."""
    socks = []
    for _ in range(60):
        sock = target.websocket()
        sock.recv(4096)
        socks.append(sock)
        with contextlib.suppress(OSError):
            sock.settimeout(1)
            sock.sendall(frame(1, b"x" * 15 * MIB, fin=False))
    for sock in socks:
        sock.close()


@attack(slow=True)
def messages_that_inflate(target: Target) -> None:
    """100 KiB that are 100 MiB when they are inflated."""
    squeeze = zlib.compressobj(wbits=-12)
    raw = frame(1, (squeeze.compress(bytes(100 * MIB)) + squeeze.flush(zlib.Z_SYNC_FLUSH))[:-4])
    for _ in range(10):
        sock = target.websocket(KEY, "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits")
        assert b"permessage-deflate" in sock.recv(4096)
        with contextlib.suppress(OSError):
            sock.sendall(bytes([raw[0] | 0x40]) + raw[1:])
            sock.recv(4096)
        sock.close()


@attack(slow=True)
def answers_nobody_reads(target: Target) -> None:
    """Each answer is larger than what the kernel buffers."""
    body = json.dumps({"prompt": [[5] * 50] * 60, "max_tokens": 1500, "echo": True, "logprobs": 5}).encode()
    request = target.head(f"Content-Length: {len(body)}", "Content-Type: application/json", path="/v1/completions")
    socks = [target.connect() for _ in range(4)]
    for sock in socks:
        sock.sendall(request + b"\r\n" + body)
    time.sleep(8)
    for sock in socks:
        sock.close()


@attack(slow=True)
def random_bytes(target: Target) -> None:
    """Valid requests with errors in them, and noise."""
    chance = random.Random(1)
    body = json.dumps(CHAT).encode()
    good = target.head(f"Content-Length: {len(body)}", "Content-Type: application/json") + b"\r\n" + body
    ping = target.head("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", method="GET") + b"\r\n"
    for _ in range(1500):
        data = bytearray(chance.choice([good, ping + frame(9) * 3, good * 3, chance.randbytes(300)]))
        for _ in range(chance.randrange(4)):
            data[chance.randrange(len(data))] = chance.choice(b"\r\n\0 :aZ\xff09")
        with contextlib.suppress(OSError), target.connect() as sock:
            sock.sendall(bytes(data[: chance.randrange(1, len(data) + 1)]))
            sock.settimeout(0.01)
            sock.recv(4096)


@attack(slow=True)
def many_clients_that_come_and_go(target: Target) -> None:
    for _ in range(5000):
        with contextlib.suppress(OSError), target.connect() as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\n")


def messages(content: bytes) -> bytes:
    return b'{"max_tokens":3,"messages":[{"role":"user","content":' + content + b"}]}"


def wrong_bodies(size: int) -> list[bytes]:
    """Bodies of about this size that are JSON, but of the wrong kind."""
    fields = {
        *(b'"stop":[%b]', b'"tools":[%b]', b'"documents":[%b]', b'"bad_words":[%b]', b'"stop_token_ids":[%b]'),
        *(b'"chat_template_kwargs":{"a":[%b]}', b'"unknown":[%b]', b'"logit_bias":[%b]', b'"stream_options":[%b]'),
    }
    values = (b"1,", b"-9,", b'"a",', b"[],", b"{},", b'{"a":1},', b"[[[]]],", b"null,", b"1e9,")
    made = [messages(b"[" + value * (size // len(value)) + b"1]") for value in values]
    chance = random.Random(size)
    for field in sorted(fields):
        value = chance.choice(values)
        made.append(messages(b'"Hi"')[:-1] + b"," + field % (value * (size // len(value)) + b"1") + b"}")
    made += [
        messages(b"[" * (size // 2) + b"]" * (size // 2)),
        messages(b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6)),
    ]
    names = b",".join(b'"%d":1' % i for i in range(size // 12))
    return [
        *made,
        *(b'{"max_tokens":3,"%b":{%b}}' % (name, names) for name in (b"logit_bias", b"chat_template_kwargs")),
    ]


@attack(slow=True)
def lists_of_wrong_things(target: Target) -> None:
    target.post("/v1/chat/completions", *wrong_bodies(2 * MIB), statuses=(200, 400))


@attack(slow=True)
def long_lists_of_wrong_things(target: Target) -> None:
    target.post("/v1/chat/completions", *wrong_bodies(15 * MIB), statuses=(200, 400))
    target.post("/v1/completions", *(body.replace(b'"messages"', b'"prompt"', 1) for body in wrong_bodies(15 * MIB)))


@attack(slow=True)
def texts_of_many_tokens(target: Target) -> None:
    digits, cut = b"1" * 10_000_000, b'"truncate_prompt_tokens":100'
    target.post("/v1/completions", *[b'{"prompt":"%b",%b}' % (digits, cut)] * 4, statuses=(413,))
    target.post("/v1/completions", *[b'{"prompt":"%b"}' % digits] * 4)
    target.post("/v1/chat/completions", *[messages(b'"%b"' % digits)] * 4)
    several = b",".join([b'"%b"' % (b"1" * 100_000)] * 10)
    body = b'{"max_tokens":1,"truncate_prompt_tokens":1,"prompt":[%b]}' % several
    target.post("/v1/completions", *[body] * 4, statuses=(200,))


@attack(slow=True)
def many_prompts(target: Target) -> None:
    for prompt in (b'"a"', b"[1]", b"[]"):
        for count in (5000, 60_000, 4_000_000):
            body = b'{"prompt":[%b]}' % b",".join([prompt] * count)
            if len(body) < 16 * MIB:
                target.post("/v1/completions", *[body] * 4)


@attack(slow=True)
def what_every_completion_has(target: Target) -> None:
    """Half a megabyte that would be gigabytes, here or in the engine."""
    biases = b",".join(b'"%d":1' % token for token in range(49_000))
    allowed = b",".join(b"%d" % token for token in range(49_000))
    stops = b",".join([b'"%b"' % (b"x" * 1000)] * 64)
    choices = b",".join(b'"abc%d"' % number for number in range(5000))
    for fields in (
        b'"logit_bias":{%b}' % biases,
        b'"allowed_token_ids":[%b]' % allowed,
        b'"stop":[%b]' % stops,
        b'"bad_words":[%b]' % stops,
        b'"guided_choice":[%b]' % choices,
    ):
        target.post("/v1/completions", b'{"prompt":"a","max_tokens":2,"temperature":1,"n":4000,%b}' % fields)
        prompts = b",".join([b'"a"'] * 4000)
        target.post("/v1/completions", b'{"prompt":[%b],"max_tokens":2,%b}' % (prompts, fields))
    conversations = b",".join([b'[{"role":"user","content":"Hi"}]'] * 20_000)
    target.post("/v1/chat/completions/batch", b'{"messages":[%b]}' % conversations)


@attack(slow=True)
def what_every_completion_repeats(target: Target) -> None:
    content = b'"%b"' % (b"one two " * 131_072)
    echo = b'{"truncate_prompt_tokens":100,"echo":true,"add_generation_prompt":false,"n":4000,"temperature":1,'
    target.post("/v1/chat/completions", echo + messages(content)[1:])
    ids = b",".join([b"5"] * 2000)
    for fields in (b'"prompt_logprobs":20', b'"echo":true,"logprobs":5', b'"return_token_ids":true'):
        body = b'{"prompt":[%b],"max_tokens":1,"temperature":1,"n":4000,%b}' % (ids, fields)
        target.post("/v1/completions", body)


# ---------------------------------------------------------------- the server and its other user


def limit_memory(pid: int) -> None:
    """Put a process, and those it will start, into a memory cgroup. Where that is not allowed, RSS is watched only."""
    for parent, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / f"kvasir-test-{pid}"
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / file).write_text(str(MEMORY))
            (group / "cgroup.procs").write_text(str(pid))
            return


def forget_limit(pid: int) -> None:
    for parent in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        with contextlib.suppress(OSError):
            (parent / f"kvasir-test-{pid}").rmdir()


def rss(server: LiveServer) -> int:
    process = psutil.Process(server.process.pid)
    return int(sum(each.memory_info().rss for each in (process, *process.children(recursive=True))))


@pytest.fixture(scope="module")
def hostile(starter_model: Path) -> Iterator[LiveServer]:
    """Its time limits are short, so that it gets over an attack soon."""
    with LiveServer.fake(starter_model, server={"api_key": [KEY], **SHORT}) as server:
        limit_memory(server.process.pid)
        yield server.wait_until_ready()
    forget_limit(server.process.pid)


class User:
    """Asks again and again, on a new connection each time, and notes how long each answer took."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.seconds: list[float] = []
        self.errors: list[str] = []

    def ask(self) -> None:
        began = time.monotonic()
        try:
            reply = httpx.post(f"{self.server.url}/v1/chat/completions", json=CHAT, headers=bearer(), timeout=30)
            if reply.status_code != 200:
                self.errors.append(f"{reply.status_code} {reply.text[:200]}")
        except httpx.HTTPError as error:
            self.errors.append(repr(error))
        self.seconds.append(time.monotonic() - began)

    def ask_until(self, done: Callable[[], bool]) -> None:
        while not done() or len(self.seconds) < 5:
            self.ask()
            time.sleep(0.02)


def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("run", ATTACKS)
def test_other_users_are_served_and_memory_comes_back(hostile: LiveServer, run: Attack) -> None:
    calm = User(hostile)
    calm.ask_until(lambda: True)
    before, most = rss(hostile), 0
    attacker = threading.Thread(target=run, args=(Target(hostile),), daemon=True)
    attacker.start()
    user = User(hostile)

    def done() -> bool:
        nonlocal most
        most = max(most, rss(hostile))
        return not attacker.is_alive()

    user.ask_until(done)
    failures, FAILURES[:] = list(FAILURES), []
    assert not failures
    assert hostile.process.poll() is None, hostile.log[-4000:]
    assert not user.errors, user.errors
    # On a machine that runs other tests beside this one, a server that is not attacked takes longer, too.
    patience = 5.0 if os.environ.get("PYTEST_XDIST_WORKER") else 1.0
    assert max(user.seconds) < max(patience, 10 * max(calm.seconds)), sorted(user.seconds)[-5:]
    assert most < MEMORY, f"{most / MIB:.0f} MiB"
    until(lambda: rss(hostile) < before + ROOM, f"memory comes back from {most / MIB:.0f} MiB", seconds=10)
    assert "Traceback" not in hostile.log, hostile.log.partition("Traceback")[2][:4000]


# ---------------------------------------------------------------- what they are told


@pytest.fixture(scope="module")
def small(starter_model: Path) -> Iterator[LiveServer]:
    """Everything is short here."""
    limits: dict[str, Any] = {
        "root_path": "/llm",
        "max_connections": 8,
        "max_request_bytes": MIB,
        "max_body_memory": MIB,
        "websocket_idle_timeout": 3.0,
    }
    timeouts = dict.fromkeys(SHORT, 1.0)
    settings, executor = {"api_key": [KEY], **limits, **timeouts}, "tests.scoring_echo:scoring_echo"
    with LiveServer.fake(starter_model, server=settings, executor=executor) as server:
        yield server.wait_until_ready()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def read_answer(sock: socket.socket) -> Answer | None:
    """One response, up to the end of the connection or of its Content-Length; None if the server says nothing."""
    sock.settimeout(20)
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(4096)
        if not more:
            assert not data, data
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    size = int(headers.get("content-length", 1 << 30))
    while len(body) < size and (more := sock.recv(4096)):
        body += more
    return Answer(int(status.split()[1]), headers, body)


def told(server: LiveServer, data: bytes) -> Answer:
    with Target(server).connect() as sock:
        sock.sendall(data)
        answer = read_answer(sock)
    assert answer is not None, "it says nothing"
    return answer


GET = b"GET /health HTTP/1.1\r\n"
CHUNKED = b"POST /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
UPGRADE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414, "max-url-bytes"),
        (b"GET /" + b"a" * 9000, 414, "max-url-bytes"),
        (GET + b"A: " + b"b" * 9000 + b"\r\n\r\n", 431, "max-header-line-bytes"),
        (GET + b"A: " + b"b" * 20000, 431, "max-header-line-bytes"),
        (GET + b"b" * 20000, 431, "max-header-line-bytes"),
        (GET + b"A: b\r\n" * 101 + b"\r\n", 431, "max-header-count"),
        (GET + (b"A: " + b"b" * 4000 + b"\r\n") * 12, 431, "max-header-bytes"),
        (GET + UPGRADE + b"A: b\r\n" * 101 + b"\r\n", 431, "max-header-count"),
        (b"GET /" + b"a" * 8180 + b" HTTP/1.1\r\n" + UPGRADE + b"\r\n", 414, "WebSocket"),
        (CHUNKED + b"\r\n2;" + b"e" * 40000, 400, "extensions"),
        (CHUNKED + b"\r\n" + b"1\r\nx\r\n" * 10000, 400, "too small"),
        (GET + UPGRADE + b"Content-Length: 5\r\n\r\nabcde", 400, "no body"),
        (GET + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n", 400, "no body"),
        (b"\r\n" * 20000, 431, "max-header-line-bytes"),
        (b"nonsense\r\n\r\n", 400, "not valid HTTP"),
    ],
)
def test_what_is_too_long_is_refused_before_the_key(hostile: LiveServer, data: bytes, status: int, said: str) -> None:
    answer = told(hostile, data)
    assert answer.status == status and answer.headers["connection"] == "close"
    assert said in json.loads(answer.body)["error"]["message"]


def test_heads_within_the_limits_pass(hostile: LiveServer) -> None:
    assert told(hostile, GET + b"A: " + b"b" * 8000 + b"\r\n" + b"C: d\r\n" * 90 + b"\r\n").status == 200
    assert told(hostile, b"GET /health?" + b"a" * 8000 + b" HTTP/1.1\r\n\r\n").status == 200


def test_trailers_do_not_join_the_headers(hostile: LiveServer) -> None:
    body = json.dumps(CHAT).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n"
    chunk = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    answer = told(hostile, head + chunk + f"Authorization: Bearer {KEY}\r\n\r\n".encode())
    assert answer.status == 401


def test_pipelined_requests_are_answered_in_order(hostile: LiveServer) -> None:
    body = json.dumps(CHAT).encode()
    chat = Target(hostile).head(f"Content-Length: {len(body)}", "Content-Type: application/json") + b"\r\n" + body
    with Target(hostile).connect() as sock:
        for _ in range(3):
            sock.sendall(chat + GET + b"\r\n" + chat[:50])
            sock.sendall(chat[50:] + b"GET /nothing HTTP/1.1\r\nAuthorization: Bearer sesame\r\n\r\n")
        sock.settimeout(20)
        seen = b""
        while seen.count(b"HTTP/1.1 404") < 3:
            seen += sock.recv(65536)
    statuses = [int(line.split()[1]) for line in seen.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    statuses += [int(rest[:3]) for rest in seen.split(b"}HTTP/1.1 ")[1:]]
    assert sorted(statuses) == [200] * 9 + [404] * 3
    order = [code for code in seen.replace(b"HTTP/1.1 ", b"\0").split(b"\0")[1:]]
    assert [int(each[:3]) for each in order] == [200, 200, 200, 404] * 3


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", None),
        (b"GET /health HT", 408),
        (b"GET /health HTTP/1.1\r\nA: ", 408),
        (b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer sesame\r\nContent-Length: 9\r\n\r\n{", 408),
        (GET + b"\r\n", 200),  # and then it is idle
    ],
)
def test_slow_clients_are_sent_away(small: LiveServer, data: bytes, status: int | None) -> None:
    began = time.monotonic()
    with Target(small).connect() as sock:
        sock.sendall(data)
        answer = read_answer(sock)
        assert (None if answer is None else answer.status) == status
        assert sock.recv(10) == b"", "the connection is closed"
    assert 0.9 < time.monotonic() - began < 15


def test_a_head_that_comes_byte_by_byte_has_no_more_time(small: LiveServer) -> None:
    began = time.monotonic()
    with Target(small).connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nA: ")
        sock.settimeout(0.2)
        while time.monotonic() - began < 10:
            sock.sendall(b"b")
            with contextlib.suppress(TimeoutError):
                assert b" 408 " in sock.recv(4096)
                return
    pytest.fail("it has all the time it wants")


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_disconnected(small: LiveServer) -> None:
    body = json.dumps({"prompt": [[5] * 20] * 40, "max_tokens": 1000, "logprobs": 5, "ignore_eos": True}).encode()
    ask = Target(small).head(f"Content-Length: {len(body)}", "Content-Type: application/json", path="/v1/completions")
    with Target(small).connect() as sock:
        sock.sendall(ask + b"\r\n" + body)
        until(lambda: small.log.count("ended: length") >= 1, "it is answered", small)
        peers = psutil.Process(small.process.pid)
        port = sock.getsockname()[1]
        until(lambda: all(each.raddr.port != port for each in peers.net_connections() if each.raddr), "it is cut off")
    assert "failed inside the server" not in small.log, "it had no large answer to read"


def test_beyond_the_cap_only_probes_are_answered(small: LiveServer) -> None:
    target = Target(small)
    socks = [target.connect() for _ in range(8)]
    for sock in socks:
        sock.sendall(target.head("Content-Length: 9") + b"\r\n{")
    until(lambda: told(small, target.head() + b"\r\n").status == 503, "it is full", small)
    answer = told(small, target.head() + b"\r\n")
    assert answer.headers["retry-after"] == "1" and answer.headers["connection"] == "close"
    assert told(small, GET + b"\r\n").status == 200
    assert told(small, target.head(path="/metrics", method="GET") + b"\r\n").status == 200
    for path in ("/ready", "/llm/ready"):  # a proxy may put the prefix of --root-path before it
        assert told(small, target.head(path=path, method="GET", key=False) + b"\r\n").status == 200
    assert small.log.count("new connections get 503") == 1, "it is logged, once"
    for sock in socks:
        sock.close()
    until(lambda: web.get(f"{small.url}/v1/models", headers=bearer()).status_code == 200, "there is room again", small)


def test_idle_connections_make_room(hostile: LiveServer, starter_model: Path) -> None:
    with LiveServer.fake(starter_model, server={"max_connections": 4}) as server:
        target = Target(server.wait_until_ready())
        socks = [target.connect() for _ in range(4)]
        time.sleep(1.1)
        assert web.get(f"{server.url}/v1/models").status_code == 200
        for sock in socks:
            sock.close()


def test_descriptors_that_run_out_are_reported(starter_model: Path) -> None:
    """Before accept fails. Those in reserve answer probes."""
    with LiveServer.fake(starter_model, server={"header_timeout": 5.0}) as server:
        target, process = Target(server.wait_until_ready()), psutil.Process(server.process.pid)
        limit = max(int(name) for name in os.listdir(f"/proc/{process.pid}/fd")) + 40
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        socks = []
        for _ in range(100):
            sock = target.connect()
            sock.sendall(b"GET /v1/models HTTP/1.1\r\n")
            socks.append(sock)
        server.wait_for_log("new connections get 503, except for probes: the process may open .* files")
        assert told(server, GET + b"\r\n").status == 200
        for sock in socks:
            sock.close()
        until(lambda: web.get(f"{server.url}/v1/models").status_code == 200, "it recovers", server)
        assert server.log.count("new connections get 503") == 1


def test_bodies_share_a_memory(small: LiveServer) -> None:
    target = Target(small)
    head = target.head(f"Content-Length: {MIB}", "Content-Type: application/json") + b"\r\n"
    with target.connect() as first:
        first.sendall(head + b"x" * (MIB - 1))
        time.sleep(0.3)
        with target.connect() as second:
            second.sendall(head + b"x" * 200_000)
            answer = read_answer(second)
            reply = web.post(f"{small.url}/v1/chat/completions", json=CHAT, headers=bearer())
    assert answer is not None and answer.status == 503 and answer.headers["retry-after"] == "1"
    assert reply.status_code == 200, "small bodies have a reserve"
    until(lambda: post_large(small) == 400, "it is given back", small)


def post_large(server: LiveServer) -> int:
    """The status of a body that takes all there is, and is not JSON."""
    headers = {**bearer(), "Content-Type": "application/json"}
    return web.post(f"{server.url}/v1/chat/completions", content=b"x" * MIB, headers=headers).status_code


def test_http_1_0_gets_no_chunks(hostile: LiveServer) -> None:
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = Target(hostile).head(f"Content-Length: {len(body)}", "Content-Type: application/json")
    answer = told(hostile, head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + body)
    assert answer.status == 200 and "transfer-encoding" not in answer.headers
    assert answer.body.startswith(b"data: {") and answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("pieces", [1, 1000])
def test_bodies_of_unknown_upgrades_are_bodies(hostile: LiveServer, chunked: bool, pieces: int) -> None:
    """Java's client and curl ask for h2c with every request. What follows the head must not be the next request."""
    body = json.dumps({**CHAT, "user": "GET /nothing HTTP/1.1\r\n\r\n"}).encode()
    sized, framed = f"Content-Length: {len(body)}", body
    if chunked:
        sized, framed = "Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
    request = Target(hostile).head(sized, "Content-Type: application/json", *upgrade) + b"\r\n" + framed
    data = (request + GET + b"\r\n") * 2
    with Target(hostile).connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), -(-len(data) // pieces)):
            sock.sendall(data[start : start + -(-len(data) // pieces)])
        sock.settimeout(5)
        seen = b""
        while len(statuses := re.findall(rb"HTTP/1.1 (\d+)", seen)) < 4 or not seen.endswith(b"}"):
            more = sock.recv(65536)
            assert more, seen
            seen += more
    assert statuses == [b"200"] * 4 and seen.count(b"chat.completion") == 2, seen


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, identity"])
def test_encoded_bodies_get_415(hostile: LiveServer, coding: str) -> None:
    content = gzip.compress(json.dumps(CHAT).encode())
    headers = {**bearer(), "Content-Encoding": coding, "Content-Type": "application/json"}
    reply = web.post(f"{hostile.url}/v1/chat/completions", content=content, headers=headers)
    assert reply.status_code == 415 and reply.json()["error"]["param"] == "Content-Encoding"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages",
        *(pytest.param(path, marks=pytest.mark.slow) for path in ("/v1/chat/completions", "/v1/responses")),
    ],
)
def test_errors_repeat_at_most_200_characters(hostile: LiveServer, path: str) -> None:
    """Whatever is sent in whatever field; the log repeats no more."""
    page = web.get(f"{hostile.url}/openapi.json", headers=bearer()).json()
    kind = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    names = [*page["components"]["schemas"][kind.rpartition("/")[2]]["properties"], "Ω " * 3000, "Ω" * 3000]
    body: dict[str, Any] = {"messages": CHAT["messages"]} if path != "/v1/responses" else {"input": "x"}
    body |= {"max_tokens": 1} if path == "/v1/messages" else {}
    num_refused = 0
    with httpx.Client(timeout=web.PATIENCE, headers=bearer()) as client:
        for name in names:
            for value in ("Ω " * 5000, {"type": "Ω' " * 3000}, [{"role": "Ω " * 3000, "content": "Ω"}]):
                reply = client.post(hostile.url + path, json={**body, name: value})
                if reply.status_code != 200:
                    num_refused += 1
                    error = reply.json()["error"]
                    said = error["message"].count("Ω"), (error.get("param") or "").count("Ω"), reply.status_code
                    assert said <= (200, 200, 499), (name, said)
    assert num_refused > 2 * len(names)
    longest = max(hostile.log.splitlines(), key=len)
    assert len(longest) < 1000, longest


# ---------------------------------------------------------------- WebSockets


def close_code(sock: socket.socket) -> int:
    """The code with which the server closes; frames before it are skipped. The close is replied to."""
    data = b""
    sock.settimeout(20)
    while b"\r\n\r\n" not in data:
        data += sock.recv(1)
    with sock.makefile("rb") as file:
        while True:
            opcode, size = file.read(2)
            payload = file.read(int.from_bytes(file.read(2), "big") if size == 126 else size)
            if opcode & 0x0F == 8:
                with contextlib.suppress(OSError):
                    sock.sendall(frame(8, payload[:2]))
                return int.from_bytes(payload[:2], "big")


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(1, fin=False) + frame(0, fin=False) * 1000, 1008),
        (frame(9, b"x") * 1000, 1008),
        (frame(10, b"x") * 1000, 1008),
        (frame(1, b"x" * 100, fin=False), 1008),  # and no more comes
        (frame(1, b"x" * (MIB + 1)), 1009),
        (frame(1, b"x" * MIB, fin=False) + frame(0, b"x"), 1009),
        (frame(1, b"\xff"), 1007),
        (frame(1, b"\xf0\x9f", fin=False) + frame(0, b"x"), 1007),
        (b"", 4001),  # idle
    ],
)
def test_a_websocket_has_limits(small: LiveServer, frames: bytes, code: int) -> None:
    with Target(small).websocket() as sock:
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            sock.sendall(frames)
        assert close_code(sock) == code
    assert "Traceback" not in small.log, small.log.partition("Traceback")[2][:4000]


@pytest.mark.parametrize("origin", ["http://[", "http://a]b", "//[::1", "null", ""])
def test_origins_that_are_no_urls(hostile: LiveServer, origin: str) -> None:
    with Target(hostile).websocket(KEY, f"Origin: {origin}") as sock:
        assert close_code(sock) == 4001
    assert "Traceback" not in hostile.log


def test_clients_that_leave_a_websocket_are_no_failure(hostile: LiveServer) -> None:
    """Whether it is seen first by what reads from them or by what writes to them."""
    body = json.dumps({**CHAT, "max_tokens": 500}).encode()
    for number in range(30):
        with Target(hostile).websocket() as sock:
            sock.sendall(frame(1, body))
            seen = b""
            while number % 3 and b"chat.completion.chunk" not in seen:
                more = sock.recv(4096)
                assert more, seen
                seen += more
            time.sleep(0.01 * (number % 5))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
    metrics = web.get(f"{hostile.url}/metrics", headers=bearer())
    assert 'cause="internal"' not in metrics.text
    assert "Traceback" not in hostile.log, hostile.log.partition("Traceback")[2][:4000]


def test_large_messages_in_fragments_pass(hostile: LiveServer) -> None:
    body = json.dumps({**CHAT, "user": "x" * 200_000}).encode()
    pieces = [body[at : at + 2000] for at in range(0, len(body), 2000)]
    with Target(hostile).websocket() as sock:
        for index, piece in enumerate(pieces):
            sock.sendall(frame(1 if index == 0 else 0, piece, fin=index == len(pieces) - 1))
        sock.settimeout(20)
        seen = b""
        while b"[DONE]" not in seen:
            more = sock.recv(65536)
            assert more, seen
            seen += more
