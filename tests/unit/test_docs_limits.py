"""The limits that docs/security.md and docs/server.md state are those of the code: every number of their tables, and
every number of the sentences below the table."""

from __future__ import annotations

import re

import pytest

from kvasir import errors, log
from kvasir.server import batch, body_limits, file_store, large_bodies, limits, protocol, response_store, tools
from kvasir.server.config import ServerConfig, server_settings
from kvasir.server.routes import completions
from kvasir.server.schema import base, chat, sampling
from tests.conftest import ROOT

CONFIG = ServerConfig()
SECURITY, SERVER = ((ROOT / "docs" / name).read_text("utf-8") for name in ("security.md", "server.md"))
NUMBER = re.compile(r"(?<![\w`/-])(\d[\d,]*)(?: (KiB|MiB|million)\b)?")
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def numbers(text: str) -> list[float]:
    found = []
    for digits, unit in NUMBER.findall(text):
        plain = int(digits.replace(",", ""))
        found.append(plain * 1e6 if unit == "million" else plain * UNITS[unit])
    return found


def rows(text: str, header: str) -> list[list[str]]:
    table = text[text.index(header) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


LIMITS = rows(SECURITY, "| what a client may send |")
NOT_DEFAULTS = {  # numbers of a row beside its flags' defaults
    "bodies of all requests together": [CONFIG.max_body_memory // 4, limits.SMALL_BODY],
    "requests on one connection before the first is answered": [protocol._MAX_BACKLOG],
    "WebSocket frames with little in them: pings, pongs, empty fragments": [
        *(protocol._MAX_FRAMES, protocol._FRAMES_PER_SECOND, protocol._BYTES_PER_FRAME)
    ],
    "a body, piece by piece": [protocol._MIN_BYTES_PER_SECOND],
}


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: row[0][:40])
def test_the_table_has_the_defaults_of_the_flags(row: list[str]) -> None:
    what, limit, flags, _ = row
    names = [name.replace("-", "_") for name in re.findall(r"`--([\w-]+)`", flags)]
    assert set(names) <= set(server_settings())
    expected = [getattr(CONFIG, name) for name in names] + NOT_DEFAULTS.get(what, [])
    assert numbers(limit) == expected


def test_every_limit_on_what_arrives_is_in_the_table() -> None:
    shown = " ".join(flags for _, _, flags, _ in LIMITS)
    ends = ("_bytes", "_timeout", "_connections", "_count", "_body_memory")
    other = ("max_files_bytes", "request_timeout", "health_stall_timeout", "shutdown_timeout", "api_server_count")
    names = [name for name in server_settings() if name.endswith(ends) and name not in other]
    assert [name for name in names if f"`--{name.replace('_', '-')}`" not in shown] == []


# The numbers of each paragraph, in their order.
PARAGRAPHS = {
    "When it is full": [503, protocol._SPARE_CONNECTIONS, protocol._SPARE_DESCRIPTORS],
    "Refused requests": [protocol._MAX_LINGER_SECONDS],
    "Parameters": [large_bodies._PLAIN_LOGPROBS, large_bodies.MAX_LOGPROBS],
    "Log-probabilities of unfinished": [large_bodies._LOGPROB_BYTES, large_bodies._PLAIN_LOGPROBS, 503],
    "Lists that every": [large_bodies.MAX_REPEATED_BYTES, large_bodies.MAX_REPEATED_GRAMMARS],
    "What completions repeat": [
        *(large_bodies.MAX_COPIED_CHARACTERS, large_bodies.MAX_COPIED_TOKENS, large_bodies.MAX_COPIED_LOGPROBS)
    ],
    "Stored responses": [response_store.MAX_BYTES, 429, *base._MAX_METADATA],
    "Files** of `/v1/files`": [file_store._MAX_RECORDS, batch._MAX_RUNNING],
    "Errors": [errors.MAX_ECHO],
    "The log": [log._MAX_WAITING, log.MAX_LINE, log.MAX_FIELD],
}


@pytest.mark.parametrize("begin", PARAGRAPHS)
def test_the_sentences_have_the_numbers_of_the_code(begin: str) -> None:
    (text,) = (each for each in SECURITY.split("\n- ") if each.lstrip("*").startswith(begin))
    expected = [{1 << 24: 16e6, 1 << 22: 4e6}.get(n, n) if "million" in text else n for n in PARAGRAPHS[begin]]
    assert numbers(text.partition("\n\n")[0]) == expected


# Parts of the table of docs/server.md, by a text in it.
PARTS = {
    "JSON:": [
        *(body_limits.MAX_DEPTH, body_limits.MAX_CONTAINERS, body_limits.MAX_STRINGS),
        *(base.Body.max_values, completions.CompletionRequest.max_values, body_limits.MAX_EMBEDDED_VALUES),
    ],
    "entries of a list or object": [
        *(base.MAX_ENTRIES, base.MAX_OBJECTS),
        *(sampling.TokenIds.__metadata__[0].metadata[0].max_length, base.MAX_TOKEN_IDS),
        sampling.TemplateVariables.__metadata__[0].metadata[0].max_length,
        *(chat._MAX_MESSAGE_ENTRIES, tools._MAX_TOOLS, completions._MAX_EMBEDS),
    ],
    "stop strings:": [
        *(limits.MAX_STOPS, limits.MAX_STOP_LENGTH, limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_LENGTH),
        *(limits.MAX_PATTERN_SIZE, limits.MAX_NAMED_LOGPROBS, large_bodies.MAX_LOGPROBS, large_bodies._PLAIN_LOGPROBS),
        sampling.CacheSalt.__metadata__[0].metadata[0].max_length,
    ],
    "size of a body": [CONFIG.max_request_bytes],
    "completions of one request": [CONFIG.max_choices],
}


@pytest.mark.parametrize("begin", PARTS)
def test_the_page_of_the_server_has_the_numbers_of_the_code(begin: str) -> None:
    (row,) = (cells for cells in rows(SERVER, "| limit | flag | reply |") if cells[0].startswith(begin))
    assert numbers(" ".join(row[:2])) == PARTS[begin]
