"""benchmarks/serving: the loads, the figures and the report, with a small server of the standard library."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT

SERVING = ROOT / "benchmarks" / "serving"

# Answers completions with so many tokens as are asked for. The length of a prompt asks for something else.
SERVER = r"""
import asyncio, json, sys
late = 0
async def answer(reader, writer):
    global late
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split()[1]
    def whole(status, text):
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        writer.close()
    if path == "/v1/models":
        return whole(200, json.dumps({"data": [{"id": "toy", "max_model_len": 64}]}))
    if path == "/metrics":
        name = "kvasir:late_captures_total"
        return whole(200, f'# HELP {name} x\n{name}{{engine="0"}} {late}\n{name}{{engine="1"}} 1\n')
    if path != "/v1/completions":
        return whole(200 if path == "/health" else 404, "{}")
    size = int(head.lower().partition("content-length:")[2].split()[0])
    body = json.loads(await reader.readexactly(size))
    kind, count = len(body["prompt"]), body["max_tokens"]
    if kind == 1:
        return whole(500, "broken")
    late += kind >= 100
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    def event(data):
        text = f"data: {data}\n\n"
        writer.write(f"{len(text):x}\r\n{text}\r\n".encode())
    for at in range(count - (kind == 3)):
        event(json.dumps({"choices": [{"text": "x"}]}))
        await asyncio.sleep(0.002)
        if kind == 2:
            return writer.close()
    if kind == 4:
        event(json.dumps({"error": {"message": "too bad"}}))
    event(json.dumps({"choices": [], "usage": {"completion_tokens": count - (kind == 3)}}))
    event("[DONE]")
    writer.write(b"0\r\n\r\n")
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def loads() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SERVING))
    yield import_module("loads")
    sys.path.remove(str(SERVING))


@pytest.fixture
def report(loads: ModuleType) -> ModuleType:
    return import_module("report")


@pytest.fixture
def run(loads: ModuleType) -> ModuleType:
    spec = importlib.util.spec_from_file_location("serving_run", SERVING / "run.py")  # h200 has a module `run` too
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-c", SERVER, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.terminate()


def arguments(loads: ModuleType, *words: str) -> Any:
    parser = ArgumentParser()
    loads.add_arguments(parser)
    return parser.parse_args([*words, "--pause", "0"])


# ---------------------------------------------------------------- loads


def test_arrivals_and_lengths_are_those_of_the_seed_and_prompts_are_new(loads: ModuleType) -> None:
    load = loads.Load(rate=16, requests=400, input=40, output=20)

    def make(name: str = "a", seed: int = 0, prompts: int = 0) -> list[Any]:
        return list(loads.make_requests(name, load, seed, prompts, 1000))

    def shape(requests: list[Any]) -> list[tuple[float, int, int]]:
        return [(each.at, len(each.body["prompt"]), each.tokens) for each in requests]

    first, again, other_prompts = make(), make(), make(prompts=1)
    assert first == again and shape(first) == shape(other_prompts)
    assert shape(first) != shape(make(seed=1)) and shape(first) != shape(make("b"))
    beginnings = [tuple(each.body["prompt"][:16]) for each in first + other_prompts + make("b") + make(seed=1)]
    assert len(set(beginnings)) == 1600, "a block of 16 tokens that two prompts share would be a prefix hit"
    assert {len(each.body["prompt"]) for each in first} == set(range(20, 61))
    assert {each.tokens for each in first} == {each.body["max_tokens"] for each in first} == set(range(10, 31))
    assert first[-1].at == pytest.approx(400 / 16, rel=0.15)
    assert all(10 <= token <= 1000 for each in first for token in each.body["prompt"])


def test_named_loads_are_what_they_say(loads: ModuleType) -> None:
    def make(name: str) -> list[Any]:
        return list(loads.make_requests(name, loads.LOADS[name], 0, 0, 1000))

    assert {len(make(name)) for name in ("rate16", "rate32", "shared32", "bursts", "mixed")} == {320}
    assert loads.LOADS["rate16"].target["ttft.p99"] == 75 and loads.LOADS["rate32"].rate == 32
    shared = make("shared32")
    assert len({tuple(each.body["prompt"][:1536]) for each in shared}) == 1
    assert len({tuple(each.body["prompt"][:1552]) for each in shared}) == 320
    assert [each.at for each in make("bursts")] == [4.0 * (at // 64) for at in range(320)]
    long = [each for each in make("long_prompt") if each.is_long]
    assert [each.at for each in long] == [float(at) for at in range(1, len(long) + 1)] and len(long) >= 15
    assert {len(each.body["prompt"]) + each.tokens for each in long} == {4064}, "it fits max_model_len 4096"


def test_mixed_requests_have_every_parameter_and_few_have_none(loads: ModuleType) -> None:
    bodies = [each.body for each in loads.make_requests("mixed", loads.LOADS["mixed"], 0, 0, 1000)]
    plain = {"prompt", "max_tokens", "temperature"}
    extras = {"presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k", "min_p"}
    extras |= {"logprobs", "seed", "min_tokens", "logit_bias"}
    assert set().union(*bodies) == plain | extras
    assert 0 < sum(set(body) == plain for body in bodies) < 40
    assert all(body.get("min_tokens", 0) <= body["max_tokens"] for body in bodies)


def test_arguments_choose_loads(loads: ModuleType) -> None:
    assert list(loads.chosen(arguments(loads))) == list(loads.LOADS)
    own = loads.chosen(arguments(loads, "--rate", "8", "--input", "9", "--shared", "3", "--requests", "5"))
    assert own == {"own": loads.Load(rate=8, requests=5, input=9, shared=3)}
    sweep = loads.chosen(arguments(loads, "--sweep", "4,8", "--sweep-seconds", "10"))
    assert {name: load.requests for name, load in sweep.items()} == {"sweep@4": 40, "sweep@8": 80}
    cut = loads.chosen(arguments(loads, "--loads", "rate16", "--requests", "5"))["rate16"]
    assert cut.requests == 5 and not cut.target, "the target is of the whole load"
    for wrong in (["--loads", "rate99"], ["--loads", "rate16", "--input", "9"]):
        with pytest.raises(SystemExit):
            loads.chosen(arguments(loads, *wrong))


# ---------------------------------------------------------------- figures


def test_percentiles_are_those_of_the_figures_compared_with(loads: ModuleType) -> None:
    values = [each / 1e3 for each in range(1, 201)]
    random.Random(0).shuffle(values)
    assert loads.summary(values) == {"p50": 101.0, "p90": 181.0, "p99": 199.0, "max": 200.0}
    assert loads.summary([]) == dict.fromkeys(("p50", "p90", "p99", "max"))
    curve = dict(zip(loads.CURVE, loads.curve(values), strict=True))
    assert (curve[0], curve[50], curve[99], curve[100]) == (1.0, 101.0, 199.0, 200.0)
    assert loads.curve([]) == []


def response(*events: str) -> bytes:
    chunks = [f"{len(event):x}\r\n{event}\r\n" for event in events]
    return "".join(["HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *chunks, "0\r\n\r\n"]).encode()


def test_a_line_has_the_time_of_the_read_that_completes_it(loads: ModuleType) -> None:
    raw = response("data: a\n\n", "data: b\r\n\r\nda", "ta: c\n\n")
    ends = {line: raw.index(end) + len(end) for line, end in ((b"a", b"a\n\n"), (b"b", b"\n\r\nda"), (b"c", b"c\n\n"))}
    for cut in range(1, len(raw)):
        status, lines = loads.read_lines([(1.0, raw[:cut]), (2.0, raw[cut:])])
        found = {line[6:]: at for at, line in lines if line}
        assert status == 200 and found == {line: 1.0 if cut >= end else 2.0 for line, end in ends.items()}
    assert loads.read_lines([(1.0, b"HTTP/1.1 404 No\r\nContent-Length: 3\r\n\r\nab"), (2.0, b"c")]) == (
        404,
        [(2.0, b"abc")],
    )
    with pytest.raises(ValueError, match="closed before an answer"):
        loads.read_lines([])


def test_times_of_an_answer(loads: ModuleType) -> None:
    choice = 'data: {"choices": [{"text": "x"}]}\n\n'
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\ndata: [DONE]\n\n'
    raw = response(choice, choice, choice, usage)
    cuts = [raw.index(b"\n\n") + 4, raw.index(b"\n\n", raw.index(b"\n\n") + 2) + 4]
    reads = [(10.5, raw[: cuts[0]]), (11.0, raw[cuts[0] : cuts[1]]), (13.0, raw[cuts[1] :])]
    sent = loads.Sent(loads.Request(0.0, 5, {}), start=10.0, reads=reads)
    assert loads.read_answer(sent) == loads.Answer(None, 0.5, 2.5 / 4, [0.5, 2.0], 5, 3)
    one = loads.Sent(loads.Request(0.0, 5, {}), start=10.0, reads=[(12.0, response(choice, usage))])
    assert loads.read_answer(one).tpot is None, "five tokens at once tell nothing about the time of one"


def test_a_target_holds_only_without_errors_and_late_work(loads: ModuleType) -> None:
    record = {"ttft": {"p50": 20.0, "p99": 76.0}, "gaps": {"max": None}, "errors": 0}
    assert loads.missed(record, {"ttft.p50": 20, "ttft.p99": 75, "gaps.max": 50}) == [
        "ttft.p99 76 > 75",
        "gaps.max unknown > 50",
    ]
    late = "kvasir:late_captures_total"
    good = record | {"target": {"ttft.p50": 20}, "missed": []}
    assert loads.judge(good, {late: 3.0}, {late: 3.0})["holds"] is True
    assert loads.judge(good, {}, {})["holds"] is True, "a server without these counters is not judged by them"
    worse = loads.judge(good, {late: 3.0}, {late: 5.0})
    assert worse["holds"] is False and worse["missed"] == [f"{late} +2"] and worse["counters"] == {late: 2.0}
    assert loads.judge(good | {"errors": 2}, {}, {})["missed"] == ["2 errors"]
    assert loads.judge(good | {"target": {}}, {}, {})["holds"] is None


def test_a_load_is_measured_and_recorded(loads: ModuleType, url: str, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    options = arguments(loads, "--rate", "200", "--requests", "20", "--input", "20", "--output", "6", "--note", "n")
    record, *others = loads.measure(options, url, {"label": "toy server"}, out)
    assert not others and loads.read_records([out]) == [record]
    assert (record["load"], record["label"], record["model"], record["note"]) == ("own", "toy server", "toy", "n")
    assert record["errors"] == 0 and record["holds"] is None and record["counters"] == {"kvasir:late_captures_total": 0}
    assert record["tokens_per_chunk"] == 1 and record["out_tok_s"] > 0
    assert 2 <= record["tpot"]["p50"] <= record["tpot"]["max"] and record["gaps"]["p50"] >= 2
    assert 0 < record["ttft"]["p50"] <= record["ttft"]["p99"] <= record["ttft"]["max"] == record["curve"]["ttft"][-1]
    assert {"run", "date", "commit", "machine", "seed", "prompt_seed", "rate", "requests"} <= set(record)
    again = loads.measure(options, url, {"label": "toy server"}, out)[0]
    assert again["prompt_seed"] != record["prompt_seed"], "so that runs have other prompts"


def test_what_a_server_does_wrong_is_an_error(loads: ModuleType, url: str) -> None:
    def ask(length: int, where: str = url) -> Any:
        request = loads.Request(0.0, 3, {"prompt": [1] * length, "max_tokens": 3})
        server = loads.Server(where, "toy", "key", timeout=20)
        sent, _, _ = loads.asyncio.run(loads.run_load(server, [request]))
        return loads.figures(sent, 1.0, {"gaps.max": 1e6})

    assert ask(9)["errors"] == 0 and ask(9)["missed"] == []
    wrong = {1: "HTTP 500: broken", 2: "the stream ended early", 3: "an answer of 2 tokens where 3 were asked for"}
    for length, error in {**wrong, 4: 'in the stream: {"message": "too bad"}'}.items():
        figures = ask(length)
        assert figures["errors_by_kind"] == {error: 1} and figures["missed"] == ["gaps.max unknown > 1e+06"]
    assert next(iter(ask(9, "http://127.0.0.1:9")["errors_by_kind"])).startswith("cannot connect: ")


def test_counters_are_summed_and_may_be_absent(loads: ModuleType, url: str) -> None:
    late = "kvasir:late_captures_total"
    before = loads.counters(url)[late]
    assert before >= 1, "one of the server's two series is 1"
    options = arguments(loads, "--rate", "500", "--requests", "4", "--input", "200", "--output", "2")
    record = loads.measure(options, url, {"label": ""}, None)[0]
    assert loads.counters(url)[late] == before + 4 and record["missed"] == [f"{late} +4"]
    assert loads.counters(f"{url}/elsewhere") == {}


# ---------------------------------------------------------------- the report


def example(loads: ModuleType, label: str, load: str, milliseconds: float, rate: float = 16) -> dict[str, Any]:
    seconds = [milliseconds / 1e3 * each / 100 for each in range(1, 101)]
    summary, curve = loads.summary(seconds), loads.curve(seconds)
    target = dict(loads.LOADS[load].target) if load in loads.LOADS else {}
    record = {"ttft": summary, "tpot": summary, "gaps": summary, "errors": 0, "out_tok_s": 1234.5, "target": target}
    record |= {"curve": {"percentiles": loads.CURVE, "ttft": curve, "tpot": curve, "gaps": curve}}
    record |= {"label": label, "load": load, "rate": rate, "model": "toy", "machine": "a chip", "commit": "abc"}
    record |= {"date": "2026-01-01", "version": None, "missed": loads.missed(record, target)}
    return dict(loads.judge(record, {}, {}))


class Page(HTMLParser):
    """Counts elements and checks that every one that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.text: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page needs nothing from elsewhere"
        if tag not in ("meta", "line") or (tag == "line" and self._has_end()):
            self.open.append(tag)

    def _has_end(self) -> bool:
        return not (self.get_starttag_text() or "").endswith("/>")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_report_shows_engines_loads_targets_and_curves(loads: ModuleType, report: ModuleType) -> None:
    old = example(loads, "kvasir", "rate16", 9999)
    records = [old, *(example(loads, name, "rate16", top) for name, top in (("kvasir", 5), ("v<b>", 500)))]
    records += [example(loads, name, f"sweep@{rate}", rate, rate) for name in ("kvasir", "v<b>") for rate in (4, 8)]
    page = Page(report.page(records))
    text = " ".join(page.text)
    assert "holds" in text and "missed" in text and "v<b>" in text and "9,9" not in text, "the last record counts"
    assert "28.0 / 75.0" in text and "5.50 / 6.50" in text and "19.0 / 50.0" in text
    assert page.counts["svg"] == 2 + 2 + 2, "a key for each engine, two curves of the load, two of the sweep"
    assert page.counts["polyline"] == 2 * 2 + 2 * 2 * 2, "an engine has one line in a curve, and two in a sweep"
    assert "script" not in page.counts and text.count("target 28 ms") == 1
    assert "There are no records." in " ".join(Page(report.page([])).text)


def test_problems_besides_limits_are_named(loads: ModuleType, report: ModuleType) -> None:
    record = example(loads, "kvasir", "rate16", 5) | {"errors": 3, "missed": ["ttft.p50 30 > 28", "3 errors"]}
    assert report._verdict(record) == "missed; 3 errors"


def test_an_engine_without_answers_is_reported(loads: ModuleType, report: ModuleType) -> None:
    record = example(loads, "dead", "bursts", 5)
    nothing = {"percentiles": loads.CURVE, "ttft": [], "tpot": [], "gaps": []}
    record |= dict.fromkeys(("ttft", "tpot", "gaps"), loads.summary([])) | {"curve": nothing}
    text = " ".join(Page(report.page([record, record | {"load": "sweep@4"}])).text)
    assert "No time to first token was measured." in text and "No gap between chunks was measured." in text


def test_the_axes_of_charts(report: ModuleType) -> None:
    assert report.decade_ticks(3, 60) == [5, 10, 20, 50]
    assert report.decade_ticks(0.09, 2000) == [0.1, 1, 10, 100, 1000], "fewer where there would be many"
    places = [report.nines(each) for each in (0, 50, 90, 99, 99.9, 100)]
    assert places == sorted(places) and places[2] == pytest.approx(1) and places[3] == pytest.approx(2)


# ---------------------------------------------------------------- engines in turn


def test_engines_are_given_as_name_and_command(run: ModuleType) -> None:
    assert run.parse_engine("vllm=vllm serve 'a b' --x=1") == ("vllm", ["vllm", "serve", "a b", "--x=1"])
    assert run.with_port(["serve", "m"], 7) == ["serve", "m", "--port", "7"]
    assert run.with_port(["serve", "--bind=:{port}"], 7) == ["serve", "--bind=:7"]
    for wrong in ("kvasir serve", "=serve", "../up=serve", "kvasir="):
        with pytest.raises(ArgumentTypeError):
            run.parse_engine(wrong)


def test_engines_run_in_turn(
    run: ModuleType, loads: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out, record = tmp_path / "server.py", tmp_path / "out", tmp_path / "record.jsonl"
    script.write_text(f"import os\nopen(r'{tmp_path}/' + str(os.getpid()) + '.pid', 'w')\n{SERVER}")
    monkeypatch.setattr(run, "RESULTS", record)
    engines = [f"--engine=good={sys.executable} {script}", f"--engine=dead={sys.executable} -c 'print(1/0)'"]
    words = ["--out", str(out), "--record", "--rate", "100", "--requests", "5", "--input", "20", "--output", "3"]
    monkeypatch.setattr(sys, "argv", ["run.py", *engines, *words])
    began = time.monotonic()
    assert run.main() == 1, "one of them failed"
    found = loads.read_records([out / "results.jsonl"])
    assert found == loads.read_records([record]) and [each["label"] for each in found] == ["good"]
    assert 0 < found[0]["ready_s"] <= found[0]["first_answer_s"] <= time.monotonic() - began
    assert found[0]["first_ttft_ms"] > 0 and found[0]["command"].endswith("server.py") and found[0]["errors"] == 0
    assert "ZeroDivisionError" in (out / "dead.log").read_text()
    Page((out / "report.html").read_text())
    (pid,) = [int(path.stem) for path in tmp_path.glob("*.pid")]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_result_line_is_json_without_curves(loads: ModuleType, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    loads.measure(arguments(loads, "--rate", "500", "--requests", "2", "--input", "30"), url, {"label": ""}, None)
    printed = capsys.readouterr().out.splitlines()
    assert [line[:7] for line in printed] == [loads.MARK]
    assert "curve" not in json.loads(printed[0].removeprefix(loads.MARK))
