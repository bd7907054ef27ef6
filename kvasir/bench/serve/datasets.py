"""Datasets of load tests: prompts as text or token ids, with output lengths. Deterministic for a seed."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from kvasir.bench.workloads import END_ID, FIRST_ID
from kvasir.errors import ConfigError
from kvasir.frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    content: str | list[int]
    num_tokens: int  # an estimate; the server's count, with the chat template, takes precedence
    max_tokens: int
    at: float | None = None  # arrival time in a trace, in seconds


@dataclass(slots=True)
class PromptMaker:
    """Makes prompts of given lengths; with `as_text` as text, for APIs that do not accept token ids."""

    tokenizer: Tokenizer
    seed: int = 0
    as_text: bool = False
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def ids(self, count: int, rng: random.Random | None = None) -> list[int]:
        """Random tokens without special ones."""
        end = min(END_ID, self.tokenizer.vocab_size)
        first = FIRST_ID if end > 2 * FIRST_ID else 0
        special = set(self.tokenizer.all_special_ids)
        draw = rng or self.rng
        found: list[int] = []
        while len(found) < count:
            some = (draw.randrange(first, end) for _ in range(count - len(found)))
            found += [token for token in some if token not in special]
        return found

    def of_ids(self, ids: list[int], max_tokens: int, at: float | None = None) -> Prompt:
        if not self.as_text:
            return Prompt(ids, len(ids), max_tokens, at)
        text = self.tokenizer.decode(ids)
        again = self.tokenizer.encode(text, add_special_tokens=False)
        if len(again) > len(ids):  # the text of random tokens is often tokenized differently
            text = self.tokenizer.decode(again[: len(ids)])
            again = again[: len(ids)]
        return Prompt(text, len(again), max_tokens, at)

    def of_text(self, text: str, max_tokens: int) -> Prompt:
        return Prompt(text, len(self.tokenizer.encode(text)), max_tokens)


@dataclass(frozen=True, slots=True)
class Random:
    """Random tokens after a shared prefix. A range ratio r varies lengths uniformly by factors from 1-r to 1+r."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, not {self.range_ratio:g}.")

    def prompts(self, maker: PromptMaker, count: int) -> list[Prompt]:
        prefix = maker.ids(self.prefix_len)
        made = []
        for _ in range(count):
            length, answer = self._draw(maker, self.input_len), self._draw(maker, self.output_len)
            made.append(maker.of_ids(prefix + maker.ids(length), answer))
        return made

    def _draw(self, maker: PromptMaker, mean: int) -> int:
        low, high = int(mean * (1 - self.range_ratio)), int(mean * (1 + self.range_ratio))
        return max(1, maker.rng.randint(low, high))


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """A few prefixes with many suffixes each, shuffled."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128

    def prompts(self, maker: PromptMaker, count: int) -> list[Prompt]:
        prefixes = [maker.ids(self.prefix_len) for _ in range(self.num_prefixes)]
        made = [
            maker.of_ids(prefixes[i % self.num_prefixes] + maker.ids(self.suffix_len), self.output_len)
            for i in range(count)
        ]
        maker.rng.shuffle(made)
        return made


@dataclass(frozen=True, slots=True)
class Sonnet:
    """Lines of a text: the first ones as a shared prefix, followed by random ones."""

    lines: Sequence[str]
    input_len: int = 550
    output_len: int = 150
    prefix_len: int = 200
    intro: str = "Pick as many lines as you can from these poem lines:\n"

    def prompts(self, maker: PromptMaker, count: int) -> list[Prompt]:
        costs = [len(maker.tokenizer.encode(line + "\n", add_special_tokens=False)) for line in self.lines]
        start = len(maker.tokenizer.encode(self.intro))
        if self.input_len < max(start, self.prefix_len):
            raise ConfigError(
                f"--sonnet-input-len {self.input_len} is too short for a prefix of {self.prefix_len} tokens."
            )
        head = list(_fill(range(len(self.lines)), costs, self.prefix_len - start))
        used = start + sum(costs[i] for i in head)
        made = []
        for _ in range(count):
            order = maker.rng.sample(range(len(self.lines)), len(self.lines))
            body = _fill(order, costs, self.input_len - used)
            text = self.intro + "\n".join(self.lines[i] for i in [*head, *body])
            made.append(maker.of_text(text, self.output_len))
        return made


def _fill(order: Sequence[int], costs: Sequence[int], room: int) -> Iterator[int]:
    """Indices of lines in this order, as long as they fit."""
    for i in order:
        room -= costs[i]
        if room < 0:
            return
        yield i


@dataclass(frozen=True, slots=True)
class Conversations:
    """Prompts with their replies (None if unknown), from ShareGPT or a file of prompts."""

    pairs: Sequence[tuple[str, str | None]]
    output_len: int | None = None  # None uses the length of the reply
    prune: bool = True  # leave out the same requests as vLLM's benchmark, for comparable results

    def prompts(self, maker: PromptMaker, count: int) -> list[Prompt]:
        order = maker.rng.sample(range(len(self.pairs)), len(self.pairs))
        made: list[Prompt] = []
        for i in order:
            if len(made) == count:
                break
            asked, answered = self.pairs[i]
            length = self.output_len
            if length is None:
                length = len(maker.tokenizer.encode(answered or "", add_special_tokens=False))
            prompt = maker.of_text(asked, length)
            if length > 0 and (not self.prune or self._is_usual(prompt)):
                made.append(prompt)
        if not made:
            raise ConfigError("The dataset has no prompt of a suitable length.")
        return [made[i % len(made)] for i in range(count)]  # repeated if there are too few

    def _is_usual(self, prompt: Prompt) -> bool:
        short = prompt.num_tokens < 4 or (self.output_len is None and prompt.max_tokens < 4)
        return not short and prompt.num_tokens <= 1024 and prompt.num_tokens + prompt.max_tokens <= 2048


# ---------------------------------------------------------------- datasets in files

MOONCAKE_BLOCK = 512  # tokens per hash id


def sonnet(path: str, **lengths: Any) -> Sonnet:
    lines = [line.rstrip() for line in _read(path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} has no text.")
    return Sonnet(lines, **lengths)


def sharegpt(path: str, output_len: int | None = None) -> Conversations:
    """[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]"""
    text = _read(path)
    try:
        pairs = [
            (str(turns[0]["value"]), str(turns[1]["value"]))
            for entry in json.loads(text)
            if len(turns := entry.get("conversations") or entry.get("conversation") or []) >= 2
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not in the format of ShareGPT ({error!r}).") from None
    if not pairs:
        raise ConfigError(f"{path} has no conversation of two turns.")
    return Conversations(pairs, output_len)


def custom(path: str, output_len: int = 256) -> Conversations:
    """One {"prompt": ...} per line."""
    pairs: list[tuple[str, str | None]] = []
    for where, entry in _json_lines(path):
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ConfigError(f'{where}: a line must be {{"prompt": "..."}}.')
        pairs.append((entry["prompt"], None))
    return Conversations(pairs, output_len, prune=False)


# ---------------------------------------------------------------- traces of real services
#
# A trace has only lengths and times, so prompts are random. Where it tells which blocks of prompts were equal
# (Mooncake's hash ids), random prompts share the same blocks.


@dataclass(frozen=True, slots=True)
class TraceEntry:
    at: float  # seconds
    num_tokens: int
    max_tokens: int
    blocks: tuple[int, ...] = ()  # ids of its blocks; equal ids mean equal tokens


@dataclass(frozen=True, slots=True)
class Trace:
    entries: Sequence[TraceEntry]
    max_model_len: int | None = None  # longer requests are left out; None if the server does not report it

    @property
    def fitting(self) -> list[TraceEntry]:
        limit = self.max_model_len
        return [each for each in self.entries if limit is None or each.num_tokens + each.max_tokens <= limit]

    def prompts(self, maker: PromptMaker, count: int) -> list[Prompt]:
        chosen = self.fitting[:count]
        if not chosen:
            raise ConfigError(f"Every request of the trace is longer than the server's {self.max_model_len} tokens.")
        return [maker.of_ids(_tokens(maker, each), each.max_tokens, each.at) for each in chosen]


def _tokens(maker: PromptMaker, entry: TraceEntry) -> list[int]:
    ids: list[int] = []
    for name in entry.blocks:
        ids += maker.ids(MOONCAKE_BLOCK, random.Random(f"{maker.seed} {name}"))
    return (ids + maker.ids(max(0, entry.num_tokens - len(ids))))[: entry.num_tokens]


def trace(path: str, max_model_len: int | None = None) -> Trace:
    """Read a trace: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines."""
    first = next((line for line in _read(path).splitlines() if line.strip()), "")
    entries = list(_mooncake(path) if first.lstrip().startswith("{") else _azure(path))
    if not entries:
        raise ConfigError(f"The trace {path} has no request.")
    return Trace(sorted(entries, key=lambda entry: entry.at), max_model_len)


def _azure(path: str) -> Iterator[TraceEntry]:
    for number, row in enumerate(csv.DictReader(_read(path).splitlines()), 2):
        try:
            stamp = row["TIMESTAMP"]
            # fractions have seven digits, but Python reads six
            at = datetime.fromisoformat(stamp[:26]).timestamp()
            yield TraceEntry(at, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
        except (KeyError, ValueError, TypeError):
            form = "TIMESTAMP,ContextTokens,GeneratedTokens"
            raise ConfigError(f"{path}, line {number}: not a line of an Azure trace ({form}).") from None


def _mooncake(path: str) -> Iterator[TraceEntry]:
    for where, entry in _json_lines(path):
        try:
            blocks = tuple(int(name) for name in entry.get("hash_ids", ()))
            lengths = max(1, int(entry["input_length"])), max(1, int(entry["output_length"]))
            yield TraceEntry(float(entry["timestamp"]) / 1e3, *lengths, blocks)
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
