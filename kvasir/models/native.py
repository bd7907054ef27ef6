"""A decoder that the CPU library runs whole: one call for a step, one for its logits. Worker process.

There is no second model: the description that the library gets is read from the Transformer's layers, which keep the
weights and caches. A model with a part that the library does not know runs layer by layer.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.attention.cpu import CpuAttention
from kvasir.kernels.cpu.library import (
    ACTIVATIONS,
    DecoderStruct,
    LayerStruct,
    MatrixStruct,
    NormStruct,
    instruction_set,
    loaded,
    num_threads,
)
from kvasir.kernels.cpu.ops import StepView, cache_of, norm_struct, rotation_of
from kvasir.layers.attention import Attention
from kvasir.layers.linear import Linear
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.norm import LayerNorm, RMSNorm, SplitRMSNorm
from kvasir.log import get_logger
from kvasir.messages import KVSpec
from kvasir.models.decoder_layer import DecoderLayer, ParallelLayer, PostNormLayer
from kvasir.models.transformer import Transformer
from kvasir.quantization.cpu import matrix_of

logger = get_logger(__name__)
STEPS: Counter[str] = Counter()  # how many steps ran whole, and how many layer by layer
_ARRANGEMENTS: dict[type, int] = {DecoderLayer: 0, ParallelLayer: 1, PostNormLayer: 2}  # of LayerStruct


class LibraryModel(nn.Module):
    """A Transformer whose products and attention are the CPU library's."""

    capturable = False
    runs_in_cpu_library = True

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, self.vocab_size = model, model.vocab_size

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]"""
        return self.model.logits(hidden)

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        return self.model.page_shape(block_size, dtype)

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        return self.model.kv_spec(block_size, dtype)

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        self.model.bind_kv(caches)

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
        step = StepView(batch, input_ids, positions)
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


def _not_covered(model: Transformer) -> str | None:
    """Why the library cannot run whole steps of the model; None: it can."""
    if model.embedding.mesh.size > 1:
        return "it is spread over several processes"
    if not isinstance(model.project_in, nn.Identity):
        return "its embeddings are projected"
    for layer in model.layers:
        if type(layer) not in _ARRANGEMENTS:
            return f"its layers are of the kind {type(layer).__name__}"
        if type(layer.mlp) not in (GatedMLP, MLP):
            return f"a feed-forward network is of the kind {type(layer.mlp).__name__}"
        if type(layer.attention) is not Attention:
            return f"its attention is of the kind {type(layer.attention).__name__}"
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
    }


def _norm(norm: nn.Module | None) -> NormStruct:
    if isinstance(norm, LayerNorm):
        return norm_struct(norm.weight.data, norm.eps, None if norm.bias is None else norm.bias.data, layer=True)
    if isinstance(norm, RMSNorm | SplitRMSNorm):
        return norm_struct(norm.weight.data, norm.eps)
    return NormStruct()


def _matrix(linear: Linear) -> MatrixStruct:
    return matrix_of(linear).struct
