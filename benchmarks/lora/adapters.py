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
    numbers = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    for number in range(count):
        at, tensors = 7919 * number, {}
        for name, target in targets.modules.items():
            if target.kind != "linear":
                continue
            for half, shape in (("A", (rank, target.inputs)), ("B", (target.outputs, rank))):
                size = shape[0] * shape[1]
                at = at if at + size <= len(numbers) else at % 104729
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = numbers[at : at + size].clone().view(shape)
                at += size
        path = folder / f"adapter-{number}"
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": "all-linear"}
        (path / "adapter_config.json").write_text(json.dumps(config))
        made.append(path)
    return made
