"""How a whole model keeps its weights: which method each kind of layer gets. Worker process."""

from __future__ import annotations

from typing import Protocol

from kvasir.quantization.base import LinearMethod, UnquantizedLinear
from kvasir.quantization.experts import ExpertsMethod, UnquantizedExperts


class Methods(Protocol):
    """A layer says where in the model it is ("layers.3.attention.qkv"): a checkpoint may keep some layers otherwise."""

    def linear(self, prefix: str) -> LinearMethod: ...

    def experts(self, prefix: str) -> ExpertsMethod: ...


class Unquantized:
    """Every weight in the model's own type."""

    def linear(self, prefix: str) -> LinearMethod:
        return UnquantizedLinear()

    def experts(self, prefix: str) -> ExpertsMethod:
        return UnquantizedExperts()
