"""Datasets in files: poems, ShareGPT's conversations, one's own prompts, and traces of real services.

Traces have lengths and times only; their prompts are made up. Where a trace says which blocks of its prompts were equal
(Mooncake's hash ids), the made-up ones share the same blocks.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvasir.bench.serve.prompts import Maker, Pairs, Prompt, Sonnet
from kvasir.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens that a hash id stands for


def sonnet(path: str, **lengths: Any) -> Sonnet:
    lines = [line.rstrip() for line in _read(path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} holds no line of text.")
    return Sonnet(lines, **lengths)


def sharegpt(path: str, output_len: int | None = None) -> Pairs:
    """[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]"""
    text = _read(path)
    try:
        pairs = [
            (str(turns[0]["value"]), str(turns[1]["value"]))
            for entry in json.loads(text)
            if len(turns := entry.get("conversations") or entry.get("conversation") or []) >= 2
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} does not have ShareGPT's form ({error!r}).") from None
    if not pairs:
        raise ConfigError(f"{path} holds no conversation of two turns.")
    return Pairs(pairs, output_len)


def custom(path: str, output_len: int = 256) -> Pairs:
    """One {"prompt": ...} per line."""
    pairs: list[tuple[str, str | None]] = []
    for where, entry in _json_lines(path):
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ConfigError(f'{where}: a line is {{"prompt": "..."}}.')
        pairs.append((entry["prompt"], None))
    return Pairs(pairs, output_len, prune=False)


# ---------------------------------------------------------------- traces


@dataclass(frozen=True, slots=True)
class Entry:
    at: float  # seconds
    num_tokens: int
    max_tokens: int
    blocks: tuple[int, ...] = ()  # names of its blocks; equal names, equal tokens


@dataclass(frozen=True, slots=True)
class Trace:
    entries: Sequence[Entry]
    max_model_len: int | None = None  # None: the server does not say; else what is longer is left out

    @property
    def fitting(self) -> list[Entry]:
        most = self.max_model_len
        return [each for each in self.entries if most is None or each.num_tokens + each.max_tokens <= most]

    def prompts(self, maker: Maker, count: int) -> list[Prompt]:
        chosen = self.fitting[:count]
        if not chosen:
            raise ConfigError(f"Every request of the trace is longer than the server's {self.max_model_len} tokens.")
        return [maker.of_ids(_tokens(maker, each), each.max_tokens, each.at) for each in chosen]


def _tokens(maker: Maker, entry: Entry) -> list[int]:
    ids: list[int] = []
    for name in entry.blocks:
        ids += maker.ids(MOONCAKE_BLOCK, random.Random(f"{maker.seed} {name}"))
    return (ids + maker.ids(max(0, entry.num_tokens - len(ids))))[: entry.num_tokens]


def trace(path: str, max_model_len: int | None = None) -> Trace:
    """Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's lines of JSON, by what is in the file."""
    first = next((line for line in _read(path).splitlines() if line.strip()), "")
    entries = list(_mooncake(path) if first.lstrip().startswith("{") else _azure(path))
    if not entries:
        raise ConfigError(f"The trace {path} holds no request.")
    return Trace(sorted(entries, key=lambda entry: entry.at), max_model_len)


def _azure(path: str) -> Iterator[Entry]:
    for number, row in enumerate(csv.DictReader(_read(path).splitlines()), 2):
        try:
            stamp = row["TIMESTAMP"]
            # fractions have seven digits, and Python reads six
            at = datetime.fromisoformat(stamp[:26]).timestamp()
            yield Entry(at, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
        except (KeyError, ValueError, TypeError):
            form = "TIMESTAMP,ContextTokens,GeneratedTokens"
            raise ConfigError(f"{path}, line {number}: not a line of an Azure trace ({form}).") from None


def _mooncake(path: str) -> Iterator[Entry]:
    for where, entry in _json_lines(path):
        try:
            blocks = tuple(int(name) for name in entry.get("hash_ids", ()))
            lengths = max(1, int(entry["input_length"])), max(1, int(entry["output_length"]))
            yield Entry(float(entry["timestamp"]) / 1e3, *lengths, blocks)
        except (KeyError, ValueError, TypeError, AttributeError):
            form = "timestamp, input_length, output_length, hash_ids"
            raise ConfigError(f"{where}: not a line of a Mooncake trace ({form}).") from None


def _json_lines(path: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number} is not JSON ({error}).") from None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read ({error}).") from None
