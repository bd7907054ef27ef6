"""Commands that talk to a server, against a live one without a model, where every text can be computed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvasir.entrypoints.cli.main import main
from kvasir.frontend.text.tokenizer import Tokenizer
from tests import web
from tests.server_process import LiveServer, echoed

SMALL = ["--disable-tqdm", "--random-input-len", "12", "--random-output-len", "10"]


class Bench:
    """`kvasir bench serve` on a server; gives the record it writes."""

    def __init__(self, url: str, tokenizer: Path, directory: Path) -> None:
        self.base = ["bench", "serve", "--base-url", url, "--tokenizer", str(tokenizer), "--disable-tqdm"]
        self.file = directory / "result.json"

    def __call__(self, *flags: str, status: int = 0) -> dict[str, Any]:
        assert main([*self.base, "--json", str(self.file), *flags]) == status
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found


@pytest.fixture
def bench(fake_server: LiveServer, starter_model: Path, tmp_path: Path) -> Bench:
    return Bench(fake_server.url, starter_model, tmp_path)


# ---------------------------------------------------------------- complete


def test_complete_prints_the_text(
    fake_server: LiveServer, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ["--url", f"{fake_server.url}/v1"]
    assert main(["complete", *url, "-q", "Once upon a time", "--max-tokens", "9", "--temperature", "0", "--stats"]) == 0
    shown = capsys.readouterr()
    prompt = tokenizer.encode("Once upon a time")
    assert shown.out == echoed(tokenizer, prompt, 9) + "\n"
    assert f"[{len(prompt)} tokens in, 9 out, " in shown.err and "tokens/s]" in shown.err


def test_complete_reads_standard_input(
    fake_server: LiveServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"One\ntwo")))
    assert main(["complete", "--url", f"{fake_server.url}/v1", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == echoed(tokenizer, tokenizer.encode("One\ntwo"), 4) + "\n"


def test_standard_input_that_is_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert main(["complete"]) == 2
    assert capsys.readouterr().err == "kvasir: error: Standard input is not UTF-8 text: byte 3 is 0xe9.\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "{url}/v1", "--model-name", "other"], "The model 'other' does not exist here. Available: fake."),
        (["--url", "{url}"], "/models. The base URL of OpenAI's API ends in /v1"),
        (["--url", "http://127.0.0.1:9/v1"], "No server answers at http://127.0.0.1:9/v1"),
        (["--url", "localhost"], "is not a URL such as"),
        (["--url", "{url}/v1", "--temperature", "-1"], "temperature"),
        (["--url", "{url}/v1", "--block-size", "16"], "--block-size is a setting of a model loaded here"),
        (["--url", "{url}/v1", "some/model"], "If 'some/model' is a text to complete, give it with -q."),
    ],
)
def test_complete_says_what_is_wrong(
    flags: list[str], message: str, fake_server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["complete", *(each.format(url=fake_server.url) for each in flags), "-q", "x"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("kvasir: error: ") and message in shown


def test_a_key_is_sent(
    locked_server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = ["--url", f"{locked_server.url}/v1", "-q", "x", "--max-tokens", "1"]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(["complete", *url]) == 2
    assert "The server needs an API key" in capsys.readouterr().err
    assert main(["complete", *url, "--api-key", "sesame"]) == 0
    assert main(["complete", *url, "--api-key", "wrong"]) == 2
    assert "The server refuses this API key" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert main(["complete", *url]) == 0


# ---------------------------------------------------------------- bench serve


def test_a_closed_loop_counts_every_token_and_text(bench: Bench, tokenizer: Tokenizer) -> None:
    record = bench("--num-prompts", "20", "--max-concurrency", "4", *SMALL, "--save-detailed")
    assert (record["completed"], record["failed"], record["max_concurrent_requests"]) == (20, 0, 4)
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (240, 200)
    assert record["output_throughput"] == pytest.approx(200 / record["duration"])
    assert record["p50_ttft_ms"] <= record["p95_ttft_ms"] <= record["p99_ttft_ms"] <= record["p99_e2el_ms"]
    from kvasir.bench.serve.datasets import PromptMaker, Random

    asked = Random(12, 10).prompts(PromptMaker(tokenizer), 20)
    wanted = [echoed(tokenizer, prompt.content, 10) for prompt in asked]  # type: ignore[arg-type]
    assert record["generated_texts"] == wanted


def test_an_open_loop_takes_its_time(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(
        "--num-prompts", "12", "--request-rate", "30", "--burstiness", "100", *SMALL, "--goodput", "e2el:60000"
    )
    assert record["completed"] == 12 and record["duration"] >= 11 / 30 * 0.7
    assert record["request_goodput"] == pytest.approx(record["request_throughput"])
    shown = capsys.readouterr().out
    assert "30.0 requests/s, burstiness 100" in shown and "within e2el:60000" in shown
    assert all(name in shown for name in ("TTFT", "TPOT", "ITL", "E2EL", "p50", "p95", "p99"))


def test_chat_and_further_fields(bench: Bench) -> None:
    record = bench("--backend", "openai-chat", "--num-prompts", "3", *SMALL, "--extra-body", '{"stop": ["\\u0000"]}')
    assert record["completed"] == 3 and record["total_output_tokens"] == 30
    assert record["total_input_tokens"] > 36, "the template's tokens, which the server counts, are in it"


def test_a_trace_is_replayed_at_its_own_times(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = [f"2024-01-01 00:00:0{i}.0000000,{20 + i},{3 + i}" for i in range(4)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, "2024-01-01 00:00:09.0,9999,1"]))
    flags = ["--dataset-name", "trace", "--dataset-path", str(file)]
    record = bench(*flags, "--trace-speedup", "10", "--save-detailed")
    assert (record["completed"], record["left_out"]) == (4, 1)
    assert record["input_lens"] == [20, 21, 22, 23] and record["output_lens"] == [3, 4, 5, 6]
    assert all(start >= 0.1 * i - 0.01 for i, start in enumerate(record["start_times"])), "never early"


POEM = "\n".join(f"Line {i} of a long and patient poem" for i in range(60))
TALK = [{"from": "human", "value": "Tell me of the sea, please."}, {"from": "gpt", "value": "It is wide and blue."}]


@pytest.mark.parametrize(
    ("name", "text", "flags", "tokens"),
    [
        ("sonnet", POEM, ["--sonnet-input-len", "90", "--sonnet-prefix-len", "40", "--output-len", "5"], 5),
        ("sharegpt", json.dumps([{"conversations": TALK}]), ["--ignore-eos"], 6),
        ("custom", '{"prompt": "Once upon a time"}', ["--custom-output-len", "7", "--ignore-eos"], 7),
    ],
)
def test_datasets_in_files(name: str, text: str, flags: list[str], tokens: int, bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "dataset"
    file.write_text(text)
    record = bench("--dataset-name", name, "--dataset-path", str(file), *flags, "--num-prompts", "4", "--save-detailed")
    assert record["completed"] == 4 and record["output_lens"] == [tokens] * 4


def test_a_refused_request_is_a_failure_that_is_told(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "2", "--num-warmups", "0", "--disable-tqdm", "--random-input-len", "4000"]
    record = bench(*flags, status=1)
    assert (record["completed"], record["failed"]) == (0, 2)
    assert "2 failed: HTTP 400: This model's maximum context length is 2048 tokens." in capsys.readouterr().out
    assert main([*bench.base, *flags[:2], *flags[-2:]]) == 2
    assert "The first request to" in capsys.readouterr().err


def test_results_go_to_files_of_their_own(bench: Bench, tmp_path: Path) -> None:
    flags = ["--num-prompts", "1", *SMALL, "--result-dir", str(tmp_path / "results"), "--metadata", "note=first"]
    assert main([*bench.base, *flags, "--save-result"]) == 0
    (file,) = (tmp_path / "results").iterdir()
    assert file.name.startswith("openai-infqps-fake-") and json.loads(file.read_text())["note"] == "first"
    for _ in range(2):
        assert main([*bench.base, *flags, "--append-result", "--result-filename", "all.jsonl"]) == 0
    assert len((tmp_path / "results" / "all.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sonnet-input-len", "5"], "--sonnet-input-len is for --dataset-name sonnet, not random."),
        (["--dataset-name", "sharegpt"], "--dataset-name sharegpt needs --dataset-path."),
        (["--dataset-path", "x"], "needs no file; leave --dataset-path out."),
        (["--dataset-name", "sonnet", "--dataset-path", "absent"], "--dataset-path absent cannot be read"),
        (["--ramp-up-end-rps", "5"], "need --ramp-up-strategy"),
        (["--percentile-metrics", "ttft,speed"], "speed is not one of"),
        (["--metric-percentiles", "101"], "numbers from 0 to 100"),
        (["--extra-body", "{"], "--extra-body is not a JSON object"),
        (["--header", "x"], "write it as KEY=VALUE"),
        (["--save-detailed"], "needs --save-result or --json"),
        (["--served-model-name", "other"], "does not serve other; it serves fake"),
        (["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"], "does not list models"),
    ],
)
def test_bench_serve_says_what_is_wrong(
    flags: list[str], message: str, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*bench.base, *flags]) == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- start-up


def test_ready_shows_the_engines_phases(fake_server: LiveServer) -> None:
    seconds = web.get(f"{fake_server.url}/ready").json()["startup_seconds"]
    assert {"settings", "model", "first token", "total", "engine: imports", "engine: KV cache"} <= set(seconds)
    engine = sum(took for name, took in seconds.items() if name.startswith("engine: "))
    assert 0 < engine <= seconds["total"] + 0.05, "the engine's start is within the server's"
    assert fake_server.metric("kvasir:startup_seconds", phase="engine: KV cache") == seconds["engine: KV cache"]
