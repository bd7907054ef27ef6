"""Small pieces of the server: settings, chunks, stored responses, streams, log-probabilities, devices."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import sys
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError
from starlette.types import Message as AsgiMessage

from kvasir import log
from kvasir.entrypoints.cli.main import Parser
from kvasir.errors import MAX_ECHO, ConfigError, EngineDeadError, OverloadedError, RequestError
from kvasir.outputs import CompletionOutput, Logprob, RequestOutput
from kvasir.parsers.base import Content, OutputParser, OutputPart, PartReader, PlainTextParser
from kvasir.sampling_params import SamplingParams, StructuredOutputsParams
from kvasir.server.answers import PLAIN_ANSWER
from kvasir.server.api_keys import ANYBODY, ApiKey, KeyRing
from kvasir.server.batch import LineResponse, LineResult, ServerBatch, _Stopped
from kvasir.server.config import ServerConfig, add_flags, from_namespace, server_settings
from kvasir.server.engine_metrics import CpuProbe, visible_devices
from kvasir.server.errors import ApiError, as_api_error, error_response
from kvasir.server.event_stream import EventStream, PayloadWriter
from kvasir.server.file_store import FileStore
from kvasir.server.gate import Gate
from kvasir.server.http import ClientGone, unless_disconnected
from kvasir.server.large_bodies import check_copies, check_logprobs, check_repeated
from kvasir.server.limits import SMALL_BODY, BodyMemory
from kvasir.server.logprobs import MIN_LOGPROB, LogprobWriter, prompt_logprobs
from kvasir.server.metrics import GAPS, Metrics, Tally
from kvasir.server.response_store import CompletionStore, EventLog, ResponseStore, StoredCompletion, StoredResponse
from kvasir.server.routes import pages
from kvasir.server.routes.chat import ChatJob
from kvasir.server.routes.completions import CompletionJob, CompletionRequest
from kvasir.server.routes.stored import page
from kvasir.server.schema.base import Usage, encode
from kvasir.server.schema.chat import ChatChunk, ChatCompletion, ChatRequest, ChunkChoice, Delta, Message
from kvasir.server.schema.responses import ResponseReply, ResponsesRequest
from kvasir.server.schema.stored import BatchReply, RequestCounts

# ---------------------------------------------------------------- settings


def parse(*argv: str) -> ServerConfig:
    parser = Parser()
    add_flags(parser)
    return from_namespace(parser.parse_args(["m", *argv]))


def test_every_setting_has_a_flag_that_works() -> None:
    values = {bool: "", str: "x", int: "2", float: "2.5", list: "x", dict: '{"a": 1}'}
    for name, known in server_settings().items():
        if name.startswith("ssl_"):
            continue
        kind = next(kind for kind in known.types if kind is not type(None))
        value = str(known.setting.choices[-1]) if known.setting.choices else values[kind]
        flag = f"--{name.replace('_', '-')}"
        given = parse(f"--no-{name.replace('_', '-')}" if known.default is True else flag, *([value] if value else []))
        assert getattr(given, name) != known.default, name


def test_lists_are_words_or_json() -> None:
    assert parse("--api-key", "a", "b", "--api-key", "c").api_key == ["a", "b", "c"]
    assert parse("--allowed-origins", '["*"]').allowed_origins == ["*"]
    assert parse().allowed_methods == ["*"]
    with pytest.raises(ConfigError, match="not a JSON list"):
        parse("--allowed-origins", '["*"')


def test_the_config_file_has_server_settings_too(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 9000\nserved-model-name: one\napi-key: [a, b]\nmax-request-bytes: 1k\n")
    config = parse("--config", str(file))
    assert (config.port, config.served_model_name, config.api_key) == (9000, ["one"], ["a", "b"])
    assert config.max_request_bytes == 1000


def test_requests_are_not_logged_where_older_flags_say_so(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("enable-log-requests: true\n")
    assert parse("--config", str(file)).enable_log_requests
    assert not parse("--config", str(file), "--disable-log-requests").enable_log_requests
    file.write_text("disable-log-requests: true\n")
    assert not parse("--config", str(file)).enable_log_requests
    file.write_text("disable-log-requests: true\nenable_log_requests: true\n")
    with pytest.raises(ConfigError, match="disable-log-requests was vLLM's; leave it out"):
        parse("--config", str(file))


def test_wrong_settings() -> None:
    for wrong, said in (
        ({"port": -1}, "too small"),
        ({"ssl_certfile": "x"}, "both"),
        ({"api_key": [3]}, "list of strings"),
        ({"log_format": "xml"}, "Possible: text, json"),
        ({"port": 0, "api_server_count": 2}, "set port"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServerConfig(**wrong)  # type: ignore[arg-type]
    assert "secret" not in repr(ServerConfig(api_key=["secret"]))


# ---------------------------------------------------------------- chunks


class FakeRequest:
    """Stands in for an ApiRequest whose engine says these texts."""

    params = SimpleNamespace(n=1)
    state = SimpleNamespace(config=SimpleNamespace(enable_force_include_usage=False))

    answer = PLAIN_ANSWER

    def __init__(self, *texts: str, parser: Callable[[], OutputParser] = PlainTextParser) -> None:
        self.parts = PartReader(parser)
        self.outputs = []
        for i, text in enumerate(texts):
            last = i == len(texts) - 1
            completion = CompletionOutput(0, text, [i], finish_reason="stop" if last else None)
            self.outputs.append(RequestOutput("r", None, [1], None, [completion], last))

    def check(self, output: RequestOutput) -> None:
        pass

    def choice_of(self, output: RequestOutput, index: int) -> int:
        return index

    def written(self, writer: PayloadWriter) -> list[bytes]:
        payloads = [payload for output in self.outputs for payload in writer.payloads(output)]
        return [*payloads, *writer.last_payloads()]


def chat_payloads(request: FakeRequest, **fields: Any) -> list[bytes]:
    body = ChatRequest(messages=[Message(role="user", content="a")], stream=True, **fields)
    return request.written(ChatJob(body, request, 'mo"del', "id-1", "assistant", "").chunks())  # type: ignore[arg-type]


def test_quick_chunks_equal_what_the_struct_gives() -> None:
    texts = ("a", 'quote " and \\ back', "line\nbreak", "é 日本 🙂", "\x00\x01", "", "</s>", "end")
    payloads = chat_payloads(FakeRequest(*texts))
    decoded = [msgspec.json.decode(payload, type=ChatChunk) for payload in payloads]
    for payload, chunk in zip(payloads, decoded, strict=True):
        delta = chunk.choices[0].delta
        made = ChatChunk(
            id="id-1",
            created=chunk.created,
            model='mo"del',
            system_fingerprint=chunk.system_fingerprint,
            choices=[ChunkChoice(index=0, delta=delta, finish_reason=chunk.choices[0].finish_reason)],
        )
        if chunk.choices[0].finish_reason is None:
            assert payload == encode(made)
    assert [c.choices[0].delta.content for c in decoded[1:-1]] == [text for text in texts if text]
    assert decoded[0].choices[0].delta == Delta(role="assistant", content="")
    assert decoded[-1].choices[0].finish_reason == "stop"


def completion_choices(body: CompletionRequest, request: FakeRequest) -> list[Any]:
    job = CompletionJob(body, request, "m", "id-1", 17, False)  # type: ignore[arg-type]
    return [msgspec.json.decode(payload)["choices"][0] for payload in request.written(job)]


def test_what_is_said_of_the_prompt_is_not_lost_with_a_delta_that_has_no_text() -> None:
    request = FakeRequest("", "", "text", "end")
    request.outputs[0].prompt_logprobs = [None, {1: Logprob(-1.0, 1)}]
    first, second, last = completion_choices(CompletionRequest(prompt="a", stream=True, prompt_logprobs=0), request)
    assert first["text"] == "" and first["prompt_logprobs"][1]["1"]["logprob"] == -1.0
    assert (second["text"], last["text"]) == ("text", "end") and "prompt_logprobs" not in second
    request = FakeRequest("", "", "text", "end")
    assert len(completion_choices(CompletionRequest(prompt="a", stream=True), request)) == 2, (
        "empty deltas are left out"
    )


class WordParser:
    """Gives whole words, in capitals: a parser that holds text back and changes it."""

    def __init__(self) -> None:
        self.held = ""

    def feed(self, text: str) -> Sequence[OutputPart]:
        *words, self.held = (self.held + text).split(" ")
        return [Content(word.upper()) for word in words]

    def finish(self) -> Sequence[OutputPart]:
        return [Content(self.held.upper())]


@pytest.mark.parametrize("options", [{}, {"return_token_ids": True}], ids=["quick", "with ids"])
def test_writers_write_what_a_parser_gives(options: dict[str, bool]) -> None:
    texts = ("one tw", "o", " three four", " fi", "ve")
    chunks = [msgspec.json.decode(each) for each in chat_payloads(FakeRequest(*texts, parser=WordParser), **options)]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "ONETWOTHREEFOURFIVE"
    body = CompletionRequest(prompt="a", stream=True, return_token_ids=bool(options))
    choices = completion_choices(body, FakeRequest(*texts, parser=WordParser))
    assert "".join(choice["text"] for choice in choices) == "ONETWOTHREEFOURFIVE"


# ---------------------------------------------------------------- log-probabilities


class Tokens:
    """Token i is the i-th of these; the second and third are halves of a character."""

    texts = (b"a", b"\xc3", b"\xa9")

    def token_text(self, token: int) -> str:
        return self.texts[token].decode("utf-8", "replace")

    def token_bytes(self, skip_special_tokens: bool) -> dict[int, bytes]:
        return dict(enumerate(self.texts))


def test_chat_logprobs_have_exact_bytes() -> None:
    writer = LogprobWriter(Tokens())  # type: ignore[arg-type]
    positions = [{1: Logprob(-0.1, 1), 0: Logprob(float("-inf"), 2)}, {2: Logprob(-0.2, 1), 1: Logprob(-3.0, 2)}]
    content = writer.chat([1, 2], positions, 2).content
    assert bytes(b for each in content for b in each.bytes or []).decode() == "é"
    assert [top.logprob for top in content[0].top_logprobs] == [-0.1, MIN_LOGPROB], "JSON has no infinity"
    ids = LogprobWriter(Tokens(), as_ids=True).completion([1], positions[:1], 1, [5])  # type: ignore[arg-type]
    assert ids.tokens == ["token_id:1"] and ids.text_offset == [5] and ids.token_logprobs == [-0.1]
    assert prompt_logprobs([None, {0: Logprob(-1.0, 1, "a")}]) == [
        None,
        {"0": {"logprob": -1.0, "rank": 1, "decoded_token": "a"}},
    ]


def test_named_tokens_are_the_alternatives_in_place_of_the_likeliest() -> None:
    writer = LogprobWriter(Tokens(), as_ids=True, named=[2, 0])  # type: ignore[arg-type]
    positions = [{1: Logprob(-0.1, 1), 2: Logprob(-9.0, 3), 0: Logprob(-2.0, 2)}]
    (content,) = writer.chat([1], positions, 0).content
    assert [top.token for top in content.top_logprobs] == ["token_id:0", "token_id:2"]
    (shown,) = writer.completion([1], positions, 0, [0]).top_logprobs
    assert shown == {"token_id:0": -2.0, "token_id:2": -9.0, "token_id:1": -0.1}, "and the token itself"


# ---------------------------------------------------------------- stored responses


def stored(number: int, text: str = "", running: bool = False) -> StoredResponse:
    settings: dict[str, Any] = {"reasoning": {}, "text": {}, "tools": [], "output": [], "metadata": {}}
    settings |= {"temperature": 1, "top_p": 1, "top_logprobs": 0, "tool_choice": "auto", "parallel_tool_calls": True}
    settings |= {"max_output_tokens": None, "previous_response_id": None, "store": True, "background": False}
    reply = ResponseReply(id=f"r{number}", created_at=0, status="completed", model="m", instructions=text, **settings)
    return StoredResponse(reply, [], "alice", request=SimpleNamespace() if running else None)  # type: ignore[arg-type]


def test_the_store_is_bounded_by_number_and_bytes() -> None:
    alice = ApiKey("alice")
    store = ResponseStore(2)
    store.add(stored(0, running=True))
    for number in range(1, 4):
        store.add(stored(number))
    assert len(store) == 2
    assert store.find("r0", alice), "one that runs is kept"
    assert store.find("r3", alice)
    with pytest.raises(ApiError, match="not stored here"):
        store.find("r1", alice)
    with pytest.raises(ApiError):
        store.find("r3", ApiKey("bob"))
    small = ResponseStore(100, max_bytes=20_000)
    for number in range(5):
        small.add(stored(number, "x" * 5000))
    assert 0 < len(small) < 4 and small.num_bytes <= 20_000
    small.delete("r4", alice)
    small.add(stored(5, "y" * 50_000))
    assert len(small) == 0 and small.num_bytes == 0


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": str(number)} for number in range(10_000)],
        [{"type": "text", "text": "\N{GRINNING FACE}" + "x" * 100_000}],  # four bytes each in memory
        [{str(number): {}} for number in range(10_000)],
    ],
)
def test_the_store_counts_what_memory_holds(parts: list[Any]) -> None:
    text = json.dumps(parts)
    tracemalloc.start()
    held = json.loads(text)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    response = stored(0)
    response.items = [{"role": "assistant", "content": None, "tool_calls": held}]
    store = ResponseStore(10)
    store.add(response)
    assert 0.9 * taken < store.num_bytes < 2 * taken


def test_responses_that_run_share_the_memory_of_the_store() -> None:
    store = ResponseStore(100, max_bytes=100_000)
    for number in range(2):
        store.add(stored(number, "x" * 40_000, running=True))
    with pytest.raises(ApiError, match="wait") as caught:
        store.add(stored(2, "x" * 40_000, running=True))
    assert caught.value.status == 429 and len(store) == 2 and store.num_bytes < 100_000


@pytest.mark.parametrize("metadata", [{str(i): "" for i in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}])
def test_metadata_has_openais_limits(metadata: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="metadata"):
        ResponsesRequest.model_validate({"input": "x", "metadata": metadata})
    ResponsesRequest.model_validate({"input": "x", "metadata": {"k" * 64: "v" * 512}})


def test_log_probabilities_of_all_tokens_are_bounded() -> None:
    model = SimpleNamespace(max_model_len=2048, vocab_size=50_000)
    check = partial(check_logprobs, num_prompts=1, num_prompt_tokens=10, model=model)  # type: ignore[arg-type]
    many = list(range(1000))
    check(SamplingParams(logprobs=20, n=16, max_tokens=2048))
    check(SamplingParams(logprobs=1, logprob_token_ids=many, max_tokens=100))
    check(SamplingParams(prompt_logprobs=1000))
    for greedy, name in (
        (SamplingParams(logprobs=1, logprob_token_ids=many, max_tokens=100, n=4), "logprob_token_ids"),
        (SamplingParams(logprobs=1, logprob_token_ids=many, max_tokens=None), "logprob_token_ids"),
        (SamplingParams(logprobs=-1, max_tokens=10), "logprobs"),
        (SamplingParams(prompt_logprobs=-1), "prompt_logprobs"),
    ):
        with pytest.raises(RequestError, match=f"^{name} asks for") as caught:
            check(greedy)
        assert caught.value.parameter == name


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": dict.fromkeys(range(40_000), 1.0)},
        {"allowed_token_ids": list(range(40_000))},
        {"stop": ["x" * 1000] * 64},
        {"bad_words": ["x" * 1000] * 64},
    ],
    ids=lambda given: next(iter(given)),
)
def test_parameters_that_every_completion_has_are_bounded(given: dict[str, Any]) -> None:
    (name,) = given
    check_repeated(SamplingParams(**given, n=3), 3)
    with pytest.raises(RequestError, match=f"^{name} and other lists have .* for each of 1024 completions") as caught:
        check_repeated(SamplingParams(**given, n=1024), 1024)
    assert caught.value.parameter == name
    check_repeated(SamplingParams(stop=["\n\n", "User:"], logit_bias={5: -100.0}, n=4096), 4096)
    check_repeated(SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0), n=512), 512)  # OpenAI's most
    check_repeated(SamplingParams(allowed_token_ids=list(range(40_000)), n=16), 16)


def test_grammars_of_many_completions_are_bounded() -> None:
    short, long = (StructuredOutputsParams(choice=["x" * 10] * count) for count in (50, 10_000))
    check_repeated(SamplingParams(structured_outputs=short, n=4096), 4096)
    with pytest.raises(RequestError, match="4096 completions"):
        check_repeated(SamplingParams(structured_outputs=long, n=4096), 4096)
    schema = StructuredOutputsParams(json={"enum": ["x" * 5000]})
    check_repeated(SamplingParams(structured_outputs=schema), 1000)  # of a batch of prompts
    tools = replace(short, parts=(("a tool", long),))  # what errors are looked for in
    check_repeated(SamplingParams(structured_outputs=tools, n=4096), 4096)


def test_copies_of_a_prompt_are_bounded() -> None:
    check_copies("echo", 1, num_logprobs=1 << 30)  # once is no copy
    check_copies("return_token_ids", 16, num_tokens=32_768)
    for count in ({"num_characters": 1 << 20}, {"num_tokens": 1 << 18}, {"num_logprobs": 1 << 14}):
        check_copies("echo", 16, **count)
        with pytest.raises(RequestError, match="^echo repeats .* for each of 17 completions") as caught:
            check_copies("echo", 17, **count)
        assert caught.value.parameter == "echo"


@pytest.mark.parametrize("errored", [False, True])
def test_a_batch_stops_where_the_server_does(tmp_path: Path, errored: bool) -> None:
    """A line that gets a 503 while others are answered fails alone."""
    state: Any = SimpleNamespace(
        engine_or_none=SimpleNamespace(errored=errored),
        phase=SimpleNamespace(is_ready=True),
        files=FileStore(str(tmp_path), 1 << 20),
    )
    counts = RequestCounts(total=2)
    record = BatchReply(
        id=f"batch_{'0' * 32}",
        endpoint="/v1/completions",
        input_file_id="",
        completion_window="24h",
        status="in_progress",
        created_at=1,
        expires_at=2,
        request_counts=counts,
    )
    batch = ServerBatch(state, ANYBODY, record)
    busy = LineResult("1", "a", LineResponse(503, "r", {"error": {"message": "too many log-probabilities"}}))
    if errored:
        with pytest.raises(_Stopped):
            batch._take(busy)
    else:
        batch._take(busy)
        assert (counts.completed, counts.failed) == (0, 1)


# ---------------------------------------------------------------- large replies


def reply_of(body: bytes, memory: BodyMemory, pieces: int = 1) -> tuple[list[int], list[bytes], int]:
    """The statuses that are sent, the pieces of the body, and the bytes that are accounted for at most."""
    statuses, sent, most, before = list[int](), list[bytes](), 0, memory.held

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        size = -(-len(body) // pieces) or 1
        for at in range(0, max(1, len(body)), size):
            more = at + size < len(body)
            await send({"type": "http.response.body", "body": body[at : at + size], "more_body": more})

    async def send(message: Any) -> None:
        nonlocal most
        most = max(most, memory.held)
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        else:
            sent.append(bytes(message.get("body", b"")))

    gate = Gate(answer, KeyRing([]), 1000, BodyMemory(1000), memory, lambda *ended: None, lambda cause: None)
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    asyncio.run(gate(scope, lambda: None, send))  # type: ignore[arg-type, return-value]
    assert memory.held == before
    return statuses, sent, most


def test_a_large_reply_is_sent_in_pieces_and_accounted_for() -> None:
    body = bytes(range(256)) * 1000
    statuses, sent, most = reply_of(body, BodyMemory(len(body)))
    assert statuses == [200] and b"".join(sent) == body and most == len(body)
    assert max(map(len, sent)) == SMALL_BODY


def test_a_reply_for_which_there_is_no_memory_is_refused() -> None:
    memory = BodyMemory(100_000)
    assert memory.take(1)
    statuses, sent, most = reply_of(bytes(100_000), memory)
    assert statuses == [503] and b"no memory left for replies" in b"".join(sent) and most == 1


def test_a_request_leaves_nothing_for_the_garbage_collector() -> None:
    """What refers to itself stays in memory until a collection, and a collection halts all streams."""
    given: list[weakref.ref[Any]] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        given.append(weakref.ref(send))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async def send(message: Any) -> None:
        pass

    gate = Gate(answer, KeyRing([]), 9, BodyMemory(9), BodyMemory(9), lambda *ended: None, lambda cause: None)
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    gc.disable()
    try:
        asyncio.run(gate(scope, lambda: None, send))  # type: ignore[arg-type, return-value]
        assert [each() for each in given] == [None]
    finally:
        gc.enable()


def test_a_reply_larger_than_all_memory_is_sent_alone() -> None:
    """Asking again would never help."""
    statuses, sent, most = reply_of(bytes(100_000), BodyMemory(10))
    assert statuses == [200] and len(b"".join(sent)) == most == 100_000


def test_small_replies_and_files_need_no_memory() -> None:
    for body, pieces in ((b"", 1), (bytes(SMALL_BODY), 1), (bytes(1_000_000), 16)):
        statuses, sent, _ = reply_of(body, BodyMemory(1), pieces)
        assert statuses == [200] and b"".join(sent) == body


def test_events_are_followed_in_pieces() -> None:
    log = EventLog()
    log.add(b"".join(b"data: %d%b\n\n" % (i, b"x" * 1000) for i in range(1000)))
    log.close()

    async def follow() -> list[bytes]:
        return [frames async for frames in log.follow(10)]

    pieces = asyncio.run(follow())
    assert b"".join(pieces) == b"".join(log.events[10:]) and max(map(len, pieces)) < (64 << 10) + 2000


def test_a_page_of_large_entries_is_short() -> None:
    entries = [str(i) + "x" * (1 << 20) for i in range(10)]
    seen, after = [], None
    while True:
        found, has_more = page(entries, lambda entry: entry[:1], 100, "asc", after)
        assert 1 <= len(found) <= 3
        seen += found
        if not has_more:
            break
        after = found[-1][:1]
    assert seen == entries
    assert page(["x" * (5 << 20)] * 2, lambda entry: entry, 100, "asc", None) == (["x" * (5 << 20)], True)


def test_clients_that_look_at_the_engine_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave time to requests between two looks, which may have thousands of them to describe."""
    running, most, number = 0, 0, 0

    async def snapshot(*given: Any, **named: Any) -> None:
        nonlocal running, most, number
        running, number = running + 1, number + 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1

    monkeypatch.setattr(pages, "engine_state", lambda *given: {})
    monkeypatch.setattr(pages, "distributions", lambda metrics: {})
    config = SimpleNamespace(parallel=SimpleNamespace(data_parallel_size=1))
    state: Any = SimpleNamespace(engine=SimpleNamespace(config=config), call=snapshot, model_names=["m"])
    state.metrics, state.num_lookers = SimpleNamespace(collect=list), 0

    async def go() -> None:
        state.look_lock = asyncio.Lock()
        await asyncio.wait([asyncio.create_task(pages._look(state, 0, 0)) for _ in range(100)], timeout=0.8)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(go())
    assert most == 1 and 2 <= number <= 12 and state.num_lookers == 0


# ---------------------------------------------------------------- what errors repeat


@pytest.mark.parametrize(
    "value", ["x" * 5000, "x y " * 5000, "x'\"\\ " * 5000, "x" * 10_000_000, "'" * 1000, "\"' x" * 300]
)
def test_errors_repeat_little(value: str) -> None:
    for message in (f"The model {value!r} does not exist here.", f"No {value!r}, only {value!r}: {'a' * 50}."):
        error = ApiError(400, message, "invalid_request", value)
        assert len(error.message) < 300 and error.message.startswith(message[:3])
        assert error.message.count("x") <= MAX_ECHO
        assert error.param is not None and len(error.param) <= MAX_ECHO
    short = "Short messages stay as they are, 'with their quotes'."
    assert ApiError(400, short, "invalid_request").message == short


@pytest.mark.parametrize("style", ["TEXT", "JSON"])
def test_log_lines_are_cut(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_LOG_FORMAT", style)
    record = logging.LogRecord("kvasir", logging.INFO, "", 0, "said %s", ("x" * 10**6,), None)
    record.fields = {"user": "y" * 10**6, "list": ["z" * 10**6], "number": 5, "none": None}
    try:
        raise ValueError("w" * 10**6)
    except ValueError:
        record.exc_info = sys.exc_info()
    line = log.handler().format(record)
    assert len(line) < 3 * log.MAX_LINE
    if style == "JSON":
        found = json.loads(line)
        assert (found["number"], found["none"]) == (5, None)
        assert len(found["user"]) < 2 * log.MAX_FIELD and len(str(found["list"])) < 2 * log.MAX_FIELD


def test_what_was_deleted_while_it_ran_does_not_come_back() -> None:
    store, running = ResponseStore(2), stored(0, running=True)
    store.add(running)
    store.delete("r0", ApiKey("alice"))
    running.request = None
    store.update(running)
    assert len(store) == 0 and store.num_bytes == 0


def test_a_store_full_of_running_ones_takes_no_more_into_the_background() -> None:
    store, more = ResponseStore(1), stored(1, running=True)
    first = stored(0, running=True)
    store.add(first)
    more.response.background = True
    with pytest.raises(ApiError, match="--max-stored-responses") as caught:
        store.add(more)
    assert caught.value.status == 429 and len(store) == 1
    first.request = None
    store.update(first)
    store.add(more)
    assert store.find("r1", ApiKey("alice")) is more and len(store) == 1


def test_the_store_of_completions_is_bounded_and_private() -> None:
    def kept(name: str, owner: str, text: str = "") -> StoredCompletion:
        usage = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
        made = ChatCompletion(id=name, created=0, model="m", choices=[], usage=usage, system_fingerprint="")
        return StoredCompletion(made, [{"role": "user", "content": text}], owner)

    alice, bob = ApiKey("alice"), ApiKey("bob")
    store = CompletionStore(2)
    store.add(kept("same", "alice"))
    store.add(kept("same", "bob"))
    store.delete("same", bob)
    assert store.find("same", alice).owner == "alice", "clients choose ids: one key's must not touch another's"
    with pytest.raises(ApiError, match="not stored here"):
        store.find("same", bob)
    for number in range(3):
        store.add(kept(f"c{number}", "alice"))
    assert [each.completion.id for each in store.of(alice)] == ["c1", "c2"]
    small = CompletionStore(100, max_bytes=5000)
    for number in range(5):
        small.add(kept(f"c{number}", "alice", "x" * 1000))
    assert 0 < len(small.of(alice)) < 5 and small.num_bytes <= 5000


# ---------------------------------------------------------------- streams


def test_a_disconnect_cancels() -> None:
    async def go() -> str:
        gone = asyncio.Event()

        async def receive() -> AsgiMessage:
            await gone.wait()
            return {"type": "http.disconnect"}

        try:
            async with unless_disconnected(receive):
                asyncio.get_running_loop().call_soon(gone.set)
                await asyncio.sleep(60)
        except ClientGone:
            await asyncio.sleep(0)  # the task itself is not cancelled
            return "gone"
        return "stayed"

    assert asyncio.run(go()) == "gone"


def test_somebody_elses_cancel_is_not_a_disconnect() -> None:
    async def never() -> AsgiMessage:
        await asyncio.sleep(60)
        raise AssertionError

    async def work() -> None:
        async with unless_disconnected(never):
            await asyncio.sleep(60)

    async def go() -> bool:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(go())


class FailingRequest:
    """An ApiRequest that fails before its first output or after it."""

    def __init__(self, early: bool) -> None:
        self.early = early
        self.ended = False
        self.stream = self
        self.num_outputs = 0

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.ended = True

    async def start(self) -> None:
        if self.early:
            raise RequestError("wrong", "x")

    async def next(self) -> RequestOutput:
        self.num_outputs += 1
        if self.num_outputs > 2:
            raise RequestError("wrong", "x")
        return RequestOutput("r", None, [1], None, [], False)

    def take(self, output: RequestOutput) -> None:
        pass


class CountingWriter:
    """The first output has nothing to show."""

    count = -1

    def write(self, output: RequestOutput) -> bytes:
        self.count += 1
        return b"one" * self.count

    def finish(self) -> bytes:
        raise AssertionError("the stream fails")

    def fail(self, error: Exception) -> bytes:
        return str(error).encode()


@pytest.mark.parametrize("early", [True, False])
def test_errors_before_and_after_the_first_frame(early: bool) -> None:
    async def never() -> AsgiMessage:
        await asyncio.sleep(60)
        raise AssertionError

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    request = FailingRequest(early)
    stream = EventStream(request, CountingWriter())  # type: ignore[arg-type]
    if early:
        with pytest.raises(RequestError):
            asyncio.run(stream({"type": "http"}, never, send))
        assert not sent
    else:
        asyncio.run(stream({"type": "http"}, never, send))
        assert [message.get("body") for message in sent] == [None, b"one", b"wrong"]
    assert request.ended


@pytest.mark.parametrize("early", [True, False])
def test_a_failure_that_nobody_waits_for_any_more_is_no_news(early: bool) -> None:
    """The client leaves in the moment in which its request fails: asyncio would log the failure with a traceback."""
    said: list[Any] = []

    async def leave_together() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
        failed = asyncio.Event()

        class Request(FailingRequest):
            async def start(self) -> None:
                failed.set() if early else None
                await super().start()

            async def next(self) -> RequestOutput:
                failed.set() if self.num_outputs == 2 else await asyncio.sleep(0)
                return await super().next()

        async def leave() -> AsgiMessage:
            await failed.wait()
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        request = Request(early)
        stream = EventStream(request, CountingWriter())  # type: ignore[arg-type]
        with contextlib.suppress(ClientGone, RequestError):
            await stream({"type": "http"}, leave, send)
        assert request.ended and bool(sent) is not early

    asyncio.run(leave_together())
    gc.collect()
    assert not said


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (RequestError("x", "n"), 400, "invalid_request"),
        (OverloadedError("full", 2.2), 429, "queue_full"),
        (EngineDeadError("dead"), 503, "engine"),
        (ZeroDivisionError("secret"), 500, "internal"),
    ],
)
def test_errors_have_a_status(error: Exception, status: int, cause: str, log_lines: list[str]) -> None:
    found = as_api_error(error)
    assert (found.status, found.cause) == (status, cause)
    body = bytes(error_response(found, "/v1/completions", "id").body)
    assert b"secret" not in body, "what nobody expected is for the log alone"
    assert b'"error"' in bytes(error_response(found, "/v1/messages", "id").body)
    if status == 429:
        assert error_response(found, "/", "id").headers["retry-after"] == "3"


# ---------------------------------------------------------------- metrics, devices


def test_gaps_are_tallied_as_prometheus_would() -> None:
    metrics = Metrics("m")
    gaps = [0.0005, 0.001, 0.004, 0.3, 1000.0]
    for gap in gaps:
        metrics.tally.gap(gap, 1)
    metrics.tally.gap(0.4, 4)  # four tokens at once: a tenth each
    metrics.flush()
    page = metrics.page([], vllm_names=False).decode()
    series = 'kvasir:inter_token_latency_seconds_bucket{engine="0",le="%s",model_name="m"} %s'
    for bound, count in (("0.001", 2.0), ("0.005", 3.0), ("0.1", 7.0), ("0.3", 8.0), ("80.0", 8.0), ("+Inf", 9.0)):
        assert series % (bound, count) in page
    assert f'latency_seconds_sum{{engine="0",model_name="m"}} {sum(gaps) + 0.4}' in page
    assert metrics.tally.gaps == [0] * (len(GAPS) + 1) and isinstance(metrics.tally, Tally)
    assert "vllm:" in metrics.page([], vllm_names=True).decode()


def test_the_cpus_figures(tmp_path: Path) -> None:
    def write(busy: int, idle: int) -> None:
        (tmp_path / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2\n")

    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n")
    write(100, 100)
    probe = CpuProbe(tmp_path)
    write(130, 110)
    (use,) = probe()
    assert use.utilization == 0.75 and (use.memory_used, use.memory_total) == (60 * 1024, 100 * 1024)


def test_which_gpus_are_meant() -> None:
    assert visible_devices("cuda", None) is None
    assert visible_devices("cuda", "2,3") == ["2", "3"]
    assert visible_devices("cuda:1", None) == ["1"]
    assert visible_devices("cuda:1", "2,3") == ["3"]


def test_flags_do_not_clash_with_the_engines() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)  # argparse raises if two have the same name
