"""A decoder that the CPU library runs whole: one call for a step, one for its logits. Worker process.

There is no second model: the description that the library gets is read from the Transformer's layers, which keep the
weights and caches. A model with a part that the library does not know runs layer by layer. At the end is the cache of
packed weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.attention.cpu import CpuAttention
from kvasir.config.engine import EngineConfig
from kvasir.kernels.cpu.library import (
    ACTIVATIONS,
    AdaptersStruct,
    DecoderStruct,
    LayerStruct,
    MatrixStruct,
    NormStruct,
    instruction_set,
    layout,
    loaded,
    num_threads,
)
from kvasir.kernels.cpu.ops import StepView, adapters_of, address, cache_of, norm_struct, rotation_of
from kvasir.layers.attention import Attention
from kvasir.layers.base import WeightLayer
from kvasir.layers.embedding import Embedding
from kvasir.layers.latent_attention import LatentAttention
from kvasir.layers.linear import Linear
from kvasir.layers.mesh import Mesh
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.norm import LayerNorm, RMSNorm, SplitRMSNorm
from kvasir.log import get_logger
from kvasir.messages import KVSpec
from kvasir.models.key_factors import even_out_keys
from kvasir.models.transformer import DecoderLayer, ParallelLayer, PostNormLayer, Transformer
from kvasir.quantization.cpu import matrix_of

logger = get_logger(__name__)
STEPS: Counter[str] = Counter()  # how many steps ran whole, how many of those with adapters, how many layer by layer
_ARRANGEMENTS: dict[type, int] = {DecoderLayer: 0, ParallelLayer: 1, PostNormLayer: 2}  # of LayerStruct


class LibraryModel(nn.Module):
    """A Transformer whose products and attention are the CPU library's."""

    capturable = False
    runs_in_cpu_library = True

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, self.vocab_size, self.poolers = model, model.vocab_size, model.poolers

    def record(self, layers: Sequence[int]) -> None:
        """See Transformer.record."""
        self.model.record(layers)

    @property
    def recorded(self) -> torch.Tensor | None:
        return self.model.recorded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]"""
        return self.model.logits(hidden)

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        return self.model.page_shape(block_size, dtype)

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        return self.model.kv_spec(block_size, dtype)

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        self.model.bind_kv(caches)
        if any(cache.dtype == torch.int8 for cache in caches):
            for layer in self.model.layers:
                if isinstance(layer, DecoderLayer):
                    even_out_keys(layer.attention, None if isinstance(layer, PostNormLayer) else layer.attention_norm)

    def compile_key(self) -> str:
        return ""  # nothing is compiled

    def compile_copy(self) -> None:
        """None: the library's kernels are compiled when it is built."""
        return None

    def weight_bytes(self) -> int:
        return self.model.weight_bytes()


class LayerByLayer(LibraryModel):
    """Runs a model that has a part that the library does not run whole."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        STEPS["layer by layer"] += 1
        return self.model.forward(input_ids, positions, batch, last)


class NativeDecoder(LibraryModel):
    """Runs whole steps in the library."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self._layers = (LayerStruct * len(model.layers))()
        self._decoder = DecoderStruct()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """The hidden states after the last norm, [tokens, hidden], or those of `last`, [sequences, hidden]."""
        adapters = self.model.adapters
        needs_layers = (adapters is not None and adapters.needs_layers) or self.model.records
        if needs_layers or self.model.overlay.tokens is not None:
            STEPS["layer by layer"] += 1
            return self.model.forward(input_ids, positions, batch, last)
        step = StepView(batch, input_ids, positions)
        if adapters is not None and adapters.tokens is not None:
            step.struct.adapters = address(adapters.tokens.slots, torch.int32)
            STEPS["adapted"] += 1
        step.struct.only_last = last is not None
        count = len(input_ids) if last is None else step.struct.sequences
        out = torch.empty(count, self._decoder.hidden, dtype=torch.bfloat16)
        loaded().kv_forward(ctypes.byref(self._decoder), ctypes.byref(step.struct), ctypes.c_void_p(out.data_ptr()))
        STEPS["whole"] += 1
        return out

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        super().bind_kv(caches)
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, DecoderLayer)
            self._layers[index] = _describe_layer(layer)
        self._decoder = self._describe()

    def _describe(self) -> DecoderStruct:
        model, embedding = self.model, self.model.embedding.matrix
        assert embedding is not None, "the library has the embedding"
        table = None if model.positions is None else model.positions.weight.data
        return DecoderStruct(
            hidden=model.spec.hidden_size,
            num_layers=len(model.layers),
            layers=ctypes.addressof(self._layers),
            embedding=embedding.struct,
            embedding_scale=model.embedding_scale,
            positions=None if table is None else table.data_ptr(),
            position_offset=0 if model.positions is None else model.positions.offset,
            final_norm=_norm(model.norm),
        )


def run_in_library(model: Transformer) -> LibraryModel:
    """The model in the fastest form in which the library can run it."""
    reason = _not_covered(model)
    how = f"{instruction_set()}, {num_threads()} thread{'s' if num_threads() > 1 else ''}"
    if reason:
        logger.info("the CPU library (%s) runs this model layer by layer: %s", how, reason)
        return LayerByLayer(model)
    logger.info("the CPU library (%s) runs whole steps", how)
    return NativeDecoder(model)


def batch_dependent_layer(model: Transformer) -> str | None:
    """Name a part of the model whose rounding may depend on the batch; None if there is none."""
    for number, layer in enumerate(model.layers):
        attention: Any = layer.attention
        if type(layer) not in _ARRANGEMENTS or type(attention) not in (Attention, LatentAttention):
            return f"layer {number} ({type(layer).__name__})"
        if not isinstance(attention.backend, CpuAttention):
            return f"attention in layer {number} ({type(attention.backend).__name__})"
    return None


def _not_covered(model: Transformer) -> str | None:
    """Why the library cannot run whole steps of the model; None: it can."""
    if model.embedding.mesh.size > 1:
        return "it is spread over several processes"
    if model.spec.is_encoder:
        return "it is an encoder"
    if not isinstance(model.project_in, nn.Identity):
        return "its embeddings are projected"
    for layer in model.layers:
        if type(layer) not in _ARRANGEMENTS:
            return f"its layers are of the kind {type(layer).__name__}"
        if type(layer.mlp) not in (GatedMLP, MLP):
            return f"a feed-forward network is of the kind {type(layer.mlp).__name__}"
        if type(layer.attention) is not Attention:
            return f"its attention is of the kind {type(layer.attention).__name__}"
        if layer.attention.clip is not None or layer.attention.temperature is not None:
            return "its queries are clipped or scaled by position"
        if not isinstance(layer.attention.backend, CpuAttention):
            return "another attention backend was chosen"
    return None


# ---------------------------------------------------------------- the description


def _describe_layer(layer: DecoderLayer) -> LayerStruct:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, GatedMLP | MLP) and isinstance(attention, Attention), "the library knows the layer's parts"
    return LayerStruct(
        attention_norm=_norm(layer.attention_norm),
        attention_post_norm=_norm(layer.attention_post_norm),
        mlp_norm=_norm(layer.mlp_norm),
        mlp_post_norm=_norm(layer.mlp_post_norm),
        up=_matrix(mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up),
        down=_matrix(mlp.down),
        gated=isinstance(mlp, GatedMLP),
        activation=ACTIVATIONS[mlp.activation],
        arrangement=_ARRANGEMENTS[type(layer)],
        residual_scale=layer.residual_scale,
        up_adapters=_adapters(mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up),
        down_adapters=_adapters(mlp.down),
        **_describe_attention(attention),
    )


def _describe_attention(attention: Attention) -> dict[str, object]:
    rotary = attention.rotary
    return {
        "q_norm": _norm(attention.q_norm),
        "k_norm": _norm(attention.k_norm),
        "whole_norm": isinstance(attention.q_norm, SplitRMSNorm),
        "qkv": _matrix(attention.qkv),
        "o": _matrix(attention.o),
        "qkv_adapters": _adapters(attention.qkv),
        "o_adapters": _adapters(attention.o),
        "rotation": rotation_of(
            None if rotary is None else rotary.table, rotary is not None and rotary.rope.interleaved
        ),
        "cache": cache_of(attention.kv_cache),
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "window": attention.window or 0,
        "group": attention.group,
        "scale": attention.scale,
        "softcap": attention.softcap or 0.0,
        "sinks": None if attention.sinks is None else attention.sinks.weight.data_ptr(),
    }


def _norm(norm: nn.Module | None) -> NormStruct:
    if isinstance(norm, LayerNorm):
        return norm_struct(norm.weight.data, norm.eps, None if norm.bias is None else norm.bias.data, layer=True)
    if isinstance(norm, RMSNorm | SplitRMSNorm):
        return norm_struct(norm.weight.data, norm.eps)
    return NormStruct()


def _matrix(linear: Linear) -> MatrixStruct:
    return matrix_of(linear).struct


def _adapters(linear: Linear) -> AdaptersStruct:
    return AdaptersStruct() if linear.slots is None else adapters_of(linear.slots.matrices())


# ---------------------------------------------------------------- the cache of packed weights
# With packed_weights_dir, a checkpoint is packed only once. A file's name is a hash of all that its content depends on:
# the checkpoint's files, the quantization, this rank's share, and the library's layouts. It holds the layers' tensors
# after packing, by their paths in the model.

PACKED_VERSION = 5  # of the layouts in csrc/cpu/kernels.h, and of which layer has which


def packed_weights_file(config: EngineConfig, mesh: Mesh) -> Path | None:
    """Return the file of this model's packed weights, whether it exists or not; None if packed_weights_dir is unset."""
    if config.load.packed_weights_dir is None:
        return None
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(Path(config.model.path).glob("*.safetensors"))
    ]
    inputs = [PACKED_VERSION, layout(), os.path.realpath(config.model.path), files]
    inputs += [config.model.head_quantization] if config.model.head_quantization else []
    inputs += [config.model.quantization, config.model.dtype, config.model.hf, mesh.rank, mesh.size, mesh.whole_experts]
    name = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return Path(config.load.packed_weights_dir).expanduser() / f"{name}.safetensors"


def restore_packed(model: nn.Module, file: Path | None) -> bool:
    """Fill the model from the file. Returns False if there is no file, or it cannot be used."""
    if file is None or not file.is_file():
        return False
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name, layer, key, tensor in _packed_tensors(model):
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


def save_packed(model: nn.Module, file: Path | None) -> None:
    """Write the packed weights of the model. The file appears whole or not at all."""
    if file is None:
        return
    tensors = {name: tensor for name, _, _, tensor in _packed_tensors(model)}
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


def _packed_tensors(model: nn.Module) -> Iterator[tuple[str, WeightLayer, str, torch.Tensor]]:
    """Yield all tensors of the file: name, layer, name within the layer, and memory. An embedding is one matrix."""
    for path, layer in model.named_modules():
        if not isinstance(layer, WeightLayer):
            continue
        if isinstance(layer, Embedding):
            memory = layer.weight.data if layer.matrix is None else layer.matrix.memory
            yield f"{path}.matrix", layer, "matrix", memory
        for name, value in layer.named_parameters(recurse=False):
            if not (isinstance(layer, Embedding) and name == "weight"):
                yield f"{path}.{name}", layer, name, value.data
