"""`kvasir quantize`: writes a quantized copy of a checkpoint, in the format compressed-tensors."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from kvasir.errors import ConfigError

WAYS = ("int4", "int8", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory or a Hub name of an unquantized checkpoint")
    parser.add_argument("--to", required=True, choices=WAYS, help="format of the matrices")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write; it must not exist")
    parser.add_argument("--device", default="auto", help="device that quantizes (default: auto)")


def run(namespace: argparse.Namespace) -> int:
    out = Path(namespace.out)
    if out.exists():
        raise ConfigError(f"--out {out} exists already; name a directory that does not.")
    from kvasir.config.args import EngineArgs
    from kvasir.config.resolve import resolve
    from kvasir.models.quantize import quantize_checkpoint

    config = resolve(EngineArgs(namespace.model, device=namespace.device, skip_tokenizer_init=True))
    began = time.perf_counter()
    before, after = quantize_checkpoint(config.model, out, namespace.to, config.device.device)
    print(
        f"{out}: {after / 2**20:.1f} MiB of weights, {before / 2**20:.1f} MiB before, "
        f"in {time.perf_counter() - began:.1f} s"
    )
    return 0
