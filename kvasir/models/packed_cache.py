"""The cache of packed weights in packed_weights_dir, so that a checkpoint is packed only once. Worker process.

A file's name is a hash of all that its content depends on: the checkpoint's files, the quantization, this rank's share,
and the library's layouts. It holds the layers' tensors after packing, by their paths in the model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from kvasir.config.engine import EngineConfig
from kvasir.distributed.mesh import Mesh
from kvasir.kernels.cpu import library
from kvasir.layers.base import WeightLayer
from kvasir.layers.embedding import Embedding
from kvasir.log import get_logger

logger = get_logger(__name__)
VERSION = 3  # of the layouts in csrc/cpu/kernels.h, and of which layer has which


def cache_file(config: EngineConfig, mesh: Mesh) -> Path | None:
    """The file of this model's packed weights, whether it exists or not; None if packed_weights_dir is unset."""
    if config.load.packed_weights_dir is None:
        return None
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(Path(config.model.path).glob("*.safetensors"))
    ]
    inputs = [VERSION, library.layout(), os.path.realpath(config.model.path), files]
    inputs += [config.model.quantization, config.model.dtype, config.model.hf, mesh.rank, mesh.size]
    name = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return Path(config.load.packed_weights_dir).expanduser() / f"{name}.safetensors"


def restore(model: nn.Module, file: Path | None) -> bool:
    """Fill the model from the file. False: there is no file, or it cannot be used."""
    if file is None or not file.is_file():
        return False
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name, layer, key, tensor in _tensors(model):
                kept = opened.get_tensor(name)
                if key == "matrix":
                    assert isinstance(layer, Embedding)
                    layer.adopt(kept.clone())
                else:
                    tensor.copy_(kept)
    except (SafetensorError, OSError, RuntimeError) as error:
        logger.warning("%s cannot be used (%s): the weights are packed again", file, error)
        return False
    logger.info("packed weights come from %s", file)
    return True


def save(model: nn.Module, file: Path | None) -> None:
    """Write the packed weights of the model. The file appears whole or not at all."""
    if file is None:
        return
    tensors = {name: tensor for name, _, _, tensor in _tensors(model)}
    beside = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, beside)
        beside.replace(file)
    except (OSError, SafetensorError) as error:  # a full disk may raise either
        beside.unlink(missing_ok=True)
        logger.warning("packed weights cannot be written to %s (%s)", file.parent, error)
        return
    logger.info("packed weights are written to %s", file)


def _tensors(model: nn.Module) -> Iterator[tuple[str, WeightLayer, str, torch.Tensor]]:
    """All tensors of the file: name, layer, name within the layer, and memory. An embedding is one matrix."""
    for path, layer in model.named_modules():
        if not isinstance(layer, WeightLayer):
            continue
        if isinstance(layer, Embedding):
            memory = layer.weight.data if layer.matrix is None else layer.matrix.memory
            yield f"{path}.matrix", layer, "matrix", memory
        for name, value in layer.named_parameters(recurse=False):
            if not (isinstance(layer, Embedding) and name == "weight"):
                yield f"{path}.{name}", layer, name, value.data
