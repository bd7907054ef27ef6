"""Keys and what they may ask for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvasir.errors import ConfigError
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server.api_keys import ANYBODY, ApiKey, load_keys
from kvasir.server.config import ServerConfig
from kvasir.server.errors import ApiError
from kvasir.server.limits import Bucket, RateLimits, TokenAccount


def key_file(tmp_path: Path, *entries: object, mode: int = 0o600) -> ServerConfig:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": list(entries)}))
    file.chmod(mode)
    return ServerConfig(api_key_file=str(file))


def test_nobody_is_asked_where_there_are_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)
    assert load_keys(ServerConfig()).find(None) is ANYBODY


def test_keys_of_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = load_keys(ServerConfig(api_key=["a", "b"]))
    assert [ring.find(word) and ring.find(word).name for word in ("a", "b", "c", "", None)] == [  # type: ignore[union-attr]
        *("key-1", "key-2", None, None, None)
    ]
    monkeypatch.setenv("KVASIR_API_KEY", "x,y")
    assert load_keys(ServerConfig()).find("y") is not None
    monkeypatch.delenv("KVASIR_API_KEY")
    monkeypatch.setenv("VLLM_API_KEY", "z")
    assert load_keys(ServerConfig()).find("z") is not None


def test_an_empty_key_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ([""], ["sk-real", ""]):
        with pytest.raises(ConfigError, match="--api-key is empty"):
            load_keys(ServerConfig(api_key=given))
    monkeypatch.setenv("KVASIR_API_KEY", " , ")
    with pytest.raises(ConfigError, match="KVASIR_API_KEY is set, but has no key in it"):
        load_keys(ServerConfig())
    monkeypatch.setenv("KVASIR_API_KEY", "x, y,")
    ring = load_keys(ServerConfig())
    assert [ring.find(word) is not None for word in ("x", "y", "", None)] == [True, True, False, False]


def test_a_key_file(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-b").hexdigest()
    config = key_file(
        tmp_path,
        {"name": "a", "key": "sk-a", "weight": 3, "requests_per_minute": 60, "max_concurrent": 2},
        {"name": "b", "sha256": digest, "tokens_per_minute": 10},
    )
    ring = load_keys(config)
    a, b = ring.find("sk-a"), ring.find("sk-b")
    assert a is not None and (a.name, a.weight, a.requests_per_minute, a.max_concurrent) == ("a", 3, 60, 2)
    assert b is not None and b.tokens_per_minute == 10
    assert "sk-a" not in repr(ring.keys), "keys are kept as digests"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "must have `keys:`"),
        (["x"], "is a mapping"),
        ([{"key": "k"}], "needs a name"),
        ([{"name": "a"}], "give key"),
        ([{"name": "a", "key": "k", "sha256": "0" * 64}], "one of them"),
        ([{"name": "a", "sha256": "zz"}], "64 hexadecimal digits"),
        ([{"name": "a", "key": "k", "wieght": 2}], "Did you mean weight"),
        ([{"name": "a", "key": "k", "weight": 0}], "weight must be a number above 0"),
        ([{"name": "a", "key": "k", "weight": 1e-9}], "weight must be from 0.001 to 1000"),
        ([{"name": "a", "key": "k", "requests_per_minute": "many"}], "requests_per_minute must be"),
        ([{"name": "a", "key": "k"}, {"name": "a", "key": "j"}], "same name"),
        ([{"name": "a", "key": "k"}, {"name": "b", "key": "k"}], "same key"),
    ],
)
def test_wrong_key_files(tmp_path: Path, entries: list[object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_keys(key_file(tmp_path, *entries))


def test_a_key_file_should_be_nobody_elses_to_read(tmp_path: Path, log_lines: list[str]) -> None:
    digests = {"name": "a", "sha256": "0" * 64}
    load_keys(key_file(tmp_path, digests, mode=0o644))
    load_keys(key_file(tmp_path, {"name": "a", "key": "k"}, mode=0o640))
    assert not log_lines
    load_keys(key_file(tmp_path, digests, {"name": "b", "key": "k"}, mode=0o644))
    assert "chmod o-r" in log_lines[0]


# ---------------------------------------------------------------- limits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_steadily() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.wait(1) == pytest.approx(1.0)
    clock.now = 10
    assert bucket.wait(10) == pytest.approx(0.0)
    clock.now = 1000
    assert bucket.wait(60) == 0.0
    bucket.take(200)
    assert bucket.wait(60) == pytest.approx(200.0), "what is owed is waited for"
    clock.now = 5000
    assert bucket.wait(10_000) == 0.0, "a full bucket will do for what is larger than it"


def refused(limits: RateLimits, key: ApiKey, tokens: int = 1) -> float | None:
    try:
        limits.admit(key, tokens)
    except ApiError as error:
        assert error.status == 429 and error.retry_after is not None
        return error.retry_after
    return None


def test_limits_of_a_key() -> None:
    clock = Clock()
    limits = RateLimits(clock=clock)
    key = ApiKey("a", requests_per_minute=2, tokens_per_minute=100)
    assert refused(limits, key, 30) is None and refused(limits, key, 30) is None
    assert refused(limits, key) == pytest.approx(30.0), "a third request in half a minute"
    limits.release(key, 100)
    clock.now = 30
    assert refused(limits, key, 60) == pytest.approx(42.0), "10 tokens are owed, 60 are asked for"
    assert refused(limits, ApiKey("b"), 10**9) is None, "a key without limits"


def test_requests_at_once_and_shares_of_processes() -> None:
    limits = RateLimits(num_processes=2)
    key = ApiKey("a", max_concurrent=4)
    assert [refused(limits, key) is None for _ in range(3)] == [True, True, False]
    limits.release(key, 0)
    assert refused(limits, key) is None


# ---------------------------------------------------------------- token accounting


def account(kind: RequestOutputKind, *prompts: int, interval: int = 1, **params: Any) -> TokenAccount:
    return TokenAccount(SamplingParams(output_kind=kind, **params), list(prompts), max_model_len=100, interval=interval)


def test_what_does_not_stream_is_reported_at_its_end() -> None:
    def output(reason: str) -> Any:
        return SimpleNamespace(metrics=None, prompt_token_ids=[1], outputs=[SimpleNamespace(finish_reason=reason)])

    assert account(RequestOutputKind.DELTA, 1).all_reported
    assert not account(RequestOutputKind.DELTA, 1, use_beam_search=True, n=2, temperature=0).all_reported
    two = account(RequestOutputKind.FINAL_ONLY, 1, 1)
    for reason, known in (("length", False), ("abort", False), ("stop", True)):
        two.close(output(reason))
        assert two.all_reported == known


def test_a_client_that_leaves_early_is_charged_what_is_not_reported() -> None:
    final, delta = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
    assert account(final, 10, max_tokens=50, n=2, best_of=4).num_charged(left_early=True) == 200
    assert account(final, 10, max_tokens=None).num_charged(left_early=True) == 90, "what the context has room for"
    two = account(final, 10, 30, max_tokens=80)
    assert two.num_charged(left_early=True) == 80 + 70
    two.close(RequestOutput("r", None, [1] * 30, None, [CompletionOutput(0, "", [], finish_reason="stop")], True))
    assert two.num_charged(left_early=True) == 80
    two.close(RequestOutput("r", None, [1] * 10, None, [CompletionOutput(0, "", [], finish_reason="abort")], True))
    assert two.num_charged(left_early=True) == 80, "an abort reports no tokens"
    assert account(delta, 10, max_tokens=50).num_charged(left_early=True) == 0, "a stream reports all of them"
    assert account(delta, 10, max_tokens=50, n=2, stream_interval=8).num_charged(left_early=True) == 14
    assert account(delta, 10, max_tokens=50, n=2, interval=1000).num_charged(left_early=True) == 100
    assert account(delta, 10, max_tokens=50, n=2, use_beam_search=True).num_charged(left_early=True) == 100
