"""`kvasir run-batch`: runs a file of requests in OpenAI's batch format with a local model."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvasir.config.args import EngineArgs, flag, flag_options, flags_of, with_flags
from kvasir.config.engine import EngineConfig, all_settings
from kvasir.entrypoints.cli.main import log_warnings_only
from kvasir.errors import ConfigError

# Settings of the server that also apply without one.
SERVER_SETTINGS = (
    *("response_role", "trust_request_chat_template", "max_prompt_tokens", "request_timeout"),
    *("unknown_fields", "max_tokenizing_characters"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvasir.server.config import server_settings

    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests: a file, a URL or - (standard input)"
    )
    group.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="results: a file, a URL (PUT) or - (standard output)"
    )
    group.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="maximum number of concurrent requests (default: twice max_num_seqs)",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="names of the model in requests",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    for name in SERVER_SETTINGS:
        known = server_settings()[name]
        group.add_argument(flag(name), **flag_options(name, known))
    EngineArgs.add_cli_args(parser)


def run(namespace: argparse.Namespace) -> int:
    from kvasir.server.config import from_namespace, with_starter_model

    if namespace.max_concurrency is not None and namespace.max_concurrency < 1:
        raise ConfigError("--max-concurrency must be at least 1.")
    config = with_starter_model(namespace, from_namespace(namespace))
    asked = EngineArgs.from_cli_args(namespace).create_engine_config()
    restore = log_warnings_only("kvasir.server")  # its two lines per request would hide the progress bar
    try:
        return run_batch(asked, config, namespace)
    finally:
        restore()


def run_batch(asked: EngineConfig, config: Any, namespace: argparse.Namespace, executor: Any = None) -> int:
    """Returns the exit status: 0 if every line is a request and has its reply, which may be a refusal.

    It is 1 if a line is no request, such as one without custom_id, or if the engine died.
    """
    from kvasir.entrypoints.async_llm import AsyncLLM
    from kvasir.server.batch import BatchRunner
    from kvasir.server.state import ServerState

    check_not_same(namespace.input_file, namespace.output_file)
    with open_input(namespace.input_file) as lines, open_output(namespace.output_file) as output:
        engine = AsyncLLM(asked, executor)
        try:
            batch = BatchRunner.with_engine(ServerState(config, asked.model.model), engine)
            counts = _answer(batch, iterate_in_thread(lines), output, namespace)
        finally:
            died = engine.dead_error
            engine.shutdown()
    print(f"{counts.answered} answered, {counts.failed} failed", file=sys.stderr)
    if died is not None:
        print(f"kvasir: error: {with_flags(str(died), flags_of(all_settings()))}", file=sys.stderr)
    if counts.unread:
        which = "1 line is no request" if counts.unread == 1 else f"{counts.unread} lines are no requests"
        print(f"kvasir: error: {which}; the output says why", file=sys.stderr)
    return 1 if died is not None or counts.unread else 0


def _answer(batch: Any, lines: AsyncIterator[bytes], output: BinaryIO, namespace: argparse.Namespace) -> Any:
    from kvasir.server.batch import write_line

    settings = batch.state.engine.config
    limit = namespace.max_concurrency or 2 * settings.scheduler.max_num_seqs * settings.parallel.data_parallel_size
    with _bar(count_lines(namespace.input_file), namespace.disable_tqdm) as bar:

        def write(result: Any) -> None:
            output.write(write_line(result))
            output.flush()
            bar.update(1)

        try:
            return asyncio.run(batch.run(lines, write, limit))
        except BaseExceptionGroup as several:  # the first is the cause; the others were cancelled
            raise several.exceptions[0] from None


def _bar(total: int | None, disabled: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Batch", unit="req", dynamic_ncols=True, disable=disabled)


# ---------------------------------------------------------------- input and output

_CONNECT_SECONDS = 30.0  # reading and writing have no limit


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def check_not_same(source: str, target: str) -> None:
    """Raise if input and output are the same file, which opening the output would empty."""
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise ConfigError(f"{target} is the input file; name another file for the results.")


@contextmanager
def open_input(name: str) -> Iterator[Iterator[bytes]]:
    """Open the input and give its lines."""
    if is_url(name):
        import httpx  # here, so that --help is fast

        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        try:
            with httpx.stream("GET", name, timeout=timeout, follow_redirects=True) as answer:
                answer.raise_for_status()
                yield _lines(answer.iter_bytes())
        except httpx.HTTPError as error:
            raise ConfigError(f"The input {name} cannot be fetched: {error}.") from None
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


async def iterate_in_thread(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Read lines in a thread, so that waiting for the source does not block running requests."""
    while (line := await asyncio.to_thread(next, lines, None)) is not None:
        yield line


def count_lines(name: str) -> int | None:
    """The number of requests; None for a URL or standard input."""
    if is_url(name) or name == "-" or not Path(name).is_file():
        return None
    with open(name, "rb") as file:
        return sum(1 for line in file if line.strip())


@contextmanager
def open_output(name: str) -> Iterator[BinaryIO]:
    """Open a file for the results. For a URL it is a temporary file that is sent with PUT at the end."""
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
    import httpx

    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        httpx.put(url, content=file, headers={"Content-Length": str(size)}, timeout=timeout).raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigError(f"The results could not be sent to {url}: {error}.") from None
