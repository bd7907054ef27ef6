"""A checkpoint of safetensors with quantized weights: each matrix is one entry, read as Coded. Worker process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from kvasir.errors import ModelError
from kvasir.models.checkpoint import Safetensors, TensorEntry, some
from kvasir.quantization.coded import Coded
from kvasir.quantization.formats.base import Scheme, WeightFormat


class QuantizedSafetensors:
    """The tensors of a checkpoint under the names that unquantized weights would have. Codes are made on `device`."""

    described_by = "config.json"

    def __init__(self, inner: Safetensors, form: WeightFormat, device: torch.device) -> None:
        self.inner, self.form, self.directory, self._device = inner, form, inner.directory, device
        self._matrices: dict[str, tuple[str, Scheme, dict[str, TensorEntry]]] = {}  # by the matrix's name
        self.entries = dict(inner.entries)
        for module in self._modules():
            self._add(module)

    def _modules(self) -> list[str]:
        """The modules that have a tensor which only quantized matrices have."""
        found: dict[str, None] = {}
        for name in self.inner.entries:
            for mark in self.form.marks:
                if name.endswith(f".{mark}"):
                    found[name.removesuffix(f".{mark}")] = None
        return list(found)

    def _add(self, module: str) -> None:
        scheme, name = self.form.scheme(module), f"{module}.weight"
        if scheme is None:
            raise ModelError(
                f"{module} has quantized weights, but the quantization config says that it is not quantized; the "
                f"config belongs to another checkpoint. Download both again."
            )
        parts = {part: self.inner.entries.get(f"{module}.{part}") for part in (*scheme.needs, *scheme.may_have)}
        if missing := [f"{module}.{part}" for part in scheme.needs if parts[part] is None]:
            raise ModelError(
                f"The weights in {self.directory} are damaged: {some(missing)} is missing; download them again."
            )
        there = {part: entry for part, entry in parts.items() if entry is not None}
        shapes = {part: entry.shape for part, entry in there.items()}
        for part in (*scheme.needs, *scheme.may_have, *scheme.unused):
            self.entries.pop(f"{module}.{part}", None)
        shape = scheme.shape(module, shapes, lambda part: _one(there[part]))
        self._matrices[name] = (module, scheme, there)
        self.entries[name] = TensorEntry(next(iter(there.values())).file, name, tuple(shape))

    def is_quantized(self, name: str) -> bool:
        return name in self._matrices

    def read(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor | Coded]]:
        """These tensors; each is valid until the next one is read, unless it is Coded."""
        yield from self.inner.read([name for name in names if name not in self._matrices])
        with ExitStack() as stack:
            opened: dict[Path, Callable[[str], torch.Tensor]] = {}
            for name in names:
                if name not in self._matrices:
                    continue
                module, scheme, parts = self._matrices[name]
                tensors = {}
                for part, entry in parts.items():
                    if entry.file not in opened:
                        file = stack.enter_context(safe_open(entry.file, framework="pt", device="cpu"))
                        opened[entry.file] = file.get_tensor
                    tensors[part] = opened[entry.file](entry.name).to(self._device)
                yield name, scheme.decode(module, tensors)


def _one(entry: TensorEntry) -> torch.Tensor:
    with safe_open(entry.file, framework="pt", device="cpu") as opened:
        return opened.get_tensor(entry.name).clone()
