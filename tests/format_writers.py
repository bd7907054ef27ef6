"""Writers of quantized matrices for tests: numpy, and the package compressed-tensors itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def pack_bits(numbers: Any, bits: int, axis: int) -> torch.Tensor:
    """Numbers as one stream of bits, lowest first, in words of 32."""
    along = np.moveaxis(numbers, axis, -1).astype(np.uint8)
    stream = np.unpackbits(along[..., None], axis=-1, bitorder="little")[..., :bits].reshape(*along.shape[:-1], -1)
    words = np.packbits(stream, axis=-1, bitorder="little").view("<i4")
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)))


def compress(form: str, weights: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    """What its package writes for a matrix, and the values that it reads from that."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    written = compressor.compress(dict(tensors), scheme)
    return written, compressor.decompress(dict(written), scheme)["weight"]
