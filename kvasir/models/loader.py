"""Loads a model: it is built without memory, checked against the checkpoint, then filled.

Worker process. Every tensor goes straight from its file to its place, and is fused, sliced and cast on the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from kvasir.attention.base import select as select_attention
from kvasir.config.engine import EngineConfig, ModelConfig
from kvasir.config.pooling import DenseSpec
from kvasir.errors import ConfigError, ModelError
from kvasir.kernels.cpu.packed import Arena
from kvasir.layers.adapters import StepAdapters
from kvasir.layers.base import Build, WeightLayer, describe_weights
from kvasir.layers.linear import Linear
from kvasir.layers.mesh import Mesh
from kvasir.layers.mlp import Experts, MoE
from kvasir.log import get_logger, warn_once
from kvasir.models import architectures, gguf
from kvasir.models.checkpoint import (
    KV_SCALES,
    QuantizedSafetensors,
    Safetensors,
    is_finite,
    load_kv_scales,
    names_of_experts,
    settle_head,
    some,
)
from kvasir.models.fallback import TransformersModel, load_fallback
from kvasir.models.gguf import GGUFCheckpoint
from kvasir.models.native import (
    LibraryModel,
    batch_dependent_layer,
    packed_weights_file,
    restore_packed,
    run_in_library,
    save_packed,
)
from kvasir.models.spec import BY_ROWS, Architecture, DecoderSpec, LayerSpec, Names, TensorLayout
from kvasir.models.transformer import Transformer
from kvasir.platforms import select as select_platform
from kvasir.quantization.base import (
    Methods,
    PackedParameter,
    TensorKey,
    Unquantized,
    UnquantizedExperts,
    UnquantizedLinear,
)
from kvasir.quantization.coded import QUANTIZERS, Coded
from kvasir.quantization.coded_linear import CodedMethods, ExpandedMethods
from kvasir.quantization.cpu import KEPT, ROUTING, VOCABULARIES, CpuMethods
from kvasir.quantization.formats import find_format
from kvasir.quantization.formats.base import WeightFormat
from kvasir.quantization.gguf import FileMatrix, PackedRows
from kvasir.quantization.gguf_file import read_gguf

logger = get_logger(__name__)
LoadedModel = Transformer | TransformersModel | LibraryModel


def load(config: EngineConfig, device: torch.device, mesh: Mesh | None = None) -> LoadedModel:
    """The model on its device, ready to run, in the implementation that the settings name."""
    if config.model.model_impl != "transformers":
        model = load_model(config, device, mesh)
        if config.device.batch_invariant and (layer := batch_dependent_layer(model)):
            raise ConfigError(f"batch_invariant=True: the model's {layer} rounds by the batch here. Leave it out.")
        return run_in_library(model) if config.device.attention_backend == "cpu" else model
    if mesh is not None and mesh.size > 1:
        raise ConfigError("model_impl='transformers' runs on one device; set tensor_parallel_size=1.")
    return load_fallback(config, device, select_attention(config.device.attention_backend, device))


def load_model(config: EngineConfig, device: torch.device, mesh: Mesh | None = None) -> Transformer:
    """A model whose architecture Kvasir knows. `mesh` says which share to load; without one it is all of it."""
    hf, dtype = config.model.hf, getattr(torch, config.model.dtype)
    architecture = architectures.find(hf)
    form = None if config.load.load_format == "gguf" else find_format(hf, Path(config.model.path))
    spec = architecture.read_spec(hf)
    poolers = config.model.poolers
    if poolers:
        spec = replace(spec, has_head=False, tie_embeddings=False)
    mesh = mesh or Mesh()
    if config.parallel.enable_expert_parallel:
        mesh = replace(mesh, whole_experts=True)
    build = make_build(config, dtype, mesh, form, device)
    source: Source | None = None
    if config.load.load_format == "gguf":
        file = read_gguf(config.model.path)
        source = Source(GGUFCheckpoint(file), gguf.names_for(file), gguf.ignored(file, hf))
        spec = gguf.adapt(spec, file)
    elif config.load.load_format != "dummy":
        source = _open_safetensors(Path(config.model.path), architecture, hf, form, device)
        if form is None:
            spec = settle_head(spec, source.plain, source.names)
    if poolers and config.load.load_format == "gguf":
        raise ModelError("GGUF files of pooling models are not supported; use the model's safetensors checkpoint.")
    backend = select_attention(config.device.attention_backend, device)
    model = Transformer(build, spec, backend, config.model.max_model_len, poolers)
    if source is None:
        _materialise(model, device)
        _fill_dummy(model, torch.Generator(device).manual_seed(config.model.seed), form)
    else:
        if poolers:
            source = _with_poolers(source, model, config.model)
        places = find_places(model, source.names, spec)
        _check(source, places, spec)
        _materialise(model, device)
        if config.cache.is_eight_bit and not isinstance(source.checkpoint, GGUFCheckpoint):
            load_kv_scales(source.plain, model.attentions())
        cached = packed_weights_file(config, mesh)
        if not restore_packed(model, cached):
            on_cpu = device.type == "cpu"
            show_progress = config.load.use_tqdm_on_load
            _fill(source.checkpoint, places, dtype=dtype if on_cpu else None, show_progress=show_progress)
            if not on_cpu:
                _check_on_device(model, source.checkpoint, places)
            _process(model)
            save_packed(model, cached)
            return _finish(model)
    _process(model)
    return _finish(model)


def _process(model: nn.Module) -> None:
    for layer in _weight_layers(model):
        layer.process()


def _finish(model: Transformer) -> Transformer:
    """Log how the weights are held, and return the model ready for inference."""
    logger.info("matrices: %s", describe_weights(model))
    return model.eval()


def make_build(
    config: EngineConfig, dtype: torch.dtype, mesh: Mesh, form: WeightFormat | None, device: torch.device
) -> Build:
    """What the layers are built with. `form` is that of a quantized checkpoint."""
    asked = config.adapters
    adapters = StepAdapters(asked.max_loras, asked.max_lora_rank) if asked.enable_lora else None
    quantization, is_gguf = config.model.quantization, config.load.load_format == "gguf"
    is_quantized = form is not None or (is_gguf and quantization == "gguf")
    if config.device.attention_backend == "cpu":
        kept = KEPT if is_quantized else quantization
        num_layers = config.model.hf.get("num_hidden_layers", config.model.hf.get("n_layer"))
        vocabulary = VOCABULARIES[kept].with_head(config.model.head_quantization)
        return Build(dtype, mesh, CpuMethods(kept, num_layers), vocabulary=vocabulary, adapters=adapters)
    if quantization in QUANTIZERS and form is None:
        methods: Methods = CodedMethods(QUANTIZERS[quantization])
    elif not is_quantized and not is_gguf:
        methods = Unquantized()
    else:
        methods = CodedMethods() if is_quantized and device.type == "cuda" else ExpandedMethods()
    quantize_head = QUANTIZERS.get(config.model.head_quantization or "none")
    return Build(dtype, mesh, methods, quantize_head=quantize_head, adapters=adapters)


@dataclass(frozen=True)
class Source:
    """A checkpoint and the names it uses."""

    checkpoint: Safetensors | QuantizedSafetensors | GGUFCheckpoint
    names: Names
    ignored: tuple[str, ...]  # patterns of tensors that the model does not use

    @property
    def plain(self) -> Safetensors:
        """The checkpoint's tensors as they are in its files."""
        assert not isinstance(self.checkpoint, GGUFCheckpoint), "it is made of safetensors"
        return self.checkpoint.inner if isinstance(self.checkpoint, QuantizedSafetensors) else self.checkpoint


def _with_poolers(source: Source, model: Transformer, config: ModelConfig) -> Source:
    """Return the checkpoint with the tensors of the poolers' heads. Tensors that only generation needs are ignored."""
    if not isinstance(source.checkpoint, Safetensors):
        raise ModelError("Quantized checkpoints of pooling models are not supported; use unquantized weights.")
    layers = [layer for pooler in config.poolers for layer in pooler.layers]
    for file in dict.fromkeys(layer.file for layer in layers if layer.file is not None):
        source.checkpoint.add_beside(file)
    for layer in layers:
        if layer.from_tokens:
            source.checkpoint.make(f"{layer.name}.weight", _rows_of_tokens(source, layer, config))
    heads = [theirs for theirs, ours in source.names.items() if ours == "head"]
    kept = {theirs: ours for theirs, ours in source.names.items() if ours != "head"}
    # Heads for other tasks, which many checkpoints of encoders have.
    unused = ("*pooler.*", "cls.*", "*lm_head.*", "*position_ids", "classifier.*", "vocab_*", "*head.*", "score.*")
    names = {**kept, **model.poolers.names()}
    return Source(source.checkpoint, names, (*source.ignored, *(f"{head}.*" for head in heads), *unused))


def _rows_of_tokens(source: Source, layer: DenseSpec, config: ModelConfig) -> torch.Tensor:
    """Make a classifier of the LM head: the row of the last token, minus that of the first if there are two."""
    names = {ours: theirs for theirs, ours in source.names.items() if isinstance(ours, str)}
    name = next(
        (
            f"{names[end]}.weight"
            for end in ("head", "embedding")
            if f"{names.get(end)}.weight" in source.checkpoint.entries
        ),
        None,
    )
    if name is None:
        raise ModelError("classifier_from_token needs the LM head of the checkpoint, which it does not have.")
    ids = [_token_id(token, config) for token in layer.from_tokens]
    ((_, matrix),) = source.checkpoint.read([name])
    assert isinstance(matrix, torch.Tensor), "safetensors checkpoints hold plain tensors"
    rows = [matrix[token].float().clone() for token in ids]
    return (rows[-1] - rows[0] if len(rows) == 2 else rows[0])[None]


def _token_id(token: str, config: ModelConfig) -> int:
    from tokenizers import Tokenizer

    file = Path(config.tokenizer or config.path) / "tokenizer.json"
    found = Tokenizer.from_file(str(file)).token_to_id(token) if file.is_file() else None
    if found is None:
        raise ModelError(f"classifier_from_token: the tokenizer in {file.parent} has no token {token!r}.")
    return int(found)


def _open_safetensors(
    path: Path,
    architecture: Architecture,
    hf: Mapping[str, Any],
    form: WeightFormat | None = None,
    device: torch.device | None = None,
) -> Source:
    names = architecture.names_for(hf)
    embedding = next(theirs for theirs, ours in names.items() if ours == "embedding")
    plain = Safetensors(path, architecture.prefix or embedding[: embedding.index(".") + 1])
    return open_source(plain, names, architecture.ignored_for(hf), form, device)


def open_source(
    plain: Safetensors,
    names: Names,
    ignored: tuple[str, ...],
    form: WeightFormat | None = None,
    device: torch.device | None = None,
) -> Source:
    checkpoint = plain if form is None else QuantizedSafetensors(plain, form, device or torch.device("cpu"))
    return Source(checkpoint, names_of_experts(names, checkpoint.entries), (*ignored, *KV_SCALES))


def load_part(
    module: nn.Module,
    source: Source | None,
    around: DecoderSpec,
    config: EngineConfig,
    device: torch.device,
    form: WeightFormat | None,
) -> None:
    """Give memory and weights to a module that is no whole decoder; without a source, random ones. `around` is the
    decoder to whose layers it belongs."""
    if source is None:
        _materialise(module, device)
        _fill_dummy(module, torch.Generator(device).manual_seed(config.model.seed), form)
    else:
        places = find_places(module, source.names, around)
        _check(source, places, around)
        _materialise(module, device)
        on_cpu, dtype = device.type == "cpu", getattr(torch, config.model.dtype)
        _fill(source.checkpoint, places, dtype=dtype if on_cpu else None, show_progress=config.load.use_tqdm_on_load)
        if not on_cpu:
            _check_on_device(module, source.checkpoint, places)
    _process(module)


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
    # By their pattern in `layout`: one, or where the tensor is a stack, one for each of its entries.
    targets: dict[str, list[TensorTarget]]
    layer: LayerSpec | None  # of the decoder layer it belongs to

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have in the checkpoint."""
        shapes = [self.targets[pattern][0].shape for pattern in self.layout.targets]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        shape = shape[::-1] if self.layout.transposed else shape
        if self.layout.stacked == "no":
            return shape
        if self._has_entries:
            return self._num_entries, *shape
        return self._num_entries * shape[0], *shape[1:]

    @property
    def takes_integers(self) -> bool:
        return all(target.layer.takes_integers for target in self.all_targets())

    @property
    def _has_entries(self) -> bool:
        """Whether a stack has a dimension for its entries. One of biases always does."""
        is_bias = len(self.targets[self.layout.targets[0]][0].shape) == 1
        return self.layout.stacked == "entries" or is_bias

    @property
    def _num_entries(self) -> int:
        return len(self.targets[self.layout.targets[0]])

    def load(self, tensor: torch.Tensor | FileMatrix) -> None:
        if self.layout.stacked == "no":
            self._load_entry(tensor, 0)
            return
        rows = (len(tensor.data) if isinstance(tensor, PackedRows) else tensor.shape[0]) // self._num_entries
        for entry in range(self._num_entries):
            if isinstance(tensor, Coded):
                part: Any = tensor.cut(slice(entry * rows, (entry + 1) * rows))
            elif isinstance(tensor, PackedRows):  # its rows are packed one by one
                part = PackedRows(tensor.data[entry * rows : (entry + 1) * rows], tensor.kind, self.shape[1:])
            else:
                part = tensor[entry] if self._has_entries else tensor[entry * rows : (entry + 1) * rows]
            self._load_entry(part, entry)

    def _load_entry(self, tensor: torch.Tensor | FileMatrix, entry: int) -> None:
        if not isinstance(tensor, torch.Tensor) and not self._takes(tensor):
            if isinstance(tensor, Coded):
                why = "it is fused in a way that only values can be cut"
                if not all(target.layer.takes_packed_rows for target in self.all_targets()):
                    why = "its layer computes with values"
                warn_once(logger, f"{self.described} is expanded: {why}.")
            tensor = tensor.expand()
        if self.layout.transposed and isinstance(tensor, torch.Tensor) and tensor.dim() == 2:
            tensor = tensor.T
        parts = self.layout.split(tensor, self.layer)
        for pattern, part in zip(self.layout.targets, parts, strict=True):
            target = self.targets[pattern][entry]
            assert tuple(part.shape) == target.shape, f"{pattern}: {tuple(part.shape)} is not {target.shape}"
            target.layer.load(target.key, part)

    @property
    def described(self) -> str:
        return " and ".join(self.layout.targets)

    def _takes(self, rows: FileMatrix) -> bool:
        """Whether the packed rows can be cut as they are, and all targets take packed rows."""
        cuts = self.layout.split in BY_ROWS and not self.layout.transposed
        takes = all(target.layer.takes_packed_rows for target in self.all_targets())
        return cuts and len(rows.shape) == 2 and takes

    def all_targets(self) -> Iterator[TensorTarget]:
        return (target for targets in self.targets.values() for target in targets)


def find_places(model: nn.Module, names: Names, spec: DecoderSpec) -> dict[str, Place]:
    """Every tensor the model needs, by its name in the checkpoint."""
    theirs: dict[str, tuple[str, TensorLayout]] = {}
    for name, ours in names.items():
        layout = TensorLayout((ours,)) if isinstance(ours, str) else ours
        for pattern in layout.targets:
            theirs[pattern] = name, layout
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
            place = places.setdefault(_full_name(name, tensor, layout), Place(layout, {}, within))
            place.targets.setdefault(pattern, []).append(TensorTarget(layer, (tensor, part), shape))
    return places


def _full_name(name: str, tensor: str, layout: TensorLayout) -> str:
    if not layout.bare:
        return f"{name}.{tensor}"
    return f"{name}_bias" if tensor == "bias" else name


_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:]|$)")


def _check(source: Source, places: Mapping[str, Place], spec: DecoderSpec) -> None:
    """Raise unless the checkpoint has every tensor in the right shape, and no others but the ignored ones."""
    checkpoint, ignored = source.checkpoint, source.ignored
    if spec.tie_embeddings:  # a head in the checkpoint is then a copy of the embedding
        ignored = (*ignored, *(f"{theirs}.*" for theirs, ours in source.names.items() if ours == "head"))
    where = f"The weights in {checkpoint.directory} do not match {checkpoint.described_by}"
    if missing := [name for name in places if name not in checkpoint.entries]:
        raise ModelError(
            f"{where}: {len(missing)} of {len(places)} tensors are missing ({some(missing)}). "
            f"{_what_to_do(checkpoint, missing)}"
        )
    unknown = [name for name in checkpoint.entries if name not in places]
    unexpected = [name for name in unknown if not any(fnmatchcase(name, pattern) for pattern in ignored)]
    if isinstance(checkpoint, QuantizedSafetensors):
        unexpected = [name for name in unexpected if not checkpoint.is_empty_bias(name)]
    if unexpected:
        raise ModelError(
            f"{where}: {len(unexpected)} tensors have no place in the model ({some(unexpected)}). "
            f"{_what_to_do(checkpoint, unexpected)}"
        )
    for name, place in places.items():
        entry = checkpoint.entries[name]
        if entry.shape != place.shape:
            raise ModelError(
                f"{where}: {name} in {entry.file.name} is {list(entry.shape)}, but should be {list(place.shape)}. "
                f"{_what_to_do(checkpoint, [name])}"
            )


def _what_to_do(checkpoint: Safetensors | QuantizedSafetensors | GGUFCheckpoint, names: Sequence[str]) -> str:
    modules = {name.removesuffix(".weight") for name in names}
    codes = [f"{module}.{part}" for module in modules for part in ("qweight", "weight_packed", "weight.absmax")]
    if isinstance(checkpoint, Safetensors) and any(name in checkpoint.entries for name in codes):
        return "Weights are quantized, but config.json has no quantization_config; download it again."
    return "Download the checkpoint again, all of its files."


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


def _fill(
    checkpoint: Safetensors | QuantizedSafetensors | GGUFCheckpoint,
    places: dict[str, Place],
    *,
    dtype: torch.dtype | None,
    show_progress: bool,
) -> None:
    """Load every tensor. With `dtype`, tensors with values that it cannot hold are refused."""
    with tqdm(
        total=len(places), desc="Loading weights", unit="tensor", disable=not show_progress, dynamic_ncols=True
    ) as progress:
        for name, tensor in checkpoint.read(places):
            place = places[name]
            if isinstance(tensor, torch.Tensor) and not (_is_float(tensor) or place.takes_integers):
                raise _no_floats(checkpoint, name, tensor)
            if dtype is not None and not _fits(tensor, dtype):
                raise _not_finite(checkpoint, name)
            place.load(tensor)
            progress.update()


def _is_float(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are weights as they stand; 8-bit values are codes."""
    return tensor.itemsize > 1 and tensor.is_floating_point()


# ---------------------------------------------------------------- weights that are not numbers
# One NaN makes every answer empty, and a server with such a model would look healthy. On a CPU each tensor is checked
# as it is read, before it is packed. Other devices read their memory much faster than a CPU reads the file, so there
# the loaded parameters are checked, all with one wait. The file is read again only to name the tensor.


def _fits(tensor: torch.Tensor | FileMatrix, dtype: torch.dtype) -> bool:
    parts = (tensor,) if isinstance(tensor, torch.Tensor) else tensor.scales()
    return all(is_finite(part, dtype) for part in parts)


def _check_on_device(
    model: nn.Module, checkpoint: Safetensors | QuantizedSafetensors | GGUFCheckpoint, places: dict[str, Place]
) -> None:
    layers, extremes = [], []
    for layer in _weight_layers(model):
        for value in layer.parameters(recurse=False):
            if value.is_floating_point() and value.numel():
                layers.append(layer)
                extremes.append(torch.stack(torch.aminmax(value.data)).float())
    if not layers or bool((finite := torch.stack(extremes).isfinite().all(dim=1)).all()):
        return
    broken = {id(layer) for layer, whole in zip(layers, finite.tolist(), strict=True) if not whole}
    suspects = [
        name for name, place in places.items() if any(id(target.layer) in broken for target in place.all_targets())
    ]
    wrong = [name for name, tensor in checkpoint.read(suspects) if not _fits(tensor, extremes[0].dtype)]
    raise _not_finite(checkpoint, (wrong or suspects)[0])


def _not_finite(checkpoint: Safetensors | QuantizedSafetensors | GGUFCheckpoint, name: str) -> ModelError:
    return ModelError(
        f"The weights in {checkpoint.directory} are damaged: {name} in {checkpoint.entries[name].file.name} has values "
        f"that are not finite (NaN, infinity, or too large for dtype), so the model could not answer. Download it "
        f"again, or repair it."
    )


def _no_floats(
    checkpoint: Safetensors | QuantizedSafetensors | GGUFCheckpoint, name: str, tensor: torch.Tensor
) -> ModelError:
    kind = str(tensor.dtype).removeprefix("torch.")
    return ModelError(
        f"The weights in {checkpoint.directory} are damaged: {name} in {checkpoint.entries[name].file.name} is {kind}, "
        f"which means nothing without scales, and the file has none for it. Download config.json and the weights again."
    )


def _fill_dummy(model: nn.Module, generator: torch.Generator, form: WeightFormat | None = None) -> None:
    """Fill in random matrices, gains of one and biases of zero, so that activations stay finite. With `form`, linear
    layers and experts get random codes of that format."""
    of_linear = None if form is None else form.scheme("model.layers.0.mlp.down_proj")
    of_experts = None if form is None else form.scheme("model.layers.0.mlp.experts.0.down_proj")
    for layer in _weight_layers(model):
        if _is_loaded(layer):
            scheme = of_experts if isinstance(layer, Experts) else of_linear
            for key, shape in layer.tensors().items():
                is_matrix = len(shape) == 2 and isinstance(layer, Linear | Experts)
                if is_matrix and scheme is not None and not getattr(layer, "prefix", "").endswith(ROUTING):
                    codes: Any = scheme.coding(shape[1]).make(shape[0], shape[1], generator.device, generator)
                    layer.load(key, codes)
                else:
                    values = torch.empty(shape, device=generator.device)
                    layer.load(key, values.normal_(0.0, 0.02 * (len(shape) > 1), generator=generator))
    for name, value in model.named_parameters():
        if isinstance(value, PackedParameter) or not value.numel():
            continue
        if not value.is_floating_point():
            value.data.zero_()
            continue
        if value.dim() > 1:
            value.data.normal_(0.0, 0.02, generator=generator)
        else:
            value.data.fill_(0.0 if name.endswith(("bias", "correction")) else 1.0)
    for module in model.modules():
        if isinstance(module, MoE):
            module.route_evenly()


def _is_loaded(layer: WeightLayer) -> bool:
    """Whether a layer fills its memory in its own `load`, because that is no plain matrix."""
    method = getattr(layer, "method", None)
    if isinstance(method, UnquantizedLinear) or type(method) is UnquantizedExperts:
        return False
    return method is not None or any(isinstance(value, PackedParameter) for value in layer.parameters(recurse=False))


def _weight_layers(model: nn.Module) -> Iterator[WeightLayer]:
    return (module for module in model.modules() if isinstance(module, WeightLayer))
