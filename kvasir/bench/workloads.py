"""Requests of benchmarks: prompts as token ids, and numbers of output tokens. Deterministic."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError

# Range of random token ids: after the special tokens at the beginning, and within all common vocabularies.
FIRST_ID, END_ID = 300, 150_000


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt and the exact number of output tokens."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Span:
    """A number, or a range with uniform distribution."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Span:
        low, _, high = text.partition(":")
        if not low.isdecimal() or not (high or low).isdecimal() or not 1 <= int(low) <= int(high or low):
            raise ConfigError(f"{text!r} is not a length. Possible: a number such as 128, or a range such as 32:256.")
        return cls(int(low), int(high or low))

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def uniform(count: int, input_len: Span, output_len: Span, vocab_size: int, seed: int = 0) -> list[BenchRequest]:
    """Requests with random lengths and ids. The first n do not depend on the count."""
    rng = random.Random(seed)
    return [_draw(rng, input_len.draw(rng), output_len.draw(rng), vocab_size) for _ in range(count)]


def mixed(count: int, vocab_size: int, salt: int = 0) -> list[BenchRequest]:
    """Requests with 32 to 256 prompt and 16 to 128 output tokens. Lengths are fixed; ids depend on the salt."""
    lengths, ids = random.Random(0), random.Random(3000 + salt)
    shapes = [(lengths.randint(32, 256), lengths.randint(16, 128)) for _ in range(count)]
    return [_draw(ids, length, max_tokens, vocab_size) for length, max_tokens in shapes]


def read_jsonl(path: Path, vocab_size: int) -> list[BenchRequest]:
    """One {"prompt_token_ids": [...], "max_tokens": n} per line; blank lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The workload {path} cannot be read ({error}).") from None
    requests = [_read_line(line, f"{path}, line {i}", vocab_size) for i, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(f"The workload {path} has no request.")
    return requests


def named(name: str, vocab_size: int, seed: int = 0) -> list[BenchRequest]:
    """The requests of --workload: mixed:N or a file."""
    kind, _, count = name.partition(":")
    if kind != "mixed":
        return read_jsonl(Path(name), vocab_size)
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"--workload {name} needs a number of requests, such as mixed:64.")
    return mixed(int(count), vocab_size, seed)


def cut(requests: Sequence[BenchRequest], max_tokens: int) -> list[BenchRequest]:
    """The same prompts with at most `max_tokens` output tokens."""
    return [BenchRequest(request.prompt_token_ids, min(request.max_tokens, max_tokens)) for request in requests]


def _draw(rng: random.Random, length: int, max_tokens: int, vocab_size: int) -> BenchRequest:
    end = min(END_ID, vocab_size)
    first = FIRST_ID if end > FIRST_ID else 0
    return BenchRequest([rng.randrange(first, end) for _ in range(length)], max_tokens)


def _read_line(line: str, where: str, vocab_size: int) -> BenchRequest:
    try:
        entry: Any = json.loads(line)
        ids, max_tokens = entry["prompt_token_ids"], entry["max_tokens"]
        good = bool(ids) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
        if good and type(max_tokens) is int and max_tokens >= 1:
            return BenchRequest(list(ids), max_tokens)
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f'{where}: a request must be {{"prompt_token_ids": [...], "max_tokens": n}}, with ids from 0 to '
        f"{vocab_size - 1} and n at least 1."
    )
