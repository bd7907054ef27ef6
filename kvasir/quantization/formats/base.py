"""What a format of quantized checkpoints says: which matrices are quantized, how, and in which tensors. Worker process.

One file per format beside this one. A format reads the checkpoint's quantization config, gives a Scheme for every
module and refuses by name what it does not know. A Scheme turns the tensors of one matrix into Coded, on their device.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from kvasir.errors import ModelError
from kvasir.quantization.coded import Coded, RandomCoding

Shapes = Mapping[str, tuple[int, ...]]
Tensors = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]


class Scheme(ABC):
    """How one matrix is stored. A subclass may have plain attributes in place of these properties."""

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """Names of its tensors within the module."""

    @property
    def may_have(self) -> tuple[str, ...]:
        """Tensors that are read if they are there."""
        return ()

    @property
    def unused(self) -> tuple[str, ...]:
        """Tensors that are not needed, such as scales of activations."""
        return ()

    @abstractmethod
    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """[outputs, inputs], from the shapes of its tensors; `read` is for those that say it in their content."""

    @abstractmethod
    def decode(self, module: str, tensors: Tensors) -> Coded: ...

    @abstractmethod
    def coding(self, inputs: int) -> RandomCoding:
        """Return the coding of a matrix with this many inputs, for random weights."""


class WeightFormat(ABC):
    """A format of checkpoints. `marks` are tensors that only quantized matrices have."""

    name: str
    marks: tuple[str, ...]
    joint = "."  # between a module's name and its tensors'
    matrix = ".weight"  # ends the name that the matrix would have in a plain checkpoint

    @abstractmethod
    def scheme(self, module: str) -> Scheme | None:
        """Return how this module's matrix is stored; None if it is not quantized."""


# ---------------------------------------------------------------- reading configs


def refuse(what: str, instead: str = "Use another checkpoint of the model, or its unquantized weights.") -> ModelError:
    return ModelError(f"The checkpoint's quantization is not supported: {what}. {instead}")


def damaged(module: str, what: str) -> ModelError:
    return ModelError(f"The quantized weights of {module} are damaged: {what}. Download the checkpoint again.")


def whole(config: Config, *names: str, default: int | None = None) -> int:
    """Return an entry of the config under the first of its names that it has."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is not None:
            raise refuse(f"{name}={value!r} is not a whole number")
    if default is None:
        raise refuse(f"its config has no {names[0]}")
    return default


def group_of(module: str, size: int, inputs: int) -> int:
    """Return a group size of the config as a number of inputs; it must divide the matrix."""
    if size in (-1, 0, inputs):
        return inputs
    if size < 0 or inputs % size:
        raise refuse(
            f"{module} has {inputs} inputs, which groups of {size} do not divide",
            "Quantize the model again with a group size that divides the inputs, or by channel.",
        )
    return size


def is_listed(module: str, patterns: Collection[str]) -> bool:
    """Whether a list of modules that are not converted names this one: whole, by a part of its path, or with stars."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], module):
                return True
        elif "*" in pattern:
            if fnmatchcase(module, pattern):
                return True
        elif f".{pattern}." in f".{module}.":
            return True
    return False


def check_shape(module: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != tuple(wanted):
        raise damaged(module, f"{name} is {list(found)}, but should be {list(wanted)}")


def check_matrix(module: str, name: str, shapes: Shapes) -> tuple[int, int]:
    shape = shapes[name]
    if len(shape) != 2 or not all(shape):
        raise damaged(module, f"{name} is {list(shape)}, but should be a matrix")
    return shape[0], shape[1]


def check_floating(module: str, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise damaged(module, f"{name} is {str(tensor.dtype).removeprefix('torch.')}, but should be of floats")


def check_type(module: str, name: str, tensor: torch.Tensor, *wanted: torch.dtype) -> None:
    if tensor.dtype not in wanted:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
        raise damaged(module, f"{name} is {str(tensor.dtype).removeprefix('torch.')}, but should be {names}")


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes with two codes each, low half first, into bytes with one."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
