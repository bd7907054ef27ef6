"""`kvasir serve`: reads the flags and runs the server."""

from __future__ import annotations

import argparse

from kvasir.config.args import EngineArgs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvasir.server import config

    config.add_flags(parser)


def run(namespace: argparse.Namespace) -> int:
    from kvasir.server.config import from_namespace, with_starter_model

    config = with_starter_model(namespace, from_namespace(namespace))
    asked = EngineArgs.from_cli_args(namespace).create_engine_config()  # reports wrong settings before the slow imports
    from kvasir.server.launch import serve

    return serve(asked, config)
