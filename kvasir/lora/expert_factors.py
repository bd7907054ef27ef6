"""The low-rank factors of experts, matrix by matrix, made into stacks as layers/mlp.py reads them. Worker process."""

from __future__ import annotations

import torch

from kvasir.layers.adapters import ExpertsChange
from kvasir.layers.mlp import Experts
from kvasir.quantization.base import ExpertsShape, TensorKey, part_of


class ExpertPieces:
    """Collects this rank's share of factors of single matrices of experts."""

    def __init__(self) -> None:
        # For each layer and stack (gate_up, down): of each of its experts lora_A, the first row that lora_B changes,
        # and lora_B.
        self._found: dict[Experts, dict[str, dict[int, list[tuple[torch.Tensor, int, torch.Tensor]]]]] = {}

    def add(self, experts: Experts, key: TensorKey, down: torch.Tensor, up: torch.Tensor) -> None:
        part = part_of(experts.shape, key)
        if part.expert is None:
            return
        rows, columns = part.own
        stack = self._found.setdefault(experts, {}).setdefault(part.stack, {})
        stack.setdefault(part.expert, []).append((down[:, columns], part.first, up[rows]))

    def changes(self, dtype: torch.dtype) -> dict[Experts, ExpertsChange]:
        return {
            experts: ExpertsChange(
                **{name: self._stacked(experts.shape, name, found, dtype) for name, found in stacks.items()}
            )
            for experts, stacks in self._found.items()
        }

    @staticmethod
    def _stacked(
        shape: ExpertsShape,
        name: str,
        found: dict[int, list[tuple[torch.Tensor, int, torch.Tensor]]],
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stack the factors of all experts, padded to one rank. Gate and up have ranks of their own, one after the
        other."""
        inputs, outputs = shape.hidden_size, 2 * shape.num_own
        if name == "down":
            inputs, outputs = shape.num_own, shape.hidden_size
        rank = max(sum(len(down) for down, _, _ in pieces) for pieces in found.values())
        downs = torch.zeros(shape.num_own_experts, rank, inputs, dtype=dtype)
        ups = torch.zeros(shape.num_own_experts, outputs, rank, dtype=dtype)
        for expert, pieces in found.items():
            place = 0
            for down, first, up in pieces:
                downs[expert, place : place + len(down)] = down.to(dtype)
                ups[expert, first : first + len(up), place : place + len(down)] = up.to(dtype)
                place += len(down)
        return downs, ups
