"""Packed weights on disk, where packed_weights_dir says so: a checkpoint is packed and quantized once. Worker process.

A file is named by what it depends on: the checkpoint's files, how weights are kept, this rank's share, and the
library's layouts. It holds the layers' tensors as they are after packing, each by its path in the model.
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
from kvasir.layers.base import WeightLayer
from kvasir.layers.embedding import Embedding
from kvasir.log import get_logger
from kvasir.platforms import cpu_structs

logger = get_logger(__name__)
VERSION = 3  # of the layouts in csrc/cpu/kernels.h, and of which layers have which


def cache_file(config: EngineConfig, mesh: Mesh) -> Path | None:
    """Where this model's packed weights are, or will be; None where none are kept."""
    if config.load.packed_weights_dir is None:
        return None
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(Path(config.model.path).glob("*.safetensors"))
    ]
    told = [VERSION, cpu_structs.layout(), os.path.realpath(config.model.path), files]
    told += [config.model.quantization, config.model.dtype, config.model.hf, mesh.rank, mesh.size]
    name = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return Path(config.load.packed_weights_dir).expanduser() / f"{name}.safetensors"


def restore(model: nn.Module, file: Path | None) -> bool:
    """Fill the model from the file. False: there is none, or not a whole one."""
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
        logger.warning("%s cannot be used (%s): the weights are packed anew", file, error)
        return False
    logger.info("packed weights come from %s", file)
    return True


def keep(model: nn.Module, file: Path | None) -> None:
    """Write what the model holds after packing. The file appears whole or not at all."""
    if file is None:
        return
    tensors = {name: tensor for name, _, _, tensor in _tensors(model)}
    beside = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, beside)
        beside.replace(file)
    except (OSError, SafetensorError) as error:  # which of them a full disk is depends on where it was noticed
        beside.unlink(missing_ok=True)
        logger.warning("packed weights cannot be kept in %s (%s)", file.parent, error)
        return
    logger.info("packed weights are kept in %s", file)


def _tensors(model: nn.Module) -> Iterator[tuple[str, WeightLayer, str, torch.Tensor]]:
    """Everything to be kept: its name, its layer, its name there, and its memory. An embedding is one matrix."""
    for path, layer in model.named_modules():
        if not isinstance(layer, WeightLayer):
            continue
        if isinstance(layer, Embedding):
            memory = layer.weight.data if layer.matrix is None else layer.matrix.memory
            yield f"{path}.matrix", layer, "matrix", memory
        for name, value in layer.named_parameters(recurse=False):
            if not (isinstance(layer, Embedding) and name == "weight"):
                yield f"{path}.{name}", layer, name, value.data
