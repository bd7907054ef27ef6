"""Measures an OpenAI-compatible server under open-loop loads: token ids in, streamed completions out.

    python loads.py --url http://127.0.0.1:8000 --label kvasir --out results.jsonl          all named loads
    python loads.py --loads rate16,bursts                                                   some of them
    python loads.py --rate 8 --requests 100 --input 256 --output 64 --shared 0              a load of your own
    python loads.py --sweep 4,8,16,32                                                       one load at several rates

Each load prints one RESULT line. The standard library is enough (Python 3.11), so the file can be carried anywhere.
During a load the client only notes when bytes arrive; it reads them afterwards, so that it costs little itself.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import gc
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MARK = "RESULT "
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 100_000
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
CURVE = [*range(0, 90, 5), *range(90, 100), 99.5, 99.9, 100]  # percentiles of the report's latency curves
NO_GAP_OVER = {"gaps.max": 100.0}
# Counters that a load may not raise, and others that explain its figures.
LATE = ("kvasir:late_compilations_total", "kvasir:late_captures_total")
COUNTERS = (
    *LATE,
    *("kvasir:num_preemptions_total", "kvasir:prefix_cache_queries_total", "kvasir:prefix_cache_hits_total"),
    *("vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
)

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the loads use no proxy either

Record = dict[str, Any]


# ---------------------------------------------------------------- loads


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent and when. Lengths are drawn from half to one and a half of `input` and `output`."""

    rate: float = 16.0  # requests per second, Poisson arrivals
    requests: int = 320
    input: int = 512
    output: int = 128
    shared: int = 0  # tokens that all prompts begin with, on top of `input`
    burst: int = 1  # requests that arrive at once
    every: float = 0.0  # seconds between bursts; 0 means Poisson arrivals
    long_input: int = 0  # length of a further prompt that arrives every second
    long_output: int = 64
    mixed: bool = False  # random sampling parameters instead of plain greedy requests
    target: Mapping[str, float] = field(default_factory=dict)  # upper limits in ms, such as "ttft.p99"


def limits(*values: float) -> dict[str, float]:
    names = ("ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "gaps.p99", "gaps.max")
    return dict(zip(names, values, strict=True))


# The targets are for one H200 and the shape of Llama-3.1-8B in bf16, from the first request after /ready.
LOADS = {
    "rate16": Load(target=limits(28, 75, 5.5, 6.5, 19, 50)),
    "rate32": Load(rate=32, target=limits(45, 120, 8.0, 11, 30, 70)),
    "shared32": Load(rate=32, shared=1536, target=limits(28, 75, 6.7, 8.0, 19, 50)),
    "bursts": Load(burst=64, every=4.0, target=NO_GAP_OVER),
    "long_prompt": Load(input=64, output=256, long_input=4000, target=NO_GAP_OVER),
    "mixed": Load(mixed=True, target=NO_GAP_OVER),
}


@dataclass(frozen=True)
class Request:
    at: float  # seconds after the start of the load
    tokens: int  # tokens the answer must have
    body: Mapping[str, Any]
    is_long: bool = False


def make_requests(name: str, load: Load, seed: int, prompt_seed: int, last_token_id: int) -> list[Request]:
    """The requests of a load, in the order of their arrival.

    Arrivals, lengths and parameters follow from `seed` alone, so that all engines get the same. The token ids follow
    from `prompt_seed` too, which differs from run to run, so that no prompt is in the prefix cache by accident.
    """
    shape, tokens = random.Random(f"{name} {seed}"), random.Random(f"{name} {seed} {prompt_seed}")
    vocabulary = range(FIRST_TOKEN_ID, last_token_id + 1)
    common = tokens.choices(vocabulary, k=load.shared)
    found, at = [], 0.0
    for index in range(load.requests):
        at = load.every * (index // load.burst) if load.every else at + shape.expovariate(load.rate)
        prompt = common + tokens.choices(vocabulary, k=_around(shape, load.input))
        count = _around(shape, load.output)
        extra = sampling(shape, count, vocabulary) if load.mixed else {}
        found.append(Request(at, count, {"prompt": prompt, "max_tokens": count, "temperature": 0, **extra}))
    if load.long_input:
        for second in range(1, int(at) + 1):
            prompt = tokens.choices(vocabulary, k=load.long_input)
            body = {"prompt": prompt, "max_tokens": load.long_output, "temperature": 0}
            found.append(Request(float(second), load.long_output, body, is_long=True))
    return sorted(found, key=lambda request: request.at)


def _around(rng: random.Random, length: int) -> int:
    return max(1, rng.randint(length // 2, length * 3 // 2))


def sampling(rng: random.Random, count: int, vocabulary: Sequence[int]) -> Record:
    """Random sampling parameters; about one request in 60 has none of them."""
    parameters: list[Record] = [
        {"temperature": rng.choice([0.5, 0.7, 1.0])},
        {"presence_penalty": rng.choice([-0.5, 0.5, 1.0]), "frequency_penalty": rng.choice([0.1, 0.5])},
        {"repetition_penalty": rng.choice([1.05, 1.2])},
        rng.choice([{"top_p": 0.9}, {"top_p": 0.95, "top_k": 50}, {"top_k": 20}, {"min_p": 0.05}]),
        {"logprobs": rng.choice([0, 1, 5])},
        {"seed": rng.randrange(1 << 31)},
        {"min_tokens": rng.randint(1, count)},
        {"logit_bias": {str(token): rng.choice([-100, -1, 1, 5]) for token in rng.sample(vocabulary, 8)}},
    ]
    chosen: Record = {}
    for each in parameters:
        if rng.random() < 0.4:
            chosen |= each
    return chosen


# ---------------------------------------------------------------- sending


class Reply(asyncio.Protocol):
    """The bytes of one HTTP response and when they arrived."""

    def __init__(self) -> None:
        self.reads: list[tuple[float, bytes]] = []
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))
        if data.endswith(b"0\r\n\r\n"):  # the end of a chunked response, for servers that do not close
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)


@dataclass
class Sent:
    """A request that was sent, with the raw response."""

    request: Request
    start: float = 0.0
    late: float = 0.0  # seconds after the time it should have been sent at
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Server:
    url: str  # without /v1
    model: str
    key: str | None = None
    timeout: float = 300.0

    def message(self, request: Request) -> bytes:
        usual = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = json.dumps(usual | dict(request.body)).encode()
        parts = urlsplit(self.url)
        lines = [f"POST {parts.path}/v1/completions HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "Accept: text/event-stream"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def send(self, message: bytes, sent: Sent) -> None:
        """Send on a connection of its own and wait for the end of the answer."""
        parts, loop = urlsplit(self.url), asyncio.get_running_loop()
        secure = parts.scheme == "https"
        sent.start = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout):
                port = parts.port or (443 if secure else 80)
                transport, reply = await loop.create_connection(Reply, parts.hostname or "", port, ssl=secure or None)
                sent.reads = reply.reads
                try:
                    transport.write(message)
                    await reply.is_over
                finally:
                    transport.abort()
        except TimeoutError:
            sent.error = f"no end of the answer within {self.timeout:g} s"
        except OSError as error:
            sent.error = f"cannot connect: {error}"


async def run_load(server: Server, requests: Sequence[Request]) -> tuple[list[Sent], float, float]:
    """All requests with their answers, the seconds that took, and the share of a core that this client used."""
    messages = [server.message(request) for request in requests]
    sent = [Sent(request) for request in requests]
    gc.collect()
    gc.disable()  # a collection in the midst of a load would be seen as a gap
    tasks, start, cpu = [], time.perf_counter(), time.process_time()
    try:
        for message, each in zip(messages, sent, strict=True):
            if (wait := start + each.request.at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            each.late = max(0.0, time.perf_counter() - start - each.request.at)
            tasks.append(asyncio.create_task(server.send(message, each)))
        await asyncio.gather(*tasks)
    finally:
        gc.enable()
    seconds = time.perf_counter() - start
    return sent, seconds, (time.process_time() - cpu) / seconds


# ---------------------------------------------------------------- reading answers


@dataclass(frozen=True)
class Answer:
    """Times in seconds; `error` says what is wrong with the answer, and then nothing else counts."""

    error: str | None = None
    ttft: float = 0.0
    tpot: float | None = None  # None for an answer in one chunk, which tells nothing
    gaps: Sequence[float] = ()
    tokens: int = 0
    chunks: int = 0
    is_long: bool = False


def read_answer(sent: Sent) -> Answer:
    if sent.error:
        return Answer(sent.error)
    try:
        status, lines = read_lines(sent.reads)
    except ValueError as error:
        return Answer(str(error))
    if status != 200:
        return Answer(f"HTTP {status}: {b' '.join(line for _, line in lines)[:200].decode(errors='replace')}")
    times, used, is_done = [], None, False
    for at, line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            is_done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            return Answer(f"not JSON: {data[:100].decode(errors='replace')}")
        if event.get("error"):
            return Answer(f"in the stream: {json.dumps(event['error'])[:200]}")
        used = (event.get("usage") or {}).get("completion_tokens", used)
        if event.get("choices"):
            times.append(at)
    if not is_done or not times:
        return Answer("the stream ended early")
    tokens = sent.request.tokens if used is None else used
    if tokens != sent.request.tokens:
        return Answer(f"an answer of {tokens} tokens where {sent.request.tokens} were asked for")
    tpot = (times[-1] - times[0]) / (tokens - 1) if tokens > 1 and len(times) > 1 else None
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Answer(None, times[0] - sent.start, tpot, gaps, tokens, len(times), sent.request.is_long)


def read_lines(reads: Sequence[tuple[float, bytes]]) -> tuple[int, list[tuple[float, bytes]]]:
    """The status of an HTTP response and the lines of its body, each with the time when its end had arrived."""
    raw = b"".join(data for _, data in reads)
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator:
        raise ValueError("the connection closed before an answer")
    ends, total = [], 0
    for _, data in reads:
        total += len(data)
        ends.append(total)
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    pieces = _chunks(raw, len(head) + 4) if is_chunked else _reads(ends, len(head) + 4, raw)
    lines, pending = [], b""
    for end, piece in pieces:
        at = reads[min(bisect.bisect_left(ends, end), len(reads) - 1)][0]
        *whole, pending = (pending + piece).split(b"\n")
        lines += [(at, line.rstrip(b"\r")) for line in whole]
    if pending:
        lines.append((reads[-1][0], pending))
    return int(head.split(b" ", 2)[1]), lines


def _chunks(raw: bytes, at: int) -> Iterable[tuple[int, bytes]]:
    """The chunks of a chunked body, each with the offset of its end."""
    while True:
        end = raw.find(b"\r\n", at)
        if end < 0:
            return  # cut off; the missing [DONE] tells
        size = int(raw[at:end].split(b";")[0], 16)
        if size == 0:
            return
        at = end + 2 + size + 2
        yield at - 2, raw[end + 2 : at - 2]


def _reads(ends: Sequence[int], start: int, raw: bytes) -> Iterable[tuple[int, bytes]]:
    for end in ends:
        if end > start:
            yield end, raw[start:end]
            start = end


# ---------------------------------------------------------------- figures


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(seconds: Iterable[float]) -> dict[str, float | None]:
    """Percentiles in milliseconds."""
    ordered = sorted(seconds)
    return {name: round(1e3 * percentile(ordered, p), 2) if ordered else None for name, p in PERCENTILES.items()}


def curve(seconds: Iterable[float]) -> list[float]:
    """Milliseconds at each percentile of CURVE; nothing without measurements."""
    ordered = sorted(seconds)
    return [round(1e3 * percentile(ordered, p / 100), 2) for p in CURVE] if ordered else []


def missed(record: Mapping[str, Any], target: Mapping[str, float]) -> list[str]:
    """The limits that a load did not keep, in words."""
    found = []
    for name, limit in target.items():
        group, _, key = name.partition(".")
        value = record[group][key]
        if value is None or value > limit:
            found.append(f"{name} {'unknown' if value is None else f'{value:g}'} > {limit:g}")
    return found


def figures(sent: Sequence[Sent], seconds: float, target: Mapping[str, float]) -> Record:
    answers = [read_answer(each) for each in sent]
    good = [answer for answer in answers if answer.error is None]
    tokens, chunks = sum(answer.tokens for answer in good), sum(answer.chunks for answer in good)
    ttft = [answer.ttft for answer in good]
    tpot = [answer.tpot for answer in good if answer.tpot is not None]
    gaps = [gap for answer in good for gap in answer.gaps]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    record: Record = {
        "seconds": round(seconds, 2),
        "out_tok_s": round(tokens / seconds, 1),
        "tokens_per_chunk": round(tokens / chunks, 2) if chunks else None,
        "ttft": summary(ttft),
        "tpot": summary(tpot),
        "gaps": summary(gaps),
        "errors": len(answers) - len(good),
        "errors_by_kind": dict(errors.most_common(5)),
        "late_ms_p99": summary(each.late for each in sent)["p99"],
        "curve": {"percentiles": CURVE, "ttft": curve(ttft), "tpot": curve(tpot), "gaps": curve(gaps)},
    }
    if any(answer.is_long for answer in good):
        record["ttft_long"] = summary(answer.ttft for answer in good if answer.is_long)
    return record | {"target": dict(target), "missed": missed(record, target)}


def judge(record: Record, before: Mapping[str, float], after: Mapping[str, float]) -> Record:
    """Add the counters' increase during the load, and whether the load kept its target; None if it has none."""
    counted = {name: after[name] - before.get(name, 0.0) for name in after}
    late = [f"{name} +{counted[name]:g}" for name in LATE if counted.get(name)]
    errors = [f"{record['errors']} errors"] if record["errors"] else []
    problems = [*record["missed"], *late, *errors]
    return record | {"counters": counted, "missed": problems, "holds": not problems if record["target"] else None}


# ---------------------------------------------------------------- the server and the machine


def get(url: str, key: str | None = None, timeout: float = 10.0) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with DIRECT.open(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
        return str(response.read().decode())


def served_model(url: str) -> Record:
    """The first entry of /v1/models."""
    cards: list[Record] = json.loads(get(f"{url}/v1/models", os.environ.get("OPENAI_API_KEY")))["data"]
    return cards[0]


def ask(url: str, key: str | None = None) -> Any:
    """The JSON at an address that not every server has; None where there is none."""
    try:
        return json.loads(get(url, key))
    except (OSError, ValueError):
        return None


def counters(url: str, key: str | None = None) -> dict[str, float]:
    """The counters of /metrics that matter here, each the sum of its series; empty where there is no /metrics."""
    try:
        page = get(f"{url}/metrics", key)
    except OSError:
        return {}
    found: dict[str, float] = {}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in COUNTERS:
            found[name] = found.get(name, 0.0) + float(line.rpartition("}")[2].split()[-1])
    return found


def wait_until_ready(url: str, seconds: float) -> None:
    """Wait for /ready, or /health of a server that has no /ready."""
    end = time.monotonic() + seconds
    while not is_ready(url):
        if time.monotonic() > end:
            raise SystemExit(f"{url} is not ready after {seconds:g} s")
        time.sleep(0.02)


def is_ready(url: str) -> bool:
    try:
        get(f"{url}/ready", timeout=5)
        return True
    except urllib.error.HTTPError as error:
        if error.code not in (404, 405):
            return False
    except OSError:
        return False
    try:
        get(f"{url}/health", timeout=5)
        return True
    except OSError:
        return False


def stamp() -> Record:
    """Where, when and from what the figures come."""
    now = datetime.now(UTC)
    gpu, _, driver = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").partition(", ")
    root = str(Path(__file__).parent)
    commit = os.environ.get("KVASIR_COMMIT") or _output("git", "-C", root, "rev-parse", "--short=10", "HEAD")
    return {
        "run": now.strftime("%Y%m%dT%H%M%SZ"),
        "date": now.isoformat(timespec="seconds"),
        "commit": commit,
        "machine": gpu or f"{cpu_name()}, {os.cpu_count()} cores",
        "driver": driver.partition("\n")[0],
    }


def cpu_name(path: str = "/proc/cpuinfo") -> str:
    """The name of the CPU with family and model, because virtual machines often hide the name."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    rows = (row.partition(":") for row in reversed(text.splitlines()))
    fields = {name.strip(): value.strip() for name, _, value in rows}
    numbers = [f"{key.removeprefix('cpu ')} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return f"{fields.get('model name', platform.machine())} ({' '.join(numbers)})"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# ---------------------------------------------------------------- the record


def append(records: Iterable[Record], path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_records(paths: Iterable[Path]) -> list[Record]:
    """The records of some files, in order; a file that does not exist has none."""
    lines = [line for path in paths if path.is_file() for line in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines if line.strip()]


def line(record: Mapping[str, Any]) -> str:
    """A record in one line for people."""
    ttft, tpot, gaps = record["ttft"], record["tpot"], record["gaps"]
    return (
        f"{record['label']} {record['load']:<12} TTFT {ttft['p50']} / {ttft['p99']}  "
        f"per token {tpot['p50']} / {tpot['p99']}  gaps {gaps['p99']} / {gaps['max']}  "
        f"{record['out_tok_s']:,} tok/s: {verdict(record)}"
    )


def verdict(record: Mapping[str, Any]) -> str:
    if record["missed"]:
        return "MISSED " + "; ".join(record["missed"])
    return "holds" if record["holds"] else "no target"


# ---------------------------------------------------------------- the command


def chosen(arguments: argparse.Namespace) -> dict[str, Load]:
    """The loads that the arguments name."""
    shape = {key: getattr(arguments, key) for key in ("input", "output", "shared")}
    own = Load(**{key: value for key, value in shape.items() if value is not None})
    found: dict[str, Load] = {}
    if arguments.loads or not (arguments.rate or arguments.sweep):
        names = arguments.loads.split(",") if arguments.loads else list(LOADS)
        if unknown := set(names) - set(LOADS):
            raise SystemExit(f"--loads: there is no {', '.join(sorted(unknown))}; there are {', '.join(LOADS)}")
        if any(value is not None for value in shape.values()) and not (arguments.rate or arguments.sweep):
            raise SystemExit("--input, --output and --shared belong to --rate or --sweep; named loads have their own")
        for name in names:
            limited = {} if arguments.requests is None else {"requests": arguments.requests, "target": {}}
            found[name] = replace(LOADS[name], **limited)
    if arguments.rate:
        found["own"] = replace(own, rate=arguments.rate, requests=arguments.requests or own.requests)
    for rate in map(float, filter(None, (arguments.sweep or "").split(","))):
        requests = arguments.requests or max(1, round(rate * arguments.sweep_seconds))
        found[f"sweep@{rate:g}"] = replace(own, rate=rate, requests=requests)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loads", metavar="NAMES", help=f"comma-separated; default: all of {','.join(LOADS)}")
    parser.add_argument("--rate", type=float, help="requests per second of a load of your own")
    parser.add_argument("--sweep", metavar="RATES", help="one load at each of these rates, such as 4,8,16,32")
    parser.add_argument("--sweep-seconds", type=float, default=20, help="of arrivals at each rate (default: 20)")
    parser.add_argument("--requests", type=int, help="of each load; a named load that is cut has no target")
    parser.add_argument("--input", type=int, help="tokens in, half to one and a half (default: 512)")
    parser.add_argument("--output", type=int, help="tokens out, half to one and a half (default: 128)")
    parser.add_argument("--shared", type=int, help="tokens that all prompts begin with (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and parameters (default: 0)")
    parser.add_argument("--prompt-seed", type=int, help="of the token ids; default: the time, so that runs differ")
    parser.add_argument("--last-token-id", type=int, default=LAST_TOKEN_ID, help="default: 100000; set it below vocab")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between loads (default: 1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each request (default: 300)")
    parser.add_argument("--note", help="kept in the record")


def measure(arguments: argparse.Namespace, url: str, more: Mapping[str, Any], out: Path | None) -> list[Record]:
    """Run the chosen loads on a server; print and keep a record of each."""
    loads, key = chosen(arguments), os.environ.get("OPENAI_API_KEY")
    card = served_model(url)
    prompt_seed = time.time_ns() if arguments.prompt_seed is None else arguments.prompt_seed
    common = {
        **more,
        "model": card["id"],
        "max_model_len": card.get("max_model_len"),
        "version": (ask(f"{url}/version", key) or {}).get("version"),
        "seed": arguments.seed,
        "prompt_seed": prompt_seed,
        "note": arguments.note,
        **stamp(),
    }
    server, records = Server(url, card["id"], key, arguments.timeout), []
    for position, (name, load) in enumerate(loads.items()):
        time.sleep(arguments.pause if position else 0)
        requests = make_requests(name, load, arguments.seed, prompt_seed, arguments.last_token_id)
        before = counters(url, key)
        sent, seconds, cpu = asyncio.run(run_load(server, requests))
        figured = judge(figures(sent, seconds, load.target), before, counters(url, key))
        shape = asdict(load)
        del shape["target"]
        record = {"load": name, "position": position, **shape, "client_cpu": round(cpu, 2), **figured, **common}
        records.append(record)
        print(MARK + json.dumps({key: value for key, value in record.items() if key != "curve"}), flush=True)
        if out is not None:
            append([record], out)
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, without /v1")
    parser.add_argument("--label", default="", help="name of the engine in the record")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines are appended, with latency curves")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="for /ready, or /health")
    add_arguments(parser)
    arguments = parser.parse_args()
    url = arguments.url.rstrip("/").removesuffix("/v1")
    if arguments.wait:
        wait_until_ready(url, arguments.wait)
    try:
        records = measure(arguments, url, {"label": arguments.label}, arguments.out)
    except OSError as error:
        raise SystemExit(f"{url} does not answer: {error}") from None
    for record in records:
        print(line(record))
    return 0 if all(record["errors"] == 0 for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
