"""The tensors of a GGUF file, by name, as the loader reads a checkpoint. Worker process."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import torch

from kvasir.gguf_file import GGUFFile
from kvasir.models.checkpoint import Entry
from kvasir.quantization.gguf import PackedRows


class GGUFCheckpoint:
    """Nothing is read before it is asked for: the file is mapped."""

    described_by = "the file's own description"

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.directory = file, file.path
        self.entries = {name: Entry(file.path, name, tensor.shape) for name, tensor in file.tensors.items()}
        # Copy on write, though nobody writes: torch takes no array that cannot be written to.
        self.data = np.memmap(file.path, np.uint8, mode="c")

    def packed(self, name: str) -> PackedRows:
        tensor = self.file.tensors[name]
        end = tensor.offset + tensor.num_rows * tensor.row_bytes
        rows = self.data[tensor.offset : end].reshape(tensor.num_rows, tensor.row_bytes)
        return PackedRows(torch.from_numpy(rows), tensor.kind, tensor.shape)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, PackedRows]]:
        for name in names:
            yield name, self.packed(name)
