"""What operators see: metrics read by a real Prometheus, logs, traces; the same of several API processes."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvasir.frontend.text.tokenizer import Tokenizer
from tests import web
from tests.e2e.test_load import port_of
from tests.server_process import ROOT, LiveServer, echoed, metric_in, until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "ignore_eos": True}


OF_EXPERTS = "kvasir:expert_tokens_total"  # only models with experts have it: see tests/cpu/test_expert_load.py


def documented_series() -> list[str]:
    """The names in the table of docs/metrics.md that every model has."""
    table = (ROOT / "docs" / "metrics.md").read_text()
    names: list[str] = re.findall(r"^\| `(kvasir:[a-z0-9_:]+)`", table, re.MULTILINE)
    assert OF_EXPERTS in names
    return [name for name in names if name != OF_EXPERTS]


def ask(url: str, **body: Any) -> httpx.Response:
    return web.post(f"{url}/v1/chat/completions", json={**CHAT, **body})


@pytest.fixture(scope="module")
def server(starter_model: Path) -> Iterator[LiveServer]:
    with LiveServer.fake(starter_model, server={"vllm_metric_names": True}) as found:
        ask(found.wait_until_ready().url)
        ask(found.url, stream=True)
        ask(found.url, temperature=-1)
        yield found


# ---------------------------------------------------------------- metrics


def test_the_documented_metrics_are_there(server: LiveServer) -> None:
    page = web.get(f"{server.url}/metrics").text
    found = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    found |= {re.sub(r"_(bucket|count|sum)$", "", name) for name in found}
    documented = documented_series()
    assert len(documented) > 30
    for name in documented:
        assert name in found, f"{name} is documented and not exported"
        assert name.replace("kvasir:", "vllm:") in found
    ours = {name for name in found if name.startswith("kvasir:") and not re.search("_(bucket|count|sum)$", name)}
    assert ours <= set(documented), "what is exported is documented"


def test_times_of_what_is_not_streamed_are_counted_and_logged(server: LiveServer) -> None:
    before = server.metric("kvasir:time_to_first_token_seconds_count")
    ask(server.url, max_tokens=6)
    assert server.metric("kvasir:time_to_first_token_seconds_count") == before + 1
    server.wait_for_log(r"ended: length, \d+ tokens in, 6 out, .* first token after [\d.]+ s, [\d.]+ s per token")


def test_the_metrics_count(server: LiveServer) -> None:
    before = {name: server.metric(f"kvasir:{name}") for name in ("generation_tokens_total", "request_success_total")}
    ask(server.url, stream=True, max_tokens=40)  # of which a slow reader gets a few at once, but not all
    metric = partial(metric_in, server.metrics())  # one page: what the engine counts is of one moment
    assert metric("kvasir:generation_tokens_total") == before["generation_tokens_total"] + 40
    assert metric("kvasir:request_success_total") == before["request_success_total"] + 1
    assert metric("kvasir:request_errors_total", cause="invalid_request") >= 1
    assert metric("kvasir:time_to_first_token_seconds_count") >= 2
    assert metric("kvasir:request_queue_time_seconds_count") >= 2
    steps = metric("kvasir:iteration_tokens_total_count")
    assert steps == metric("kvasir:engine_steps_total") == metric("vllm:iteration_tokens_total_count")
    assert metric("kvasir:iteration_tokens_total_bucket", le="1.0") < steps
    tokens = metric("kvasir:prompt_tokens_total") - metric("kvasir:prompt_tokens_cached_total")
    tokens += metric("kvasir:generation_tokens_total")
    assert metric("kvasir:iteration_tokens_total_sum") == tokens, "not the token of the start, which nobody asked for"
    parts = [metric(f"kvasir:request_{part}_time_seconds_sum") for part in ("prefill", "decode", "inference")]
    assert 0 < parts[0] + parts[1] == pytest.approx(parts[2])
    counted = metric("kvasir:inter_token_latency_seconds_count")
    assert 0 < counted < metric("kvasir:generation_tokens_total")
    assert metric("kvasir:device_memory_total_bytes") > metric("kvasir:device_memory_used_bytes") > 0
    assert 0 <= metric("kvasir:device_utilization") <= 1
    assert metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.slow
def test_what_is_not_streamed_counts_while_it_runs(starter_model: Path) -> None:
    async def ask_and_leave(server: LiveServer) -> None:
        async with httpx.AsyncClient(timeout=web.PATIENCE) as client:
            task = asyncio.create_task(
                client.post(f"{server.url}/v1/chat/completions", json={**CHAT, "max_tokens": 1900})
            )
            for name in ("generation_tokens_total", "tokens_per_second"):
                counted = partial(server.metric, f"kvasir:{name}")
                await asyncio.to_thread(until, lambda counted=counted: counted() > 0, name, server)
            assert not task.done()
            task.cancel()

    slow = {"make": "kvasir.executor.fake:delayed", "delay": 0.01, "token": 42}
    with LiveServer.fake(starter_model, executor=slow) as server:
        assert server.wait_until_ready().metric("kvasir:generation_tokens_total") == 0, "nobody asked for the first"
        asyncio.run(ask_and_leave(server))
        server.wait_for_log(r"ended: disconnect, \d+ tokens in, [\d.]+ s, key -")


def test_what_one_request_took(server: LiveServer) -> None:
    def sums() -> dict[str, float]:
        names = ("max_num_generation_tokens", "prefill_kv_computed_tokens", "prompt_tokens")
        return {name: server.metric(f"kvasir:request_{name}_sum") for name in names}

    before = sums()
    cached = server.metric("kvasir:prompt_tokens_cached_total")
    ask(server.url, n=3, max_tokens=4, messages=[{"role": "user", "content": "A prompt of some length, twice"}])
    ask(server.url, max_tokens=3, messages=[{"role": "user", "content": "A prompt of some length, twice"}])
    new = {name: value - before[name] for name, value in sums().items()}
    cached = server.metric("kvasir:prompt_tokens_cached_total") - cached
    assert new["max_num_generation_tokens"] == 4 + 3, "of several completions the longest"
    assert 0 < new["prefill_kv_computed_tokens"] == new["prompt_tokens"] - cached and cached > 0
    assert server.metric("kvasir:prompt_tokens_by_source_total", source="local_cache_hit") >= cached
    by_source = server.metric("kvasir:prompt_tokens_by_source_total")
    assert by_source == server.metric("kvasir:prompt_tokens_total"), "every token has one source"


def test_series_that_dashboards_of_vllm_read(server: LiveServer) -> None:
    metric = partial(metric_in, server.metrics())
    reasons = [metric("vllm:num_requests_waiting_by_reason", reason=reason) for reason in ("capacity", "deferred")]
    assert sum(reasons) == metric("vllm:num_requests_waiting")
    states = ("awake", "weights_offloaded", "discard_all")
    assert [metric("vllm:engine_sleep_state", sleep_state=state) for state in states] == [1, 0, 0]
    for name in ("lifetime", "idle_before_evict"):
        assert metric(f"vllm:kv_block_{name}_seconds_count") == metric("vllm:kv_block_evictions_total")
    assert metric("vllm:kv_block_reuse_gap_seconds_bucket", le="+Inf") >= 0
    (labels,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1.0$", server.metrics(), re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    assert (found["block_size"], found["cache_dtype"], found["engine"]) == ("16", "auto", "0")
    assert int(found["num_gpu_blocks"]) == metric("vllm:kv_cache_blocks")
    vllm = {"enable_prefix_caching", "gpu_memory_utilization", "num_cpu_blocks", "num_gpu_blocks_override"}
    vllm |= {"prefix_caching_hash_algo", "kv_cache_size_tokens", "mamba_cache_dtype", "sliding_window"}
    assert vllm <= found.keys()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed (.ci/run does it)")
def test_a_real_prometheus_scrapes_it(server: LiveServer, tmp_path: Path) -> None:
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [
            {"job_name": "kvasir", "static_configs": [{"targets": [server.url.removeprefix("http://")]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stderr=subprocess.DEVNULL)

    def names() -> set[str]:
        try:
            return set(web.get(f"{url}/label/__name__/values").json()["data"])
        except (httpx.HTTPError, ValueError):  # while it starts it answers with plain text
            return set()

    def missing() -> set[str]:
        found = names()
        return {name for name in documented_series() if name not in found and f"{name}_bucket" not in found}

    def answer(query: str) -> float | None:
        """None after a scrape that failed, as it may on a busy machine: then there is no value for now."""
        found = web.get(f"{url}/query", params={"query": query}).json()["data"]["result"]
        return float(found[0]["value"][1]) if len(found) == 1 else None

    try:
        url = f"http://127.0.0.1:{until(lambda: port_of(process.pid), 'a port')}/api/v1"
        until(lambda: not missing(), "a scrape, which becomes visible series by series", server)
        generated = "sum(kvasir:generation_tokens_total)"
        assert until(lambda: answer(generated), "the tokens that were generated", server) >= 10
        quantile = "histogram_quantile(0.95, sum by (le) (kvasir:time_to_first_token_seconds_bucket))"
        assert until(lambda: answer(quantile), "a quantile", server) > 0
    finally:
        process.terminate()
        process.wait(web.PATIENCE)


# ---------------------------------------------------------------- logs and traces


@pytest.mark.slow
def test_json_logs(starter_model: Path) -> None:
    options = {"log_format": "json", "enable_log_requests": True, "max_log_len": 20}
    with LiveServer.fake(starter_model, server=options) as server:
        reply = ask(server.wait_until_ready().url, stream=True, user="u-7")
        until(lambda: " ended: " in server.log, "the last line", server)
        lines = [json.loads(line) for line in server.log.splitlines()]
    mine = [line for line in lines if line.get("request_id") == reply.headers["x-request-id"]]
    assert [line["level"] for line in mine] == ["INFO", "INFO"]
    arrived, ended = mine
    assert (arrived["prompt_tokens"], arrived["user"], arrived["key"]) == (ended["prompt_tokens"], "u-7", "-")
    assert "prompts: ['<|im_start|>system" in arrived["message"] and "helpful" not in arrived["message"]
    assert (ended["completion_tokens"], ended["finish_reason"]) == (5, "length")
    assert 0 < ended["time_to_first_token"] <= ended["seconds"] and ended["time_per_token"] > 0


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OTLP exporter sends."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def test_traces(starter_model: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector.bodies = []  # type: ignore[attr-defined]
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    try:
        with LiveServer.fake(starter_model, server={"otlp_traces_endpoint": endpoint}) as server:
            url = f"{server.wait_until_ready().url}/v1/chat/completions"
            web.post(url, json=CHAT, headers={"traceparent": parent})
        (body,) = collector.bodies  # type: ignore[attr-defined]  # sent at the latest when the server ends
    finally:
        collector.shutdown()
    (span,) = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert span.trace_id.hex() == "ab" * 16 and span.parent_span_id.hex() == "cd" * 8
    facts = {each.key: each.value for each in span.attributes}
    assert facts["gen_ai.usage.completion_tokens"].int_value == 5


# ---------------------------------------------------------------- several API processes


def test_several_processes_share_an_engine(starter_model: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=True)  # type: ignore[arg-type]
    expected = echoed(tokenizer, ids, 5)  # type: ignore[arg-type]

    async def many(url: str) -> list[str]:
        async def one() -> str:
            async with httpx.AsyncClient(timeout=web.PATIENCE) as client:
                reply = await client.post(f"{url}/v1/chat/completions", json=CHAT)
                return str(reply.json()["choices"][0]["message"]["content"])

        return list(await asyncio.gather(*(one() for _ in range(40))))

    with several(starter_model) as server:
        url = server.wait_until_ready().url
        assert server.log.count("ready after") == 2, "ready means both processes"
        for _ in range(4):  # whichever process is asked, it tells how the engine started
            assert "engine: KV cache" in web.get(f"{url}/ready").json()["startup_seconds"]
        assert server.metric("kvasir:startup_seconds", phase="engine: KV cache") > 0
        assert set(asyncio.run(many(url))) == {expected}
        for _ in range(4):  # whichever process is asked, it tells of both
            until(lambda: server.metric("kvasir:generation_tokens_total") == 200, "both are counted")
            until(lambda: server.metric("kvasir:request_success_total") == 40, "both are counted")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        response = client.responses.create(model="fake", input="Hi", max_output_tokens=2)
        assert response.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError, match="--api-server-count"):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="share nothing"):
            client.responses.create(model="fake", input="Hi", background=True)
        server.process.terminate()
        assert server.wait() == 0


@pytest.mark.slow
def test_ready_means_all_processes(starter_model: Path) -> None:
    with several(starter_model) as server:
        url = server.wait_until_ready().url
        child, _ = server.children("api_process")
        os.kill(child, signal.SIGSTOP)
        try:
            until(lambda: web.get(f"{url}/ready").status_code == 503, "one stands still", server)
            assert web.get(f"{url}/ready").json()["reason"] == "1 of 2 API processes are ready"
            assert ask(url).status_code == 200
        finally:
            os.kill(child, signal.SIGCONT)
        server.wait_until_ready()


@pytest.mark.slow
def test_a_log_nobody_reads_stops_nothing(starter_model: Path) -> None:
    """The log is a full pipe from the start. Later it is read again, and says how many lines are missing."""
    reader, writer = os.pipe()
    seen: list[bytes] = []
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with (
        LiveServer.fake(starter_model, server={"port": port}, pipe=writer) as server,
        httpx.Client(timeout=web.PATIENCE, base_url=server.url) as client,
    ):
        server.wait_until_ready()
        for _ in range(3000):  # two lines each
            assert client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 200
        threading.Thread(target=lambda: read_all(reader, seen), daemon=True).start()
        until(lambda: b" ended: " in b"".join(seen), "it is read", seconds=30)
        client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
        dropped = rb"[1-9][0-9]+ log lines were dropped here"
        until(lambda: re.search(dropped, b"".join(seen)), "the drops are counted", seconds=30)
    os.close(writer)


def read_all(descriptor: int, into: list[bytes]) -> None:
    while data := os.read(descriptor, 65536):
        into.append(data)


@pytest.mark.slow
def test_a_killed_api_process_ends_the_server(starter_model: Path) -> None:
    with several(starter_model) as server:
        server.wait_until_ready()
        child, _ = server.children("api_process")
        os.kill(child, signal.SIGKILL)
        assert server.wait() == 1
        assert server.log.splitlines()[-1] == "kvasir: error: an API process ended unasked"


@contextmanager
def several(tokenizer: Path) -> Iterator[LiveServer]:
    """A server of two processes, whose port must be named: if somebody takes it before, another one."""
    for _ in range(10):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        with LiveServer.fake(tokenizer, server={"api_server_count": 2, "port": port}) as server:
            until(lambda: re.search("listening on |Cannot listen on ", server.log), "a port", server)
            if "Cannot listen on " not in server.log:
                yield server
                return
    raise AssertionError("no port stays free")
