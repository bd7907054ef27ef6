"""Where a batch comes from and goes to: a file, standard input and output (-), or a URL."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import httpx

from kvasir.errors import ConfigError

_NO_LIMIT = httpx.Timeout(None, connect=30)


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def check_apart(source: str, target: str) -> None:
    """Opening the results' file empties it."""
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise ConfigError(f"{target} is the batch itself; name another file for the results.")


@contextmanager
def opened(name: str) -> Iterator[Iterator[bytes]]:
    """The lines of the input."""
    if is_url(name):
        try:
            with httpx.stream("GET", name, timeout=_NO_LIMIT, follow_redirects=True) as answer:
                answer.raise_for_status()
                yield _lines(answer.iter_bytes())
        except httpx.HTTPError as error:
            raise ConfigError(f"The batch at {name} cannot be fetched: {error}.") from None
        return
    if name == "-":
        yield iter(sys.stdin.buffer)
        return
    with _open(name, "rb", "read") as file:
        yield iter(file)


def _open(name: str, mode: str, what: str) -> BinaryIO:
    try:
        return cast(BinaryIO, open(name, mode))
    except OSError as error:
        raise ConfigError(f"{name} cannot be {what}: {error.strerror}.") from None


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


async def each(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of a source that may make one wait, while requests go on."""
    while (line := await asyncio.to_thread(next, lines, None)) is not None:
        yield line


def count_lines(name: str) -> int | None:
    """How many there are, where that can be known beforehand."""
    if is_url(name) or name == "-" or not Path(name).is_file():
        return None
    with open(name, "rb") as file:
        return sum(1 for line in file if line.strip())


@contextmanager
def written(name: str) -> Iterator[BinaryIO]:
    """A file to write results to. For a URL they are collected, and sent with PUT at the end."""
    if name == "-":
        yield sys.stdout.buffer
    elif is_url(name):
        with tempfile.TemporaryFile() as file:
            yield file
            _put(name, file)
    else:
        with _open(name, "wb", "written") as results:
            yield results


def _put(url: str, file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        httpx.put(url, content=file, headers={"Content-Length": str(size)}, timeout=_NO_LIMIT).raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigError(f"The results could not be sent to {url}: {error}.") from None
