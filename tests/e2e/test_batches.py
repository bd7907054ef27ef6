"""OpenAI's files and batches on local disk, by its own client: what survives, what is private, what is refused."""

from __future__ import annotations

import json
import os
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from kvasir.errors import RequestError
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.server import file_store
from kvasir.server.api_keys import ApiKey
from kvasir.server.errors import ApiError
from kvasir.server.file_store import FileStore, result_id
from kvasir.server.http import new_id
from kvasir.server.routes.stored import read_form
from kvasir.server.schema.stored import BatchReply, RequestCounts
from tests import web
from tests.server_process import LiveServer, echoed, until

KEY = ApiKey("a")
SLOW = {"make": "kvasir.executor.fake:delayed", "delay": 0.02, "token": 42}


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def client_of(server: LiveServer, key: str = "alice") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def upload(client: openai.OpenAI, *lines: str) -> str:
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch").id


def start(client: openai.OpenAI, file_id: str) -> str:
    return client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h").id


def finished(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    ends = ("completed", "failed", "cancelled")
    found = until(lambda: (b := client.batches.retrieve(batch_id)).status in ends and b, f"the end of {batch_id}")
    assert isinstance(found, openai.types.Batch)
    return found


@pytest.fixture(scope="module")
def server(starter_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    options = {
        "files_dir": str(tmp_path_factory.mktemp("files") / "new"),
        "api_key": ["alice", "bob"],
        "max_files_bytes": 100_000,
        "batch_concurrency": 2,
    }
    with LiveServer.fake(starter_model, server=options) as server:
        yield server.wait_until_ready()


def test_a_batch_from_file_to_file(server: LiveServer, tokenizer: Tokenizer) -> None:
    client = client_of(server)
    words = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
    lines = [line(str(i), prompt=[i + 5, 9], **words) for i in range(5)]
    source = upload(client, *lines, "", line("wrong", prompt="x", max_tokens=-1))
    made = client.batches.create(
        input_file_id=source, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
    )
    assert made.object == "batch" and made.status == "validating" and made.metadata == {"a": "b"}
    done = finished(client, made.id)
    assert done.status == "completed" and done.completed_at and done.request_counts
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (6, 5, 1)
    assert done.output_file_id and done.error_file_id
    results = [json.loads(each) for each in client.files.content(done.output_file_id).text.splitlines()]
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in results}
    assert texts == {str(i): echoed(tokenizer, [i + 5, 9], 3) for i in range(5)}
    (error,) = map(json.loads, client.files.content(done.error_file_id).text.splitlines())
    assert error["custom_id"] == "wrong" and error["response"]["status_code"] == 400
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert client.batches.list(limit=1).data[0].id == made.id
    assert source in [file.id for file in client.files.list(purpose="batch")]
    assert client.files.delete(source).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(source)


def test_a_file_with_wrong_lines_fails_as_a_whole(server: LiveServer) -> None:
    client = client_of(server)
    chat = line("b", "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    failed = finished(client, start(client, upload(client, line("a", prompt="x"), "{", chat, line("a", prompt="x"))))
    assert failed.status == "failed" and failed.errors and failed.errors.data and failed.output_file_id is None
    found = [(error.line, error.code) for error in failed.errors.data]
    assert found == [(2, "invalid_json_line"), (3, "mismatched_url"), (4, "duplicate_custom_id")]
    empty = finished(client, start(client, upload(client, "")))
    assert empty.errors and empty.errors.data and empty.errors.data[0].code == "empty_file"


def test_files_and_batches_are_their_keys_own(server: LiveServer) -> None:
    alice, bob = client_of(server), client_of(server, "bob")
    source = upload(alice, line("a", prompt="x", max_tokens=1))
    batch = start(alice, source)
    for ask in (
        lambda: bob.files.retrieve(source),
        lambda: bob.files.content(source),
        lambda: bob.files.delete(source),
        lambda: start(bob, source),
        lambda: bob.batches.retrieve(batch),
        lambda: bob.batches.cancel(batch),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert list(bob.files.list()) == [] and list(bob.batches.list()) == []
    assert finished(alice, batch).status == "completed"


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "file-" + "0" * 32, "file-..", "batch_" + "0" * 32, "%00"])
def test_ids_lead_nowhere_else(server: LiveServer, name: str) -> None:
    headers = {"Authorization": "Bearer alice"}
    for path in ("files/{}", "files/{}/content", "batches/{}"):
        assert web.get(f"{server.url}/v1/{path.format(name)}", headers=headers).status_code == 404


def test_what_is_refused(server: LiveServer, fake_server: LiveServer) -> None:
    def post(fields: dict[str, Any], **files: Any) -> httpx.Response:
        headers = {"Authorization": "Bearer alice"}
        return web.post(f"{server.url}/v1/files", data=fields, files=files, headers=headers)

    good = ("a.jsonl", b"{}")
    assert post({"purpose": "vision"}, file=good).json()["error"]["param"] == "purpose"
    assert post({"purpose": "batch", "expires_after": "x"}, file=good).json()["error"]["param"] == "expires_after"
    assert post({"purpose": "batch"}, other=good).status_code == 400
    full = post({"purpose": "batch"}, file=("a", b"x" * 100_001))
    assert full.status_code == 413 and "--max-files-bytes" in full.json()["error"]["message"]
    off = web.get(f"{fake_server.url}/v1/files")
    assert off.status_code == 404 and "--files-dir" in off.json()["error"]["message"]
    done = start(client_of(server), upload(client_of(server), line("a", prompt="x", max_tokens=1)))
    finished(client_of(server), done)
    with pytest.raises(openai.ConflictError, match="completed"):
        client_of(server).batches.cancel(done)


@pytest.mark.slow
def test_a_key_has_so_many_batches_at_once(starter_model: Path, tmp_path: Path) -> None:
    """Each has open files: thousands of them would leave none for connections."""
    options = {"files_dir": str(tmp_path), "shutdown_timeout": 1.0, "api_key": ["alice", "bob"]}
    with LiveServer.fake(starter_model, server=options, executor={**SLOW, "delay": 0.05}) as server:
        alice, bob = client_of(server.wait_until_ready()), client_of(server, "bob")
        long = upload(alice, line("a", prompt="x", max_tokens=2000, ignore_eos=True))
        for _ in range(32):
            start(alice, long)
        for _ in range(3):
            with pytest.raises(openai.RateLimitError, match="wait until one is completed"):
                start(alice, long)
        start(bob, upload(bob, line("a", prompt="x")))
        assert psutil.Process(server.process.pid).num_fds() < 150


def test_a_key_has_so_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "_MAX_RECORDS", 3)
    store, key = FileStore(str(tmp_path), 1 << 20), ApiKey("a")
    for _ in range(3):
        made = store.add_file(key, "x", "batch", b"x")
    with pytest.raises(ApiError, match="delete some"):
        store.add_file(key, "x", "batch", b"x")
    store.add_file(ApiKey("b"), "x", "batch", b"x")
    store.delete_file(key, made.id)
    store.add_file(key, "x", "batch", b"x")


def test_batches_end_early_and_servers_too(starter_model: Path, tmp_path: Path) -> None:
    """What a batch has done stays, and one whose server was killed is not said to run for ever."""
    options = {"files_dir": str(tmp_path), "batch_concurrency": 1}
    many = [line(str(i), prompt="x", max_tokens=20, ignore_eos=True) for i in range(200)]

    def begun(client: openai.OpenAI, batch: str) -> bool:
        counts = client.batches.retrieve(batch).request_counts
        return counts is not None and counts.completed > 0

    with LiveServer.fake(starter_model, server=options, executor=SLOW) as first:
        client = client_of(first.wait_until_ready())
        batch = start(client, upload(client, *many))
        until(lambda: begun(client, batch), "the first result", first)
        assert client.batches.cancel(batch).status == "cancelling"
        ended = finished(client, batch)
        assert ended.status == "cancelled" and ended.request_counts and ended.output_file_id
        kept = client.files.content(ended.output_file_id).text.splitlines()
        assert 0 < len(kept) == ended.request_counts.completed < 200
        killed = start(client, upload(client, *many))
        until(lambda: begun(client, killed), "the first result", first)
        counts = client.batches.retrieve(killed).request_counts
        assert counts is not None
        seen = counts.completed
        os.kill(first.process.pid, signal.SIGKILL)
        first.wait()
    with LiveServer.fake(starter_model, server=options, executor=SLOW) as second:
        client = client_of(second.wait_until_ready())
        found = client.batches.retrieve(killed)
        assert found.status == "failed" and found.errors and found.errors.data
        assert found.errors.data[0].message == "The server was stopped."
        assert found.output_file_id and found.request_counts
        results = [json.loads(each) for each in client.files.content(found.output_file_id).text.splitlines()]
        assert seen <= len(results) == found.request_counts.completed < 200
        assert client.batches.retrieve(batch) == ended
        drained = start(client, upload(client, *many))
        until(lambda: begun(client, drained), "the first result", second)
        second.process.terminate()
        assert second.wait() == 0
    record = json.loads(next(tmp_path.glob(f"*/{drained}.json")).read_text())
    assert record["status"] == "failed" and record["output_file_id"]
    assert not [*tmp_path.glob("*/*.lock"), *tmp_path.glob("*/*.cancel")], "left-over files"


# ---------------------------------------------------------------- what a killed server has left


def left_batch(store: FileStore, status: str, total: int) -> BatchReply:
    batch = BatchReply(
        id=f"batch_{new_id()}",
        endpoint="/v1/completions",
        input_file_id=f"file-{new_id()}",
        completion_window="24h",
        status=status,
        created_at=1,
        expires_at=2,
        request_counts=RequestCounts(total=total, completed=1),
    )
    store.save_batch(KEY, batch)
    return batch


@pytest.mark.parametrize(
    ("output", "error", "cancelled", "status", "counts"),
    [
        (b"", b"", False, "failed", (0, 0)),
        (b"one\ntwo\nthr", b"", False, "failed", (2, 0)),
        (b"one\ntwo\n", b"bad\n", False, "completed", (2, 1)),
        (b"one\n", b"", True, "cancelled", (1, 0)),
        (b"on", b"bad\n", True, "cancelled", (0, 1)),
    ],
)
def test_batches_of_a_killed_server_end_as_far_as_they_came(
    output: bytes, error: bytes, cancelled: bool, status: str, counts: tuple[int, int], tmp_path: Path
) -> None:
    store = FileStore(str(tmp_path), 1 << 20)
    batch = left_batch(store, "in_progress", 3)
    for kind, content in (("output", output), ("error", error)):
        if content:
            store.content_path(KEY, result_id(batch.id, kind)).write_bytes(content)
    if cancelled:
        store.ask_to_cancel(KEY, batch.id)
    os.close(store._lock)  # as when its process ends
    again = FileStore(str(tmp_path), 1 << 20)
    found = again.find_batch(KEY, batch.id)
    assert (found.status, (found.request_counts.completed, found.request_counts.failed)) == (status, counts)
    for file_id, content in ((found.output_file_id, output), (found.error_file_id, error)):
        whole = b"".join(each for each in content.splitlines(keepends=True) if each.endswith(b"\n"))
        assert (file_id is not None) == bool(whole)
        if file_id is not None:
            assert again.find_file(KEY, file_id).bytes == len(whole)
            assert again.content_path(KEY, file_id).read_bytes() == whole
    os.close(again._lock)


def test_what_belongs_to_nothing_is_removed_at_the_start(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 1 << 20)
    kept, batch = store.add_file(KEY, "x", "batch", b"x"), left_batch(store, "completed", 1)
    place = store.content_path(KEY, kept.id)
    left = [place.with_name(f"file-{new_id()}"), place.with_suffix(f".{new_id()}")]  # a content, half a record
    left += [place.with_name(f"{batch.id}.lock"), place.with_name(f"{batch.id}.cancel")]
    for each in left:
        each.write_bytes(b"x")
    others = FileStore(str(tmp_path), 1 << 20)
    assert all(each.exists() for each in left), "another process of the server may be using them"
    os.close(store._lock)
    os.close(others._lock)
    os.close(FileStore(str(tmp_path), 1 << 20)._lock)
    assert sorted(file.name for file in place.parent.iterdir()) == sorted(
        [kept.id, f"{kept.id}.json", f"{batch.id}.json"]
    )


# ---------------------------------------------------------------- forms


def form(*parts: bytes) -> bytes:
    return b"".join(b"--x\r\n" + part + b"\r\n" for part in parts) + b"--x--\r\n"


def test_forms_are_read() -> None:
    body = form(
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        b'content-disposition: form-data; name="file"; filename="a \xc3\xa9.jsonl"\r\nX: y\r\n\r\n\x00\r\n--y\n',
    )
    found = read_form("multipart/form-data; boundary=x", body)
    assert found == {"purpose": (None, b"batch"), "file": ("a é.jsonl", b"\x00\r\n--y\n")}
    for kind, wrong in (
        ("application/json", body),
        ("multipart/form-data", body),
        ("multipart/form-data; boundary=z", body),
        ("multipart/form-data; boundary=x", body[:-8]),
        ("multipart/form-data; boundary=x", form(b"no head")),
        ("multipart/form-data; boundary=x", b""),
    ):
        with pytest.raises(RequestError):
            read_form(kind, wrong)


@pytest.mark.parametrize(
    "body",
    [
        form(*[b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n'] * 200_000),
        form(b"X: y\r\n" * 1_000_000 + b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'),
        form(b"\r\n" * 4_000_000),
    ],
    ids=["many parts", "a long head", "nothing but lines"],
)
def test_a_form_is_bounded_before_it_is_read(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            read_form("multipart/form-data; boundary=x", body)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body), "copies of the body, and nothing for each line"
    finally:
        tracemalloc.stop()


def test_results_count_in_the_size_of_all_files(server: LiveServer) -> None:
    client = client_of(server)
    wordy = {"max_tokens": 100, "ignore_eos": True, "n": 32, "temperature": 1}
    done = finished(
        client, start(client, upload(client, *(line(str(i), prompt=f"Say {i}", **wordy) for i in range(12))))
    )
    assert done.status == "failed" and done.errors is not None and done.errors.data is not None
    assert "--max-files-bytes" in str(done.errors.data[0].message)
    assert done.output_file_id is not None, "what was done until then is kept"
    client.files.delete(done.output_file_id)
