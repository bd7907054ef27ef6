"""Which errors mean that memory ran out. The texts are those of torch 2.11, Triton 3.6 and cuBLAS."""

from __future__ import annotations

import pytest
import torch

from kvasir.worker.memory import is_out_of_memory

FULL = {
    "torch's allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB."),
    "a graph's own memory": torch.AcceleratorError(
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the CUDA documentation."
    ),
    "a kernel's code": RuntimeError("Triton Error [CUDA]: out of memory"),
    "a kernel's code, on another maker's": RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
    "the math library": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
}  # fmt: skip
OTHER = {
    "an address": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "a broken capture": torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
    "a tile too large": RuntimeError("out of resource: shared memory, Required: 327680, Hardware limit: 232448."),
    "the math library": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    "somebody's words": ValueError("CUDA ran out of memory"),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_memory_that_ran_out(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER.values(), ids=OTHER)
def test_other_errors(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_the_hosts_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_out_of_memory(raised.value)
