"""Embedding and head: token ids to vectors, and vectors to logits. Each rank has a share of the vocabulary.

`StepOverlay` puts other embeddings in place of those of a step's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from kvasir import kernels
from kvasir.kernels.cpu.packed import PLAIN, Format, Layout, PackedMatrix, pack, plain
from kvasir.layers.adapters import VocabularySlots
from kvasir.layers.base import Build, WeightLayer
from kvasir.quantization.base import TensorKey
from kvasir.quantization.coded import Coded
from kvasir.quantization.coded_linear import on_device
from kvasir.quantization.cpu import pack_as_in_file
from kvasir.quantization.gguf import FileMatrix, expanded


class Embedding(WeightLayer):
    """A vector per token. `tied`: the head uses its matrix too."""

    takes_packed_rows = True
    matrix: PackedMatrix | None = None  # set where the CPU library keeps the matrix; `weight` is then empty
    coded: Coded | None = None  # set where the matrix is quantized on another device; `weight` is then empty

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, *, tied: bool = False) -> None:
        super().__init__()
        self.mesh, self.tied, self.vocabulary = build.mesh, tied, build.vocabulary
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.own = build.mesh.shard(vocab_size, "vocab_size")
        self.weight = build.parameter(self.own.stop - self.own.start, hidden_size)
        self.dtype, self.keeps_coded = build.dtype, build.methods.keeps_coded
        self.quantize = build.quantize_head if tied else None
        self.slots = None if build.adapters is None else VocabularySlots(build.adapters)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self._all_rows(token_ids)
        return rows if self.slots is None else self.slots.lookup(token_ids, rows)

    def _all_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.mesh.size == 1:
            return self._rows(token_ids)
        local = token_ids - self.own.start
        elsewhere = (local < 0) | (local >= self.own.stop - self.own.start)
        found = self._rows(local.masked_fill(elsewhere, 0))
        return self.mesh.all_reduce(found.masked_fill(elsewhere[:, None], 0))

    def _rows(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.coded is not None:
            return self.coded.take(numbers).expand(self.dtype)
        return F.embedding(numbers, self.weight) if self.matrix is None else self.matrix.rows(numbers)

    def multiply(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """A logit for each token in this rank's share of the vocabulary."""
        if self.coded is not None:
            return kernels.coded_linear(hidden, self.coded, bias)
        if self.matrix is None:
            return kernels.linear(hidden, self.weight, bias)
        return self.matrix.linear(hidden)

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        return {("weight", None): (self.vocab_size, self.hidden_size)}

    def load(self, key: TensorKey, tensor: torch.Tensor | FileMatrix) -> None:
        if isinstance(tensor, torch.Tensor):
            self.weight.data.copy_(tensor[self.own])
            return
        own = tensor.cut(self.own)
        if self.vocabulary is not None and self.vocabulary.keeps(own):
            self.matrix = pack_as_in_file(own, self._bias())
            self._forget()
        elif self.keeps_coded and (coded := on_device(own, self.weight.device)) is not None:
            self.coded = coded
            self._forget()
        else:
            self.weight.data.copy_(own.expand())

    def process(self) -> None:
        if self.quantize is not None and self.coded is None:
            self.coded = on_device(self.quantize(self.weight.data), self.weight.device)
            self._forget()
        elif self.vocabulary is not None and self.matrix is None:
            self.matrix = self._packed(self.weight.data, self.vocabulary.head)
            self._forget()

    def _packed(self, weight: torch.Tensor, form: Format) -> PackedMatrix:
        return pack(weight, form) if self.tied else plain(weight)

    def adopt(self, memory: torch.Tensor) -> None:
        """Use a matrix that was packed before."""
        assert self.vocabulary is not None, "the CPU library has the matrix"
        outputs, inputs = self.weight.shape
        self.matrix = PackedMatrix(Layout(self._kept_as(self.vocabulary.head), outputs, inputs), memory, self._bias())
        self._forget()

    def _kept_as(self, head: Format) -> Format:
        return head if self.tied else PLAIN

    def _bias(self) -> torch.Tensor | None:
        return None

    def _forget(self) -> None:
        """Free the weight's memory, since `matrix` has its numbers."""
        self.weight = nn.Parameter(self.weight.data.new_empty(0), requires_grad=False)


class PositionEmbedding(WeightLayer):
    """A vector per position, the same on every rank. Entry `offset` is that of position 0."""

    def __init__(self, build: Build, count: int, offset: int, hidden_size: int) -> None:
        super().__init__()
        self.offset = offset
        self.weight = build.parameter(count + offset, hidden_size)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.offset, self.weight)


class TokenTypeEmbedding(WeightLayer):
    """A vector per kind of token, the same on every rank. See DecoderSpec.num_token_types."""

    def __init__(self, build: Build, count: int, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = build.parameter(count, hidden_size)

    def forward(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The vectors, and the ids without their kinds."""
        kinds = torch.div(token_ids, self.vocab_size, rounding_mode="floor")
        return F.embedding(kinds, self.weight), token_ids - kinds * self.vocab_size


class Head(Embedding):
    """A logit per token of the vocabulary, from a matrix of its own."""

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, *, bias: bool = False) -> None:
        super().__init__(build, vocab_size, hidden_size)
        self.bias = build.parameter(len(self.weight)) if bias else None
        self.quantize = build.quantize_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.mesh.all_gather(self.multiply(hidden, self.bias))
        return logits if self.slots is None else self.slots.multiply(hidden, logits)

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        bias: dict[TensorKey, tuple[int, ...]] = {("bias", None): (self.vocab_size,)}
        return {**super().tensors(), **(bias if self.bias is not None else {})}

    def load(self, key: TensorKey, tensor: torch.Tensor | FileMatrix) -> None:
        if key[0] == "weight":
            super().load(key, tensor)
        else:
            self.get_parameter(key[0]).data.copy_(expanded(tensor)[self.own])

    def process(self) -> None:
        super().process()
        if self.vocabulary is None and self.coded is None:
            self.weight = nn.Parameter(kernels.pack_weight(self.weight.data), requires_grad=False)

    def _packed(self, weight: torch.Tensor, form: Format) -> PackedMatrix:
        return pack(weight, form, self._bias())

    def _kept_as(self, head: Format) -> Format:
        return head

    def _bias(self) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.data


class TiedHead(nn.Module):
    """A logit per token of the vocabulary, from the embedding's matrix."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that its parameters are not listed and loaded as this module's
        self.slots = None if embedding.slots is None else VocabularySlots(embedding.slots.step)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        (embedding,) = self._embedding
        logits = embedding.mesh.all_gather(embedding.multiply(hidden))
        return logits if self.slots is None else self.slots.multiply(hidden, logits)


class StepOverlay:
    """The overlaid embeddings of the step that runs now. A model has one; a row feature sets it before each step."""

    def __init__(self) -> None:
        self.tokens: torch.Tensor | None = None  # [n] int64: which of the step's tokens; None: no token has any
        self.embeddings: torch.Tensor | None = None  # [n, hidden]
        self.num_steps = 0  # in which some token had one

    def clear(self) -> None:
        self.tokens = self.embeddings = None

    def set(self, tokens: torch.Tensor, embeddings: torch.Tensor) -> None:
        self.tokens, self.embeddings = tokens, embeddings
        self.num_steps += 1

    def lay(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of all tokens [tokens, hidden], with the overlaid ones in their places."""
        if self.tokens is None or self.embeddings is None:
            return hidden
        return hidden.index_copy(0, self.tokens, self.embeddings.to(hidden.dtype))
