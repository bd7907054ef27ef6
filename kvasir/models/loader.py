"""Loads a model: it is built without memory, checked against the checkpoint, then filled.

Worker process. Every tensor goes straight from its file to its place, and is fused, sliced and cast on the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from kvasir.attention.select import select as select_attention
from kvasir.config.engine import EngineConfig
from kvasir.distributed.mesh import Mesh
from kvasir.errors import ConfigError, ModelError
from kvasir.kernels.cpu.packed import Arena
from kvasir.layers.base import Build, WeightLayer
from kvasir.models import gguf, packed_cache, registry
from kvasir.models.checkpoint import KV_SCALES, Safetensors, load_kv_scales, some
from kvasir.models.fallback import TransformersModel, load_fallback
from kvasir.models.gguf import GGUFCheckpoint
from kvasir.models.native import LibraryModel, run_in_library
from kvasir.models.spec import Architecture, DecoderSpec, LayerSpec, Names
from kvasir.models.tensor_layout import BY_ROWS, TensorLayout
from kvasir.models.transformer import Transformer
from kvasir.platforms import select as select_platform
from kvasir.quantization.base import PackedParameter, TensorKey, Unquantized
from kvasir.quantization.cpu import VOCABULARIES, CpuMethods
from kvasir.quantization.gguf import GGUFMethods, PackedRows
from kvasir.quantization.gguf_file import read_gguf

LoadedModel = Transformer | TransformersModel | LibraryModel


def load(config: EngineConfig, device: torch.device, mesh: Mesh | None = None) -> LoadedModel:
    """The model on its device, ready to run, in the implementation that the settings name."""
    if config.model.model_impl != "transformers":
        model = load_model(config, device, mesh)
        return run_in_library(model) if config.device.attention_backend == "cpu" else model
    if mesh is not None and mesh.size > 1:
        raise ConfigError("model_impl='transformers' runs on one device; set tensor_parallel_size=1.")
    return load_fallback(config, device, select_attention(config.device.attention_backend, device))


def load_model(config: EngineConfig, device: torch.device, mesh: Mesh | None = None) -> Transformer:
    """A model whose architecture Kvasir knows. `mesh` says which share to load; without one it is all of it."""
    hf, dtype = config.model.hf, getattr(torch, config.model.dtype)
    architecture = registry.find(hf)
    _refuse_quantized(hf)
    spec = architecture.read_spec(hf)
    build = _build(config, dtype, mesh or Mesh())
    source: Source | None = None
    if config.load.load_format == "gguf":
        file = read_gguf(config.model.path)
        source = Source(GGUFCheckpoint(file), gguf.names_for(file), gguf.IGNORED)
        spec = gguf.adapt(spec, file)
    elif config.load.load_format != "dummy":
        source = _open_safetensors(Path(config.model.path), architecture, hf)
    backend = select_attention(config.device.attention_backend, device)
    model = Transformer(build, spec, backend, config.model.max_model_len)
    if source is None:
        _materialise(model, device)
        _fill_dummy(model, torch.Generator(device).manual_seed(config.model.seed))
    else:
        places = find_places(model, source.names, spec)
        _check(source, places, spec)
        _materialise(model, device)
        if config.cache.is_eight_bit and isinstance(source.checkpoint, Safetensors):
            load_kv_scales(source.checkpoint, model.attentions())
        cached = packed_cache.cache_file(config, mesh or Mesh())
        if not packed_cache.restore(model, cached):
            _fill(source.checkpoint, places, show_progress=config.load.use_tqdm_on_load)
            _process(model)
            packed_cache.save(model, cached)
            return model.eval()
    _process(model)
    return model.eval()


def _process(model: nn.Module) -> None:
    for layer in _weight_layers(model):
        layer.process()


def _build(config: EngineConfig, dtype: torch.dtype, mesh: Mesh) -> Build:
    """What the layers are built with."""
    if config.device.attention_backend == "cpu":
        quantization = config.model.quantization
        return Build(dtype, mesh, CpuMethods(quantization), vocabulary=VOCABULARIES[quantization])
    return Build(dtype, mesh, GGUFMethods() if config.load.load_format == "gguf" else Unquantized())


@dataclass(frozen=True)
class Source:
    """A checkpoint and the names it uses."""

    checkpoint: Safetensors | GGUFCheckpoint
    names: Names
    ignored: tuple[str, ...]  # patterns of tensors that the model does not use


def _open_safetensors(path: Path, architecture: Architecture, hf: Mapping[str, Any]) -> Source:
    ignored = (*architecture.ignored, *KV_SCALES)
    return Source(Safetensors(path, architecture.prefix), architecture.names_for(hf), ignored)


def _refuse_quantized(hf: Mapping[str, object]) -> None:
    quantization = hf.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method", "unknown")
        raise ModelError(f"The checkpoint is quantized ({method}); Kvasir loads unquantized weights and GGUF files.")


# ---------------------------------------------------------------- places of tensors


@dataclass(frozen=True)
class TensorTarget:
    """Where a tensor or a part of one goes, and the shape it must have."""

    layer: WeightLayer
    key: TensorKey
    shape: tuple[int, ...]


@dataclass
class Place:
    """Where one tensor of the checkpoint goes."""

    layout: TensorLayout
    targets: dict[str, TensorTarget]  # by their pattern in `layout`
    layer: LayerSpec | None  # of the decoder layer it belongs to

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have in the checkpoint."""
        shapes = [self.targets[pattern].shape for pattern in self.layout.targets]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return shape[::-1] if self.layout.transposed else shape

    def load(self, tensor: torch.Tensor | PackedRows) -> None:
        if isinstance(tensor, PackedRows) and not self._takes(tensor):
            tensor = tensor.expand()
        if self.layout.transposed and isinstance(tensor, torch.Tensor) and tensor.dim() == 2:
            tensor = tensor.T
        parts = self.layout.split(tensor, self.layer)
        for pattern, part in zip(self.layout.targets, parts, strict=True):
            target = self.targets[pattern]
            assert tuple(part.shape) == target.shape, f"{pattern}: {tuple(part.shape)} is not {target.shape}"
            target.layer.load(target.key, part)

    def _takes(self, rows: PackedRows) -> bool:
        """Whether the packed rows can be cut as they are, and all targets take packed rows."""
        cuts = self.layout.split in BY_ROWS and not self.layout.transposed
        return cuts and len(rows.shape) == 2 and all(target.layer.takes_packed_rows for target in self.targets.values())


def find_places(model: nn.Module, names: Names, spec: DecoderSpec) -> dict[str, Place]:
    """Every tensor the model needs, by its name in the checkpoint."""
    theirs: dict[str, tuple[str, TensorLayout]] = {}
    for name, ours in names.items():
        layout = TensorLayout((ours,)) if isinstance(ours, str) else ours
        theirs.update((pattern, (name, layout)) for pattern in layout.targets)
    places: dict[str, Place] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, WeightLayer):
            continue
        for (tensor, part), shape in layer.tensors().items():
            full = f"{path}:{part}" if part else path
            pattern, numbers = _NUMBER.sub("*", full), _NUMBER.findall(full)
            name, layout = theirs[pattern]
            for number in numbers:
                name = name.replace("*", number, 1)
            within = spec.layers[int(numbers[0])] if full.startswith("layers.") else None
            place = places.setdefault(f"{name}.{tensor}", Place(layout, {}, within))
            place.targets[pattern] = TensorTarget(layer, (tensor, part), shape)
    return places


_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:]|$)")


def _check(source: Source, places: Mapping[str, Place], spec: DecoderSpec) -> None:
    """Raise unless the checkpoint has every tensor in the right shape, and no others but the ignored ones."""
    checkpoint, ignored = source.checkpoint, source.ignored
    if spec.tie_embeddings:  # a head in the checkpoint is then a copy of the embedding
        ignored = (*ignored, *(f"{theirs}.*" for theirs, ours in source.names.items() if ours == "head"))
    where = f"The weights in {checkpoint.directory} do not match {checkpoint.described_by}"
    if missing := [name for name in places if name not in checkpoint.entries]:
        raise ModelError(f"{where}: {len(missing)} of {len(places)} tensors are missing ({some(missing)}).")
    unknown = [name for name in checkpoint.entries if name not in places]
    if unexpected := [name for name in unknown if not any(fnmatchcase(name, pattern) for pattern in ignored)]:
        raise ModelError(f"{where}: {len(unexpected)} tensors have no place in the model ({some(unexpected)}).")
    for name, place in places.items():
        entry = checkpoint.entries[name]
        if entry.shape != place.shape:
            raise ModelError(
                f"{where}: {name} in {entry.file.name} is {list(entry.shape)}, but should be {list(place.shape)}."
            )


# ---------------------------------------------------------------- filling


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give every parameter and buffer memory on the device."""
    tensors = [*model.parameters(), *model.buffers()]
    need = sum(tensor.nbytes for tensor in tensors)
    platform = select_platform(str(device))
    free = platform.memory_free()
    if free is not None and need > free:
        raise _no_room(need, free, device)
    arena = Arena()
    try:
        for module in model.modules():
            for name, value in module.named_parameters(recurse=False):
                if isinstance(value, PackedParameter):
                    placed: nn.Parameter = PackedParameter(arena.take(value.numel()).view(value.shape))
                else:
                    placed = nn.Parameter(_memory_for(value, device), requires_grad=False)
                setattr(module, name, placed)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, _memory_for(buffer, device))
    except RuntimeError as error:  # torch.OutOfMemoryError and a failed malloc's error are both of this class
        raise _no_room(need, platform.memory_free(), device) from error


def _memory_for(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    # empty_like of a tensor without memory imports torch's symbolic shapes, which takes half a second.
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _no_room(need: int, free: int | None, device: torch.device) -> ConfigError:
    left = "less" if free is None else f"{free / 2**30:.2f} GiB"
    return ConfigError(
        f"The model's weights need {need / 2**30:.2f} GiB, but {left} is free on {device}; "
        f"free some memory, choose a smaller model, or a dtype of 16 bits if it has more."
    )


def _fill(checkpoint: Safetensors | GGUFCheckpoint, places: dict[str, Place], *, show_progress: bool) -> None:
    with tqdm(
        total=len(places), desc="Loading weights", unit="tensor", disable=not show_progress, dynamic_ncols=True
    ) as progress:
        for name, tensor in checkpoint.read(places):
            places[name].load(tensor)
            progress.update()


def _fill_dummy(model: nn.Module, generator: torch.Generator) -> None:
    """Fill in random matrices, gains of one and biases of zero, so that activations stay finite."""
    for layer in _weight_layers(model):
        if any(isinstance(value, PackedParameter) for value in layer.parameters(recurse=False)):
            for key, shape in layer.tensors().items():
                layer.load(key, torch.empty(shape).normal_(0.0, 0.02 * (len(shape) > 1), generator=generator))
    for name, value in model.named_parameters():
        if isinstance(value, PackedParameter):
            continue
        if value.dim() > 1:
            value.data.normal_(0.0, 0.02, generator=generator)
        else:
            value.data.fill_(0.0 if name.endswith("bias") else 1.0)


def _weight_layers(model: nn.Module) -> Iterator[WeightLayer]:
    return (module for module in model.modules() if isinstance(module, WeightLayer))
