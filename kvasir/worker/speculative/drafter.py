"""Drafters: what proposes tokens that the next step verifies. Worker process; knows rows and tensors, no requests.

How to add a drafter
--------------------
Write a subclass of Drafter in its own file and register it under the name that `speculative_config` gives as `method`:

    @DRAFTERS.register("mine")
    class MyDrafter(Drafter): ...

A plugin does the same in a module that it names as `method`: "package.module:MyDrafter". Whatever a drafter proposes,
the text is the model's own: a wrong draft costs time and nothing else. So a drafter may guess, and may forget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch

from kvasir import kernels
from kvasir.attention.base import AttentionBatch
from kvasir.config.speculative import SpeculativeConfig
from kvasir.errors import ConfigError
from kvasir.messages import Int32Array, NewRow, StepPlan


@dataclass(slots=True)
class DraftRows:
    """Drafts of the rows on the device: what the next step verifies. The last row is the padding row."""

    tokens: torch.Tensor  # [rows, drafts] int32: valid tokens, always
    counts: torch.Tensor  # [rows] int32: how many of them were proposed

    @property
    def size(self) -> int:
        """Most drafts of a row."""
        return self.tokens.shape[1]


def make_draft_rows(max_rows: int, num_drafts: int, device: torch.device) -> DraftRows:
    return DraftRows(
        torch.zeros(max_rows, num_drafts, dtype=torch.int32, device=device),
        torch.zeros(max_rows, dtype=torch.int32, device=device),
    )


@dataclass(slots=True)
class TokensTaken:
    """Tokens that a step's rows took: the accepted drafts and one token more."""

    rows: torch.Tensor  # [n] int64
    tokens: torch.Tensor  # [n, 1 + drafts] int32; [n, 1] in a step that verified none
    counts: torch.Tensor  # [n] int32: tokens of each row that count
    lengths: torch.Tensor  # [n] int32: tokens of each row's text, those of this step included
    bounds: Int32Array | None = None  # [n] upper bounds of the lengths; None in a graph
    wanted: int = 0  # most drafts that any row wants; 0: not known


@dataclass(slots=True, frozen=True)
class DrafterSettings:
    """What a drafter is made for."""

    config: SpeculativeConfig
    max_rows: int  # the padding row included
    max_model_len: int
    device: torch.device
    block_size: int = 16
    kv_dtype: torch.dtype = torch.float32
    windows: tuple[int | None, ...] = (None,)  # of the model's groups of layers
    load: Callable[[], Any] | None = None  # loads the draft model or head; None: the settings name none
    record: Callable[[Sequence[int]], None] | None = None  # asks the model for hidden states, see Model.record


class CacheLayout(Protocol):
    """Where the rows' tokens are in the KV cache, and how far the model is."""

    tables: torch.Tensor  # [rows, blocks] int32
    block_size: int
    num_computed: torch.Tensor  # [rows] int32: tokens that the model has computed
    next_token: torch.Tensor  # [rows] int32: the token after them


class ModelInputs(Protocol):
    """Inputs of the model's forward pass of a step."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    batch: AttentionBatch
    rows: torch.Tensor | None  # [tokens] int64: the row of each token; set in graphs, and for drafters that read states


class Drafter(ABC):
    """Proposes drafts for all rows of a worker."""

    capturable = False  # its methods may be part of CUDA graphs, where they get no plan and no bounds
    reads_states = False  # `follow` gets hidden states of the model, those that `DrafterSettings.record` asked for
    block_bytes = 0  # memory that it needs for each block of the KV cache

    def __init__(self, settings: DrafterSettings) -> None:
        self.config, self.device = settings.config, settings.device
        self.max_rows, self.max_model_len = settings.max_rows, settings.max_model_len
        self.num_drafts = settings.config.num_speculative_tokens  # most drafts of a row

    def allocate(self, num_blocks: int, layout: CacheLayout) -> None:
        """Take memory for what the drafter keeps in blocks. It is called before the first step."""
        return None

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy what the drafter keeps in blocks; `pairs` are (from, to)."""
        return None

    def weight_bytes(self) -> int:
        """Memory of its weights on the device."""
        return 0

    def compile_key(self) -> str:
        """Return what its kernels depend on besides the settings, as text."""
        return ""

    def follow(self, plan: StepPlan | None, inputs: ModelInputs, states: torch.Tensor | None) -> None:
        """Take in the inputs of a step that the model has just computed, and the hidden states [tokens, layers *
        hidden] that it recorded."""
        return None

    def open(self, new_rows: Sequence[NewRow], rows: torch.Tensor) -> None:
        """Take in new requests in these rows, [n] int64 on the device. `NewRow.token_ids` are their texts."""
        return None

    @abstractmethod
    def learn(self, taken: TokensTaken) -> None:
        """Take in the tokens of a step. Called for every step that samples."""

    @abstractmethod
    def propose(self, taken: TokensTaken, drafts: DraftRows) -> None:
        """Write `drafts.tokens` and `drafts.counts` of the rows. Called after `learn` if drafts are wanted."""


class PassDrafter(Drafter):
    """Drafts in passes, one token for all rows in each. Passes are graphs of their own, so that a step has as many as
    its drafts need, and none where drafts do not pay."""

    reads_states = True
    num_graphs = 1  # of each size; the last one serves the passes of all higher numbers

    def learn(self, taken: TokensTaken) -> None:
        """Passes read what is known of rows on the device."""
        return None

    @abstractmethod
    def draft(self, rows: torch.Tensor, drafts: DraftRows, bounds: Int32Array | None, number: int) -> None:
        """Draft the token of this number for each of these rows, and count it. `bounds`: of the lengths that the texts
        then have; None in a graph, which may also stand for the passes of all higher numbers."""

    # Replays this many passes for these rows, if they have graphs; whether it did. None: there are none.
    replay: Callable[[torch.Tensor, int], bool] | None = None

    def propose(self, taken: TokensTaken, drafts: DraftRows) -> None:
        assert taken.bounds is not None and taken.wanted, "passes are launched for drafts that are wanted"
        if self.replay is not None and self.replay(taken.rows, taken.wanted):
            return
        for number in range(taken.wanted):
            self.draft(taken.rows, drafts, taken.bounds + np.int32(number), number)


class DraftPool:
    """The memory of a drafter for keys and values, in the blocks of the model's first group of layers.

    Block tables, cached prefixes and preemption are the model's.
    """

    def __init__(self, model: Any, settings: DrafterSettings) -> None:
        """`model`: what drafts, with the methods of a model that concern its cache."""
        self.model, self.dtype = model, settings.kv_dtype
        self.spec = model.kv_spec(settings.block_size, settings.kv_dtype)
        if len(self.spec.windows) > 1 or settings.windows[0] is not None:
            whose = "the draft model's" if len(self.spec.windows) > 1 else "the model's"
            raise ConfigError(
                f"speculative_config: method={settings.config.method!r} does not support sliding windows, which "
                f"{whose} layers have; use method='suffix', or a model without them."
            )
        self.page_shape = model.page_shape(settings.block_size, settings.kv_dtype)
        self.block_bytes: int = self.spec.block_bytes

    def allocate(self, num_blocks: int, device: torch.device) -> None:
        shape = (self.spec.num_layers, num_blocks, self.spec.page_bytes)
        if device.type == "cpu":
            self.pages = torch.from_numpy(np.zeros(shape, np.uint8))  # takes memory when it is first used
        else:
            self.pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.model.bind_kv([layer.view(self.dtype).view(num_blocks, *self.page_shape) for layer in self.pages])

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        kernels.copy_blocks(self.pages, self.pages, pairs[:, 0], pairs[:, 1])


class DrafterRegistry:
    def __init__(self) -> None:
        self._known: dict[str, type[Drafter]] = {}

    def register(self, *names: str) -> Callable[[type[Drafter]], type[Drafter]]:
        def add(kind: type[Drafter]) -> type[Drafter]:
            self._known.update(dict.fromkeys(names, kind))
            return kind

        return add

    def find(self, method: str) -> type[Drafter]:
        """Find the drafter of this name, or of this 'module:Class'."""
        if method in self._known:
            return self._known[method]
        module, _, name = method.partition(":")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"speculative_config: no drafter can be loaded as method={method!r} ({error})."
            ) from error
        if not (isinstance(found, type) and issubclass(found, Drafter)):
            raise ConfigError(f"speculative_config: method={method!r} is not a class derived from Drafter.")
        return found


DRAFTERS = DrafterRegistry()
