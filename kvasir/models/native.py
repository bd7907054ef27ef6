"""A decoder that the CPU library runs whole: one call for a step, one for its logits. Worker process.

There is no second model: the description that the library gets is read off the Transformer's own layers, which stay the
owners of weights and caches. What the library does not know is found here, at load; such a model runs layer by layer.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.attention.cpu import CpuAttention
from kvasir.kernels.cpu.ops import norm_struct
from kvasir.kernels.cpu.step import StepView, cache_of, rotation_of
from kvasir.layers.attention import Attention
from kvasir.layers.linear import Linear
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.norm import LayerNorm, NoNorm, RMSNorm, SplitRMSNorm
from kvasir.log import get_logger
from kvasir.models.decoder_layer import DecoderLayer, ParallelLayer, SumNormLayer
from kvasir.models.transformer import Transformer
from kvasir.platforms.cpu_library import instruction_set, loaded, num_threads
from kvasir.platforms.cpu_structs import ACTIVATIONS, Decoder, Layer, Matrix, Norm
from kvasir.quantization.cpu import matrix_of

logger = get_logger(__name__)
# How many steps ran whole, and how many layer by layer though the library was there.
STEPS: Counter[str] = Counter()


class NativeDecoder(nn.Module):
    """Does what a Transformer does, in the library."""

    capturable = False
    runs_in_cpu_library = True

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, self.vocab_size = model, model.vocab_size
        self.page_shape, self.kv_spec = model.page_shape, model.kv_spec
        self._layers = (Layer * len(model.layers))()
        self._decoder = Decoder()

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

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""
        return self.model.logits(hidden)

    def compile_copy(self) -> None:
        """The library is compiled already."""
        return None

    def weight_bytes(self) -> int:
        return self.model.weight_bytes()

    # ------------------------------------------------------------ the KV cache

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        self.model.bind_kv(caches)
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, DecoderLayer)
            self._layers[index] = _describe_layer(layer)
        self._decoder = self._describe()

    def _describe(self) -> Decoder:
        model, embedding = self.model, self.model.embedding.matrix
        assert embedding is not None, "the library has the embedding"
        table = None if model.positions is None else model.positions.weight.data
        return Decoder(
            hidden=model.spec.hidden_size,
            num_layers=len(model.layers),
            layers=ctypes.addressof(self._layers),
            embedding=embedding.struct,
            embedding_scale=model.embedding_scale,
            positions=None if table is None else table.data_ptr(),
            position_offset=0 if model.positions is None else model.positions.offset,
            final_norm=_norm(model.norm),
        )


class LayerByLayer(nn.Module):
    """A Transformer with something that the library does not run whole: its parts still are the library's."""

    capturable = False
    runs_in_cpu_library = True

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, self.vocab_size = model, model.vocab_size
        self.page_shape, self.kv_spec, self.bind_kv = model.page_shape, model.kv_spec, model.bind_kv

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        STEPS["layer by layer"] += 1
        return self.model.forward(input_ids, positions, batch, last)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)

    def compile_copy(self) -> None:
        """The library is compiled already."""
        return None

    def weight_bytes(self) -> int:
        return self.model.weight_bytes()


def on_the_cpu(model: Transformer) -> NativeDecoder | LayerByLayer:
    """The model as the library runs it best."""
    missing = _not_covered(model)
    how = f"{instruction_set()}, {num_threads()} thread{'s' if num_threads() > 1 else ''}"
    if missing:
        logger.info("the CPU library (%s) runs this model layer by layer: %s", how, missing)
        return LayerByLayer(model)
    logger.info("the CPU library (%s) runs whole steps", how)
    return NativeDecoder(model)


def _not_covered(model: Transformer) -> str | None:
    """What the library does not know of the model; None: it knows all of it."""
    if model.embedding.mesh.size > 1:
        return "it is spread over several processes"
    if not isinstance(model.project_in, NoNorm):
        return "its embeddings are projected"
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        if not isinstance(layer.mlp, GatedMLP | MLP):
            return "it has experts"
        if isinstance(layer.attention.q_norm, LayerNorm):
            return "its queries go through a layer norm"
        if not isinstance(layer.attention.backend, CpuAttention):
            return "another attention was chosen"
    return None


# ---------------------------------------------------------------- the description


def _describe_layer(layer: DecoderLayer) -> Layer:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, GatedMLP | MLP)
    gated = isinstance(mlp, GatedMLP)
    return Layer(
        attention_norm=_norm(layer.attention_norm),
        attention_post_norm=_norm(layer.attention_post_norm),
        mlp_norm=_norm(layer.mlp_norm),
        mlp_post_norm=_norm(layer.mlp_post_norm),
        up=_matrix(mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up),
        down=_matrix(mlp.down),
        gated=gated,
        activation=ACTIVATIONS[mlp.activation],
        arrangement=1 if isinstance(layer, ParallelLayer) else 2 if isinstance(layer, SumNormLayer) else 0,
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


def _norm(norm: nn.Module | None) -> Norm:
    if isinstance(norm, LayerNorm):
        return norm_struct(norm.weight.data, norm.eps, None if norm.bias is None else norm.bias.data, layer=True)
    if isinstance(norm, RMSNorm | SplitRMSNorm):
        return norm_struct(norm.weight.data, norm.eps)
    return Norm()


def _matrix(linear: Linear) -> Matrix:
    return matrix_of(linear).struct
