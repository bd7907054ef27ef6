"""`kvasir warm`: starts an engine and ends it, so that everything that a start compiles is on disk afterwards."""

from __future__ import annotations

import argparse
import time

from kvasir.config.args import EngineArgs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    EngineArgs.add_cli_args(parser)


def run(namespace: argparse.Namespace) -> int:
    args = EngineArgs.from_cli_args(namespace)
    args.create_engine_config()  # reports wrong settings before the slow imports
    from kvasir.config import startup
    from kvasir.entrypoints.llm_engine import LLMEngine

    startup.seconds.clear()
    began = time.perf_counter()
    engine = LLMEngine.from_engine_args(args)
    engine.close()
    kernels = startup.seconds.get(startup.KERNELS)
    done = "nothing is compiled on this device" if kernels is None else f"kernels took {kernels:.1f} s"
    print(f"ready after {time.perf_counter() - began:.1f} s; {done}")
    return 0
