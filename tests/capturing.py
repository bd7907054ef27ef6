"""Finds what a CUDA graph cannot capture in a step, without a GPU: waits for the device, copies from or to the host.

Both are seen as torch is called, so that tensors may be on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Their results have sizes, or are numbers, that only the device knows.
WAITING = {
    f"aten::{name}"
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero")
}
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# Their tensors, or results, are in the host's memory.
COPYING = {"tensor", "as_tensor", "from_numpy", "item", "tolist", "numpy", "cpu"}


class _Waits(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        has_mask = name in INDEXING and any(each is not None and each.dtype == torch.bool for each in args[1])
        assert name not in WAITING and not has_mask, f"{name} waits for the device, which a CUDA graph cannot capture"
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in COPYING, f"{name} copies the host's memory or to it, which a CUDA graph cannot capture"
        if name == "__setitem__" and not isinstance(args[2], torch.Tensor):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            by_tensor = any(isinstance(place, torch.Tensor) for place in places)
            assert not by_tensor, (
                "a number at a tensor's places is copied, which a CUDA graph cannot capture; index_fill_ can"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def capturing() -> Iterator[None]:
    """Raise an AssertionError for what a graph cannot capture."""
    with _Waits(), _Copies():
        yield
