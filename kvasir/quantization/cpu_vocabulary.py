"""Embedding and head in the CPU library's layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.kernels.cpu.memory import Arena
from kvasir.kernels.cpu.packed import BF16, GGUF, INT6, INT8, Format, Layout, PackedMatrix
from kvasir.quantization.gguf import PackedRows


@dataclass(frozen=True)
class Vocabulary:
    """How the library keeps the matrices at both ends."""

    head: Format  # also of an embedding that is the head
    as_in_file: bool = False  # a GGUF file's packed rows keep their numbers instead, also in the embedding

    def keeps(self, rows: PackedRows) -> bool:
        return self.as_in_file and rows.kind in GGUF


# By `quantization`. The head is the last to be cut short.
VOCABULARIES = {
    None: Vocabulary(BF16),
    "int8": Vocabulary(INT8),
    "int4": Vocabulary(INT6),
    "gguf": Vocabulary(BF16, as_in_file=True),
}


def pack_as_in_file(rows: PackedRows, bias: torch.Tensor | None) -> PackedMatrix:
    layout = Layout(GGUF[rows.kind][1], *rows.shape)
    matrix = PackedMatrix(layout, Arena().take(layout.num_bytes), bias)
    matrix.fill_gguf(rows.data, rows.kind)
    return matrix
