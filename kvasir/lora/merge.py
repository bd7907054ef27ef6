"""Merges a LoRA adapter into a checkpoint, so that the result is served without adapters. Runs by itself, on a CPU."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvasir.errors import ConfigError, RequestError
from kvasir.lora.host import WEIGHTS, AdapterPlan, Factors, read_adapter
from kvasir.messages import AdapterTarget, AdapterTargets
from kvasir.models import architectures
from kvasir.models.checkpoint import Safetensors, TensorEntry
from kvasir.models.spec import Names, TensorLayout

_ANY_RANK = 1 << 20


def merge(base: Path, adapter: Path, out: Path) -> int:
    """Write the checkpoint with the adapter merged in, and return how many tensors it changed."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; choose another directory.")
    if not (base / "config.json").is_file():
        raise ConfigError(f"{base} has no config.json; name a directory with a checkpoint.")
    hf = json.loads((base / "config.json").read_text(encoding="utf-8"))
    architecture = architectures.find(hf)
    checkpoint = Safetensors(base, architecture.prefix)
    targets = _targets(checkpoint, architecture.names_for(hf), architecture.prefix)
    try:
        plan = read_adapter(adapter.name, adapter, str(adapter), targets).plan
    except RequestError as error:
        more = " Adapters of a layer's experts as one stack are merged by PEFT's merge_and_unload, not here."
        raise ConfigError(f"{error}{more if '.experts.' in str(error) else ''}") from error
    if plan.prompt_type:
        raise ConfigError(f"{adapter} is a soft prompt ({plan.prompt_type}), which cannot be merged into weights.")
    merger = _Merger(checkpoint, targets, plan)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(base.iterdir()):
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy2(file, out / file.name)
    by_file: dict[Path, list[str]] = {}
    for name, entry in checkpoint.entries.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        tensors = {checkpoint.entries[name].name: merger.tensor(name) for name in names}
        if file == list(by_file)[-1]:
            tensors |= merger.further(out)
        save_file(tensors, out / file.name, {"format": "pt"})
    return merger.num_changed


def _targets(checkpoint: Safetensors, names: Names, prefix: str) -> AdapterTargets:
    """Return the modules of a checkpoint: every matrix that a layer of the decoder is made of."""
    modules: dict[str, AdapterTarget] = {}
    for name, entry in checkpoint.entries.items():
        module, _, last = name.rpartition(".")
        ours = next((ours for pattern, ours in names.items() if fnmatchcase(module, pattern)), None)
        if last != "weight" or len(entry.shape) != 2 or ours is None:
            continue
        transposed = isinstance(ours, TensorLayout) and ours.transposed
        kind = ours if ours in ("embedding", "head") else "linear"
        shape = entry.shape[::-1] if transposed else entry.shape
        modules[module] = AdapterTarget(str(kind), shape[0], shape[1], transposed)
    embedding = next((target for target in modules.values() if target.kind == "embedding"), None)
    for pattern, ours in names.items():  # a head that is tied to the embedding has no tensor of its own
        if ours == "head" and pattern not in modules and embedding is not None:
            modules[pattern] = AdapterTarget("head", embedding.outputs, embedding.inputs)
    return AdapterTargets(modules, prefix, 0, 0, 0, True, _ANY_RANK, 1)


class _Merger:
    def __init__(self, checkpoint: Safetensors, targets: AdapterTargets, plan: AdapterPlan) -> None:
        self.checkpoint, self.targets, self.plan = checkpoint, targets, plan
        self.num_changed = 0

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint, changed by the adapter if it changes this one."""
        value = _read(self.checkpoint.entries[name])
        module, _, last = name.rpartition(".")
        factors = self.plan.modules.get(module)
        if factors is None or last not in ("weight", "bias"):
            return value
        changed = self._weight(module, factors, value) if last == "weight" else self._bias(factors, value)
        self.num_changed += changed is not value
        return changed.to(value.dtype).contiguous()

    def further(self, out: Path) -> dict[str, torch.Tensor]:
        """Return tensors that only the merged checkpoint has: a head that was tied, and biases."""
        found: dict[str, torch.Tensor] = {}
        for module, factors in self.plan.modules.items():
            target, has = self.targets.modules[module], self.checkpoint.entries
            if (factors.bias or factors.up_bias) and f"{module}.bias" not in has:
                raise ConfigError(
                    f"The adapter has a bias for {module}, and the model has none there: it cannot be merged."
                )
            if f"{module}.weight" not in has:
                assert target.kind == "head", "only a tied head has no tensor"
                embedding = next(name for name, each in self.targets.modules.items() if each.kind == "embedding")
                value = _read(has[f"{embedding}.weight"])
                found[f"{module}.weight"] = self._weight(module, factors, value).to(value.dtype).contiguous()
                config = json.loads((out / "config.json").read_text(encoding="utf-8"))
                config["tie_word_embeddings"] = False
                (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
                self.num_changed += 1
        return found

    def _weight(self, module: str, factors: Factors, value: torch.Tensor) -> torch.Tensor:
        target = self.targets.modules[module]
        if factors.weight:
            value = self._own(factors.weight)
        if not factors.up:
            return value
        delta = factors.scale * self._own(factors.up) @ self._own(factors.down)
        turned = target.transposed or target.kind == "embedding"
        merged = value.float() + (delta.T if turned else delta)
        if factors.magnitude:
            norm = torch.linalg.vector_norm(merged, dim=0 if turned else 1)
            gain = self._own(factors.magnitude) / norm
            merged = merged * (gain[None, :] if turned else gain[:, None])
        return merged

    def _bias(self, factors: Factors, value: torch.Tensor) -> torch.Tensor:
        if factors.bias:
            value = self._own(factors.bias)
        return value.float() + factors.scale * self._own(factors.up_bias) if factors.up_bias else value

    def _own(self, name: str) -> torch.Tensor:
        with safe_open(Path(self.plan.directory) / WEIGHTS, framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor.float()


def _read(entry: TensorEntry) -> torch.Tensor:
    with safe_open(entry.file, framework="pt", device="cpu") as file:
        tensor: torch.Tensor = file.get_tensor(entry.name)
        return tensor
