"""Commands that prepare what will be served: compiled kernels, quantized checkpoints, merged adapters."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvasir.config.args import EngineArgs
from kvasir.config.engine import LoadConfig, ModelConfig
from kvasir.errors import ConfigError
from kvasir.models.hub import find_adapter, find_model

WAYS = ("int4", "int8", "fp8")


class Warm:
    """`kvasir warm`: starts an engine and ends it, so that everything that a start compiles is on disk afterwards."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        EngineArgs.add_cli_args(parser)

    @staticmethod
    def run(namespace: argparse.Namespace) -> int:
        args = EngineArgs.from_cli_args(namespace)
        args.create_engine_config()  # reports wrong settings before the slow imports
        from kvasir.config import startup
        from kvasir.entrypoints.llm_engine import LLMEngine

        startup.seconds.clear()
        began = time.perf_counter()
        engine = LLMEngine.from_engine_args(args)
        engine.close()
        kernels = [startup.seconds[name] for name in (startup.VARIANTS, startup.KERNELS) if name in startup.seconds]
        done = f"kernels took {sum(kernels):.1f} s" if kernels else "nothing is compiled on this device"
        print(f"ready after {time.perf_counter() - began:.1f} s; {done}")
        return 0


class Quantize:
    """`kvasir quantize`: writes a quantized copy of a checkpoint, in the format compressed-tensors."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", metavar="MODEL", help="a directory or a Hub name of an unquantized checkpoint")
        parser.add_argument("--to", required=True, choices=WAYS, help="format of the matrices")
        parser.add_argument("--out", required=True, metavar="DIR", help="directory to write; it must not exist")
        parser.add_argument("--device", default="auto", help="device that quantizes (default: auto)")

    @staticmethod
    def run(namespace: argparse.Namespace) -> int:
        out = Path(namespace.out)
        if out.exists():
            raise ConfigError(f"--out {out} exists already; name a directory that does not.")
        from kvasir.config.resolve import resolve
        from kvasir.models.quantize import quantize_checkpoint

        with _named(model="MODEL"):
            config = resolve(EngineArgs(namespace.model, device=namespace.device, skip_tokenizer_init=True))
        began = time.perf_counter()
        before, after = quantize_checkpoint(config.model, out, namespace.to, config.device.device)
        print(
            f"{out}: {after / 2**20:.1f} MiB of weights, {before / 2**20:.1f} MiB before, "
            f"in {time.perf_counter() - began:.1f} s"
        )
        return 0


class MergeLora:
    """`kvasir merge-lora`: writes a checkpoint with a LoRA adapter merged into its weights."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("base", help="the model: a directory of safetensors, or a name on the Hugging Face Hub")
        parser.add_argument("adapter", help="the adapter: a PEFT directory, or a name on the Hugging Face Hub")
        parser.add_argument("--out", required=True, metavar="DIR", help="directory for the merged model; new or empty")

    @staticmethod
    def run(namespace: argparse.Namespace) -> int:
        from kvasir.lora.merge import merge

        model, load = ModelConfig(namespace.base), LoadConfig()
        with _named(model="base", lora_path="adapter"):
            base, adapter = find_model(model, load), find_adapter(namespace.adapter, model, load)
        if not base.is_dir():
            raise ConfigError(f"{base} is a file; an adapter can be merged into a directory of safetensors only.")
        changed = merge(base, adapter, Path(namespace.out).expanduser())
        print(f"{namespace.out}: {changed} tensors of {base} are changed by {adapter}")
        return 0


@contextmanager
def _named(**arguments: str) -> Iterator[None]:
    """Name the command's argument in errors, in place of Python's parameter."""
    try:
        yield
    except ConfigError as error:
        error.args = (re.sub(r"^(\w+)=", lambda found: arguments.get(found[1], found[1]) + "=", str(error)),)
        raise
