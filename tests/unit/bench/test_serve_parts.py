"""The parts of a load test that need no server: arrivals, answers off the wire, prompts and datasets, figures."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest

from kvasir.bench.serve import datasets
from kvasir.bench.serve.client import TimedAnswer
from kvasir.bench.serve.datasets import PrefixRepetition, Prompt, PromptMaker, Random
from kvasir.bench.serve.load import Arrivals, Outcome, from_trace
from kvasir.bench.serve.results import Goodput, measure
from kvasir.errors import ConfigError
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(starter_model: Path) -> Tokenizer:
    return load_tokenizer(starter_model)


# ---------------------------------------------------------------- arrivals


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_gaps_have_the_asked_mean_and_spread(burstiness: float, variation: float) -> None:
    times = Arrivals(rate=20, burstiness=burstiness).times(20_000, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert mean(gaps) == pytest.approx(1 / 20, rel=0.08)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.08)


def test_no_rate_is_all_at_once_and_seeds_repeat() -> None:
    assert Arrivals().times(3) == [0, 0, 0]
    assert Arrivals(5).times(50, 7) == Arrivals(5).times(50, 7) != Arrivals(5).times(50, 8)


@pytest.mark.parametrize("ramp", ["linear", "exponential"])
def test_a_ramp_grows_from_one_rate_to_the_other(ramp: str) -> None:
    times = Arrivals(10, burstiness=1000, ramp=ramp, end_rate=100).times(2000)
    gaps = [b - a for a, b in pairwise(times)]
    assert mean(gaps[:20]) == pytest.approx(1 / 10, rel=0.1)
    assert mean(gaps[-20:]) == pytest.approx(1 / 100, rel=0.1)


def test_a_trace_keeps_its_times_at_another_speed() -> None:
    assert from_trace([100.0, 101.0, 103.0], 2.0) == [0.0, 0.5, 1.5]
    with pytest.raises(ConfigError, match="--trace-speedup must be more than 0"):
        from_trace([1.0], 0)


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"burstiness": -1}, {"rate": 5, "ramp": "linear"}, {"rate": math.nan}])
def test_impossible_arrivals_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Arrivals(**wrong)


# ---------------------------------------------------------------- answers


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


STREAM = (
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    + event(choices=[{"index": 0, "delta": {"content": "Hé"}}])
    + event(choices=[{"index": 0, "delta": {"content": "llo"}, "finish_reason": "stop"}])
    + event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11})
    + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_an_answer_is_the_same_however_its_bytes_are_cut(size: int) -> None:
    answer = TimedAnswer(keep_text=True)
    answer.status = 200
    for i in range(0, len(STREAM), size):
        answer.feed(float(i), STREAM[i : i + size])
    answer.end(5000.0)
    assert answer.ok and "".join(answer.text or []) == "Héllo"
    assert (answer.num_tokens, len(answer.times)) == (4, 2)
    assert answer.usage is not None and answer.usage.prompt_tokens == 7


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "no such thing", "code": 1}}', "HTTP 400: no such thing"),
        (502, b"<html>gateway</html>", "HTTP 502: <html>gateway</html>"),
        (200, event(choices=[{"text": "a"}]), "ended before it was complete"),
        (200, event(error={"message": "the engine died"}) + b"data: [DONE]\n\n", "the engine died"),
        (200, b"data: nonsense\n\ndata: [DONE]\n\n", "not a chunk of OpenAI's API"),
        (200, event(choices=[]) + b"data: [DONE]\n\n", "the answer has no tokens"),
    ],
)
def test_what_went_wrong_is_told(status: int, body: bytes, message: str) -> None:
    answer = TimedAnswer()
    answer.status = status
    answer.feed(1.0, body)
    answer.end(2.0)
    assert not answer.ok and message in answer.error


# ---------------------------------------------------------------- figures


def timed_answer(times: list[float], tokens: int, ended: float) -> TimedAnswer:
    answer = TimedAnswer()
    answer.status, answer.done = 200, True
    answer.times.extend(times)
    answer.feed(0.0, event(choices=[], usage={"prompt_tokens": 10, "completion_tokens": tokens}))
    answer.end(ended)
    return answer


def test_figures_are_what_their_names_say() -> None:
    slow = timed_answer([0.2, 0.3, 0.6], tokens=3, ended=0.6)  # 200 ms per token after the first
    quick = timed_answer([0.1, 0.2, 0.3], tokens=5, ended=0.3)  # 50 ms, in chunks of more than one
    failed = TimedAnswer()
    failed.fail(1.0, "no")
    outcome = Outcome([slow, quick, failed], seconds=2.0, client_cpu=0.1, peak=3)
    prompts = [Prompt([1] * 4, 4, 3)] * 3
    record = measure(
        outcome, prompts, ["ttft", "tpot", "itl", "e2el"], [50, 99], Goodput.parse(["ttft:150", "tpot:60"])
    )
    assert (record["completed"], record["failed"]) == (2, 1)
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (20, 8)
    assert (record["output_throughput"], record["total_token_throughput"]) == (4.0, 14.0)
    assert (record["request_throughput"], record["request_goodput"]) == (1.0, 0.5)
    assert record["mean_ttft_ms"] == pytest.approx(150) and record["p50_e2el_ms"] == pytest.approx(450)
    assert record["mean_tpot_ms"] == pytest.approx(125)
    assert record["mean_itl_ms"] == pytest.approx(150) and record["p99_itl_ms"] == pytest.approx(294)
    assert record["tokens_per_chunk"] == pytest.approx(8 / 6)
    assert record["errors_by_kind"] == {"no": 1}


def test_nothing_answered_is_a_result_too() -> None:
    failed = TimedAnswer()
    failed.fail(1.0, "no")
    record = measure(Outcome([failed], 1.0, 0.0, 1), [Prompt("x", 1, 1)], ["ttft"], [99], None)
    assert record["completed"] == 0 and record["mean_ttft_ms"] is None and record["request_goodput"] is None


@pytest.mark.parametrize("word", ["speed:1", "ttft", "ttft:fast", "itl:3"])
def test_a_goodput_limit_that_is_none(word: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput {word}"):
        Goodput.parse([word])


# ---------------------------------------------------------------- prompts


def test_random_lengths_stay_in_their_range_and_share_the_prefix(tokenizer: Tokenizer) -> None:
    dataset = Random(input_len=40, output_len=20, range_ratio=0.5, prefix_len=8)
    made = dataset.prompts(PromptMaker(tokenizer, seed=3), 200)
    assert made == dataset.prompts(PromptMaker(tokenizer, seed=3), 200)
    lengths = {prompt.num_tokens - 8 for prompt in made}
    assert min(lengths) >= 20 and max(lengths) <= 60 and len(lengths) > 20
    assert {min(p.max_tokens for p in made) >= 10, max(p.max_tokens for p in made) <= 30} == {True}
    assert len({tuple(prompt.content[:8]) for prompt in made}) == 1
    special = set(tokenizer.all_special_ids)
    assert not any(special & set(prompt.content) for prompt in made)  # type: ignore[arg-type]


def test_random_text_has_about_the_length_asked_for(tokenizer: Tokenizer) -> None:
    made = Random(input_len=64, output_len=1).prompts(PromptMaker(tokenizer, as_text=True), 5)
    for prompt in made:
        assert isinstance(prompt.content, str)
        assert len(tokenizer.encode(prompt.content)) == pytest.approx(64, abs=12)


def test_prefix_repetition_has_so_many_prefixes(tokenizer: Tokenizer) -> None:
    made = PrefixRepetition(prefix_len=6, suffix_len=4, num_prefixes=3, output_len=5).prompts(
        PromptMaker(tokenizer), 30
    )
    assert len({tuple(prompt.content[:6]) for prompt in made}) == 3
    assert len({tuple(prompt.content) for prompt in made}) == 30


def test_sonnet_prompts_share_their_first_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("\n".join(f"Line {i}, and what it says of the {i * i} days" for i in range(80)))
    dataset = datasets.sonnet(str(poem), input_len=200, prefix_len=60, output_len=9)
    made = dataset.prompts(PromptMaker(tokenizer), 10)
    assert all(170 <= prompt.num_tokens <= 200 and prompt.max_tokens == 9 for prompt in made)
    assert len({str(prompt.content)[:100] for prompt in made}) == 1 and len({p.content for p in made}) == 10
    with pytest.raises(ConfigError, match="is too short for a prefix"):
        datasets.sonnet(str(poem), input_len=50).prompts(PromptMaker(tokenizer), 1)


def test_sharegpt_takes_lengths_from_the_known_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "Tell me of the sea, please."},
        {"from": "gpt", "value": "It is wide and blue."},
    ]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": []}]))
    made = datasets.sharegpt(str(file)).prompts(PromptMaker(tokenizer), 3)
    assert [prompt.content for prompt in made] == ["Tell me of the sea, please."] * 3, "too few are sent again"
    assert made[0].max_tokens == len(tokenizer.encode("It is wide and blue.", add_special_tokens=False))
    assert datasets.sharegpt(str(file), output_len=4).prompts(PromptMaker(tokenizer), 1)[0].max_tokens == 4
    file.write_text("{}")
    with pytest.raises(ConfigError, match="format of ShareGPT|has no conversation"):
        datasets.sharegpt(str(file))
    with pytest.raises(ConfigError, match=r"^--dataset-path /nope cannot be read"):
        datasets.sharegpt("/nope")


# ---------------------------------------------------------------- traces


def test_azure_trace(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,30,9\n"
    )
    trace = datasets.trace(str(file))
    made = trace.prompts(PromptMaker(tokenizer), 10)
    assert [(prompt.num_tokens, prompt.max_tokens) for prompt in made] == [(374, 44), (30, 9)]
    assert made[1].at - made[0].at == pytest.approx(4.314579)  # type: ignore[operator]
    assert len(datasets.trace(str(file), max_model_len=100).fitting) == 1
    with pytest.raises(ConfigError, match="Every request of the trace is longer"):
        datasets.trace(str(file), max_model_len=10).prompts(PromptMaker(tokenizer), 1)
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n")
    with pytest.raises(ConfigError, match="line 2: not a line of an Azure trace"):
        datasets.trace(str(file))


def test_mooncake_blocks_of_one_name_are_equal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 1100, "output_length": 6, "hash_ids": [0, 7, 8]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = datasets.trace(str(file)).prompts(PromptMaker(tokenizer), 2)
    assert (first.at, second.at) == (0.0, 3.0), "in the order of time"
    assert (len(first.content), len(second.content)) == (1100, 1300)
    assert first.content[:512] == second.content[:512] and first.content[512:1024] != second.content[512:1024]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("AzureLLMInferenceTrace_code.csv", 8819),
        ("AzureLLMInferenceTrace_conv.csv", 19366),
        ("mooncake_conversation_trace.jsonl", 12031),
        ("mooncake_synthetic_trace.jsonl", 3993),
    ],
)
def test_real_traces_are_read_whole(test_data: Path, name: str, count: int) -> None:
    entries = datasets.trace(str(test_data / "traces" / name)).entries
    assert len(entries) == count
    assert all(a.at <= b.at for a, b in pairwise(entries))
