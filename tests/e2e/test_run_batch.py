"""`kvasir run-batch` with an engine that has no model: every line gets its result, whatever is wrong with others."""

from __future__ import annotations

import io
import json
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvasir.entrypoints.cli.main import main
from kvasir.entrypoints.cli.run_batch import run_batch
from kvasir.errors import ConfigError
from kvasir.executor.fake import fake_config
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.models import hub
from kvasir.server.config import ServerConfig
from tests.server_process import echoed

ECHO = "kvasir.executor.fake:echo"


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def words(count: int) -> dict[str, Any]:
    return {"max_tokens": count, "ignore_eos": True, "temperature": 0}


class Runner:
    def __init__(self, tokenizer: Path, directory: Path) -> None:
        self.tokenizer = tokenizer
        self.input, self.output = directory / "in.jsonl", directory / "out.jsonl"

    def __call__(self, *lines: str, executor: Any = ECHO, status: int = 0, **settings: Any) -> dict[Any, Any]:
        """Results by custom_id."""
        self.input.write_text("\n".join(lines))
        assert self.run(str(self.input), str(self.output), executor, **settings) == status
        results = [json.loads(text) for text in self.output.read_text().splitlines()]
        assert len({result["id"] for result in results}) == len(results)
        return {result["custom_id"]: result for result in results}

    def run(
        self, source: str, target: str, executor: Any = ECHO, max_concurrency: int | None = None, **settings: Any
    ) -> int:
        config = fake_config(vocab_size=49152, max_model_len=512, tokenizer=str(self.tokenizer), **settings)
        flags = Namespace(input_file=source, output_file=target, max_concurrency=max_concurrency, disable_tqdm=True)
        return run_batch(config, ServerConfig(unknown_fields="refuse"), flags, executor)


@pytest.fixture
def batch(starter_model: Path, tmp_path: Path) -> Runner:
    return Runner(starter_model, tmp_path)


def test_every_line_has_its_result(batch: Runner, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    results = batch(
        line("text", prompt="Once upon", **words(6)),
        "{not json",
        line("wrong field", prompt="x", max_tokens=-1),
        line("unknown field", prompt="x", temprature=1),
        line("other model", prompt="x", model="gpt"),
        line("streamed", prompt="x", stream=True),
        line("too long", prompt=[5] * 600),
        "",
        line("no such url", "/v1/images", prompt="x"),
        json.dumps({"custom_id": "got", "method": "GET", "url": "/v1/completions", "body": {}}),
        json.dumps({"custom_id": "bare"}),
        line("text", prompt="the same name again"),
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Who?"}], **words(5)),
        status=1,
    )
    assert len(batch.output.read_text().splitlines()) == 12, "the blank line is none"
    said = "2 answered, 10 failed\nkvasir: error: 5 lines are no requests; the output says why\n"
    assert capsys.readouterr().err.endswith(said)
    chat = results["chat"]["response"]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], add_generation_prompt=True)
    assert chat["body"]["choices"][0]["message"]["content"] == echoed(tokenizer, ids, 5)  # type: ignore[arg-type]
    assert (chat["status_code"], results["chat"]["error"]) == (200, None)
    assert chat["body"]["usage"]["completion_tokens"] == 5
    assert chat["request_id"] in chat["body"]["id"]

    refused = {name: results[name]["response"] for name in ("wrong field", "unknown field", "streamed", "too long")}
    assert {name: response["status_code"] for name, response in refused.items()} == dict.fromkeys(refused, 400)
    assert refused["wrong field"]["body"]["error"]["param"] == "max_tokens"
    assert "Did you mean temperature" in refused["unknown field"]["body"]["error"]["message"]
    assert refused["streamed"]["body"]["error"]["param"] == "stream"
    assert results["other model"]["response"]["status_code"] == 404

    assert results["no such url"]["error"]["code"] == "invalid_url" and results["no such url"]["response"] is None
    assert results["got"]["error"]["code"] == "invalid_method"
    assert results["bare"]["error"]["code"] == "invalid_request" and results["bare"]["error"]["line"] == 11
    assert results[None]["error"]["code"] == "invalid_json_line" and results[None]["error"]["line"] == 2


def test_structured_output(batch: Runner) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["red", "green"]}}}
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    found = batch(
        line("chat", "/v1/chat/completions", **chat, response_format=shape),
        line("text", prompt="a", max_tokens=9, structured_outputs={"choice": ["yes", "no"]}),
        line("bad", "/v1/chat/completions", **chat, response_format=wrong),
    )
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] in ('"red"', '"green"')
    assert found["text"]["response"]["body"]["choices"][0]["text"] in ("yes", "no")
    assert found["bad"]["response"]["status_code"] == 400


def test_a_name_stands_once(batch: Runner, tokenizer: Tokenizer) -> None:
    batch(line("a", prompt="Once upon", **words(3)), line("a", prompt="x", **words(3)), status=1)
    results = [json.loads(text) for text in batch.output.read_text().splitlines()]
    good = [result["response"]["body"]["choices"][0]["text"] for result in results if result["response"]]
    assert good == [echoed(tokenizer, tokenizer.encode("Once upon"), 3)]
    assert [result["error"]["code"] for result in results if result["error"]] == ["duplicate_custom_id"]


def test_more_lines_than_run_at_once(batch: Runner, tokenizer: Tokenizer) -> None:
    results = batch(*(line(str(i), prompt=[i + 5, 9], **words(4)) for i in range(100)), max_num_seqs=4)
    texts = {name: result["response"]["body"]["choices"][0]["text"] for name, result in results.items()}
    assert texts == {str(i): echoed(tokenizer, [i + 5, 9], 4) for i in range(100)}


def test_a_full_queue_is_waited_for(batch: Runner, tokenizer: Tokenizer) -> None:
    lines = [line(str(i), prompt=[i + 5, 9], **words(4)) for i in range(30)]
    results = batch(*lines, max_num_seqs=2, max_queued_requests=1, max_concurrency=30)
    assert {result["response"]["status_code"] for result in results.values()} == {200} and len(results) == 30


def test_an_engine_that_dies_is_told_in_every_line(batch: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    batch.input.write_text("\n".join(line(str(i), prompt="x", **words(50)) for i in range(20)))
    assert batch.run(str(batch.input), str(batch.output), "tests.process_builders:breaks") == 1
    results = [json.loads(text) for text in batch.output.read_text().splitlines()]
    assert len(results) == 20 and {result["response"]["status_code"] for result in results} <= {500, 503}
    assert "kvasir: error: " in capsys.readouterr().err


def test_a_line_without_custom_id_fails_the_run_and_no_other_line(batch: Runner) -> None:
    nameless = json.dumps({"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}})
    results = batch(nameless, line("a", prompt="x", **words(2)), status=1)
    assert "custom_id" in results[None]["error"]["message"] and results["a"]["response"]["status_code"] == 200
    refused = batch(line("b", prompt="x", max_tokens=-1))
    assert refused["b"]["response"]["status_code"] == 400, "a request that is refused has its reply"


# ---------------------------------------------------------------- where it comes from and goes to


class Store(BaseHTTPRequestHandler):
    files: dict[str, bytes]

    def do_GET(self) -> None:
        found = self.files.get(self.path)
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(found or b"")))
        self.end_headers()
        self.wfile.write(found or b"")

    def do_PUT(self) -> None:
        self.files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[tuple[str, dict[str, bytes]]]:
    Store.files = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", Store.files
        server.shutdown()


def test_from_a_url_to_a_url(batch: Runner, store: tuple[str, dict[str, bytes]]) -> None:
    url, files = store
    files["/in"] = "\n".join(line(str(i), prompt="L\u2028ine", **words(2)) for i in range(3)).encode()
    assert batch.run(f"{url}/in", f"{url}/out") == 0
    assert {json.loads(text)["custom_id"] for text in files["/out"].splitlines()} == {"0", "1", "2"}
    with pytest.raises(ConfigError, match="cannot be fetched.*404"):
        batch.run(f"{url}/absent", f"{url}/out")


def test_from_standard_input_to_standard_output(
    batch: Runner, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    given = io.TextIOWrapper(io.BytesIO(line("a", prompt="x", **words(2)).encode()))
    monkeypatch.setattr(sys, "stdin", given)
    assert batch.run("-", "-") == 0
    (result,) = map(json.loads, capfdbinary.readouterr().out.splitlines())
    assert result["response"]["status_code"] == 200


def test_without_a_model_it_is_the_starter_under_its_name(
    batch: Runner, starter_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_model(asked: Any, config: ServerConfig, flags: Namespace) -> int:
        assert asked.model.model == str(starter_model)
        asked = fake_config(vocab_size=49152, max_model_len=512, tokenizer=asked.model.model)
        return run_batch(asked, config, flags, ECHO)

    monkeypatch.setattr("kvasir.entrypoints.cli.run_batch.run_batch", without_model)
    monkeypatch.setattr(hub, "find_starter_model", lambda: starter_model)
    batch.input.write_text(line("a", prompt="x", model=hub.STARTER, **words(2)))
    assert main(["run-batch", "-i", str(batch.input), "-o", str(batch.output), "--disable-tqdm"]) == 0
    (result,) = map(json.loads, batch.output.read_text().splitlines())
    assert result["response"]["body"]["model"] == hub.STARTER


def test_files_that_cannot_be(batch: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch.input.write_text(line("a", prompt="x"))
    given = ["run-batch", "--model", "m", "-i", str(batch.input), "-o"]
    assert main([*given, str(batch.input)]) == 2
    assert "is the input file" in capsys.readouterr().err and batch.input.read_text(), "it was not emptied"
    assert main([*given, str(tmp_path / "absent" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["run-batch", "--model", "m", "-i", str(tmp_path / "absent"), "-o", str(batch.output)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_lines_own_request_id_is_the_one_it_is_told_by(batch: Runner) -> None:
    results = batch(line("a", prompt="Hi", request_id="mine-1", **words(1)))
    response = results["a"]["response"]
    assert response["request_id"] == "mine-1" and response["body"]["id"] == "cmpl-mine-1"
