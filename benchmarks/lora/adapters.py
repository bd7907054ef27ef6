"""Random adapters in PEFT's format for any model that an engine serves, for the benchmarks beside this file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvasir.messages import AdapterTargets


def make_adapters(targets: AdapterTargets, folder: Path, count: int, rank: int) -> list[Path]:
    """Adapters of one rank for all linear layers, small enough to leave the texts readable."""
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, target in targets.modules.items():
            if target.kind != "linear":
                continue
            for half, shape in (("A", (rank, target.inputs)), ("B", (target.outputs, rank))):
                tensor = torch.randn(shape, generator=generator) * 0.02
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = tensor.to(torch.bfloat16)
        path = folder / f"adapter-{number}"
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": "all-linear"}
        (path / "adapter_config.json").write_text(json.dumps(config))
        made.append(path)
    return made
