"""`kvasir merge-lora`: writes a checkpoint with a LoRA adapter merged into its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvasir.config.engine import LoadConfig, ModelConfig
from kvasir.errors import ConfigError
from kvasir.models.hub import find_adapter, find_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", help="the model: a directory of safetensors, or a name on the Hugging Face Hub")
    parser.add_argument("adapter", help="the adapter: a PEFT directory, or a name on the Hugging Face Hub")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory for the merged model; new or empty")


def run(namespace: argparse.Namespace) -> int:
    from kvasir.lora.merge import merge

    model, load = ModelConfig(namespace.base), LoadConfig()
    base, adapter = find_model(model, load), find_adapter(namespace.adapter, model, load)
    if not base.is_dir():
        raise ConfigError(f"{base} is a file; an adapter can be merged into a directory of safetensors only.")
    changed = merge(base, adapter, Path(namespace.out).expanduser())
    print(f"{namespace.out}: {changed} tensors of {base} are changed by {adapter}")
    return 0
