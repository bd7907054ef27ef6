"""Workloads are the same on every machine, and those named after the peers' are the peers'."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from kvasir.bench.workloads import BenchRequest, Span, cut, mixed, named, read_jsonl, uniform
from kvasir.errors import ConfigError

VOCAB = 151_936


def peers() -> ModuleType:
    file = Path(os.environ.get("KVASIR_TEST_DATA") or "nowhere").parent / "peers" / "cpu" / "scripts" / "workloads.py"
    if not file.is_file():
        pytest.skip(f"there is no {file}")
    spec = importlib.util.spec_from_file_location("peer_workloads", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(requests: list[BenchRequest]) -> list[tuple[list[int], int]]:
    return [(request.prompt_token_ids, request.max_tokens) for request in requests]


@pytest.mark.parametrize("salt", [0, 1, 17])
def test_mixed_is_the_peers_w3(salt: int) -> None:
    assert plain(mixed(64, VOCAB, salt)) == peers().w3(salt)
    assert plain(mixed(32, VOCAB, salt)) == peers().w3(salt)[:32]


def test_mixed_has_the_lengths_and_ids_it_always_had() -> None:
    requests = mixed(32, VOCAB)
    assert sum(len(r.prompt_token_ids) for r in requests) == 5313
    assert sum(r.max_tokens for r in requests) == 2236
    assert requests[0].prompt_token_ids[:4] == mixed(1, VOCAB)[0].prompt_token_ids[:4]


def test_a_salt_changes_ids_but_not_lengths() -> None:
    one, other = mixed(8, VOCAB, 0), mixed(8, VOCAB, 1)
    assert [len(r.prompt_token_ids) for r in one] == [len(r.prompt_token_ids) for r in other]
    assert [r.max_tokens for r in one] == [r.max_tokens for r in other]
    assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("vocab_size", [2, 300, 301, 512, VOCAB])
def test_ids_are_in_the_vocabulary(vocab_size: int) -> None:
    for requests in (mixed(4, vocab_size), uniform(4, Span(5, 9), Span(1, 3), vocab_size)):
        ids = {i for r in requests for i in r.prompt_token_ids}
        assert min(ids) >= 0 and max(ids) < vocab_size


def test_uniform_is_seeded_and_grows_at_its_end() -> None:
    lengths = Span(3, 9), Span(2, 4)
    assert uniform(5, *lengths, VOCAB, 7) == uniform(9, *lengths, VOCAB, 7)[:5]
    assert uniform(5, *lengths, VOCAB, 7) != uniform(5, *lengths, VOCAB, 8)
    for request in uniform(50, *lengths, VOCAB):
        assert 3 <= len(request.prompt_token_ids) <= 9 and 2 <= request.max_tokens <= 4


def test_spans() -> None:
    assert Span.parse("128") == Span(128, 128) and str(Span.parse("128")) == "128"
    assert Span.parse("32:256") == Span(32, 256) and str(Span.parse("32:256")) == "32:256"
    for wrong in ("", "0", "-1", "a", "5:4", "5:x", "1:2:3", "2.5"):
        with pytest.raises(ConfigError, match="Possible: a number"):
            Span.parse(wrong)


def test_cut_leaves_shorter_ones() -> None:
    assert plain(cut([BenchRequest([1], 3), BenchRequest([2], 9)], 4)) == [([1], 3), ([2], 4)]


def test_a_file_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    lines = [{"prompt_token_ids": [1, 2], "max_tokens": 3}, {"prompt_token_ids": [7], "max_tokens": 1}]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    assert plain(named(str(file), 8)) == [([1, 2], 3), ([7], 1)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"prompt_token_ids": [1]}',
        '{"prompt_token_ids": [], "max_tokens": 1}',
        '{"prompt_token_ids": [8], "max_tokens": 1}',
        '{"prompt_token_ids": [-1], "max_tokens": 1}',
        '{"prompt_token_ids": ["1"], "max_tokens": 1}',
        '{"prompt_token_ids": [1], "max_tokens": 0}',
        '{"prompt_token_ids": [1], "max_tokens": true}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt_token_ids": [1], "max_tokens": 1}\n' + line)
    with pytest.raises(ConfigError, match=r"some.jsonl, line 2: a request must be .* ids from 0 to 7"):
        read_jsonl(file, 8)


def test_a_bad_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="such as mixed:64"):
        named("mixed:many", VOCAB)
    with pytest.raises(ConfigError, match="such as mixed:64"):
        named("mixed", VOCAB)
    with pytest.raises(ConfigError, match="cannot be read"):
        named(str(tmp_path / "nothing"), VOCAB)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="has no request"):
        named(str(tmp_path / "empty"), VOCAB)
