"""Guides: per-request rules for the next token that only the host can work out, such as grammars. Core process.

A guided request runs one step ahead like any other, but a step samples for it only after the core has read the step
before: the forward pass of step N+1 is launched, N's tokens are read, the guide says what may come next, and that goes
to the sampler of N+1 (messages.SampleInputs). Steps without guided requests are not delayed.

A feature registers a factory by name; a request names it (`EngineRequest.guide`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvasir.errors import RequestError
from kvasir.messages import Int32Array, SampleInputs

if TYPE_CHECKING:
    from kvasir.engine.request import Request


class TokenGuide(Protocol):
    """The rule of one request. It is asked before every token that the request samples."""

    def accept(self, token_ids: Int32Array) -> None:
        """Take in output tokens that are new since the last call."""

    def next_token(self) -> int | Int32Array | None:
        """The token that must come next, a bitmask of allowed tokens (32 to a word), or None if any may."""


GuideFactory = Callable[[Any], TokenGuide]
_factories: dict[str, GuideFactory] = {}


def register_guide(name: str, factory: GuideFactory) -> None:
    """Let requests name this kind of guide. The factory gets the request's argument."""
    _factories[name] = factory


def make_guide(name: str, argument: Any) -> TokenGuide:
    """The guide that a request asks for."""
    if name not in _factories:
        raise RequestError(f"no guide is registered under the name {name!r}; known are {sorted(_factories)}")
    return _factories[name](argument)


def sample_inputs(guided: Iterable[tuple[int, Request | None, Int32Array]]) -> SampleInputs:
    """What the guides of a step's lines say, now that all results before it are known. Each line comes with its
    request, None if that has ended meanwhile, and the request's output tokens."""
    masked: list[int] = []
    masks: list[Int32Array] = []
    forced: list[tuple[int, int]] = []
    dropped: list[int] = []
    for line, request, token_ids in guided:
        if request is None or request.guide is None:
            dropped.append(line)
            continue
        request.guide.accept(token_ids[request.num_guided :])
        request.num_guided = len(token_ids)
        said = request.guide.next_token()
        if isinstance(said, np.ndarray):
            masked.append(line)
            masks.append(said)
        elif said is not None:
            forced.append((line, said))
    lines, tokens = np.array(forced, np.int32).reshape(-1, 2).T
    return SampleInputs(
        mask_lines=np.array(masked, np.int32),
        masks=np.stack(masks) if masks else np.zeros((0, 0), np.int32),
        forced_lines=lines,
        forced_tokens=tokens,
        dropped_lines=np.array(dropped, np.int32),
    )
