"""`kvasir run-batch`: a file of requests in OpenAI's batch format, answered by a model loaded here."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, BinaryIO

from kvasir.args import EngineArgs, flag, flag_options
from kvasir.cli.quiet import hush
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError

# Of the server's settings, those that mean something without a server.
SERVER_SETTINGS = ("response_role", "trust_request_chat_template", "max_prompt_tokens", "request_timeout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvasir.server.config import server_settings

    group = parser.add_argument_group("the batch")
    group.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests: a file, a URL, or -")
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="results: a file, a URL (PUT), or -")
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests at once (default: twice max_num_seqs)"
    )
    group.add_argument(
        "--served-model-name", nargs="+", default=argparse.SUPPRESS, metavar="NAME", help="what requests may call it"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")
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
    unhush = hush("kvasir.server")  # two lines a request would hide the progress
    try:
        return run_batch(asked, config, namespace)
    finally:
        unhush()


def run_batch(asked: EngineConfig, config: Any, namespace: argparse.Namespace, executor: Any = None) -> int:
    """The exit status: 0 if every line has its result, good or bad; 1 if the engine died."""
    from kvasir.async_llm import AsyncLLM
    from kvasir.cli import batch_files as files
    from kvasir.server.batch import Batch
    from kvasir.server.state import ServerState

    files.check_apart(namespace.input_file, namespace.output_file)
    with files.opened(namespace.input_file) as lines, files.written(namespace.output_file) as output:
        engine = AsyncLLM(asked, executor)
        try:
            batch = Batch(ServerState(config, asked.model.model), engine)
            counts = _answer(batch, files.each(lines), output, namespace)
        finally:
            died = engine.dead_error
            engine.shutdown()
    print(f"{counts.answered} answered, {counts.failed} failed", file=sys.stderr)
    if died is not None:
        print(f"kvasir: error: {died}", file=sys.stderr)
    return 1 if died is not None else 0


def _answer(batch: Any, lines: AsyncIterator[bytes], output: BinaryIO, namespace: argparse.Namespace) -> Any:
    from kvasir.cli.batch_files import count_lines
    from kvasir.server.batch import write_line

    settings = batch.state.engine.config
    most = namespace.max_concurrency or 2 * settings.scheduler.max_num_seqs * settings.parallel.data_parallel_size
    with _bar(count_lines(namespace.input_file), namespace.disable_tqdm) as bar:

        def write(result: Any) -> None:
            output.write(write_line(result))
            output.flush()
            bar.update(1)

        try:
            return asyncio.run(batch.run(lines, write, most))
        except BaseExceptionGroup as several:  # the first is why the others were cancelled
            raise several.exceptions[0] from None


def _bar(total: int | None, disabled: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Batch", unit="req", dynamic_ncols=True, disable=disabled)
