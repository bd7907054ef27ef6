"""Guides: per-request rules for the next tokens that only the host can work out, such as grammars. Core process.

A guided request runs one step ahead like any other, but a step samples for it only after the core has read the step
before: the forward pass of step N+1 is launched, N's tokens are read, the guide says what may come next, and that goes
to the sampler of N+1 (messages.SampleInputs). Steps without guided requests are not delayed.

A guide may know several tokens that must follow. The scheduler appends them at once (a jump), without a pass for each.

A kind of guide is registered by name, and a request names it (`EngineRequest.guide`). Requests whose guide takes time
to prepare wait in `PendingGuides`, outside the queue.

The budget of reasoning is a guide of this file, grammars are one of grammar_guide.py. `BudgetGuide` counts tokens
between the markers of reasoning and forces the closing one when the budget is spent. It restricts nothing until then,
so steps do not wait for it. It may have another guide inside, such as a grammar for the answer, which sees all tokens.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvasir.errors import RequestError
from kvasir.log import get_logger
from kvasir.messages import EngineRequest, FinishReason, Int32Array, SampleInputs

if TYPE_CHECKING:
    from kvasir.engine.request import Request
    from kvasir.engine.rows import RowNumbers, Rows

logger = get_logger(__name__)

Answer = int | Int32Array | None  # the token that must come next, a bitmask of allowed ones (32 to a word), or any may
BUDGET_GUIDE = "thinking_budget"


class TokenGuide:
    """Restricts the tokens of one request. It sees every output token once, in order."""

    kind = ""  # under which name its kind is registered
    holds = True  # whether the next token is restricted; only `accept` and `jump` change it
    is_complete = False  # the output is complete: the request ends without another token
    error: str | None = None  # why the request cannot go on
    is_lenient = False  # something that was asked for is not enforced
    may_jump = True  # whether `jump` may return tokens

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in output tokens."""

    def jump(self, least: int, most: int, stops: Collection[int], completes: bool = True) -> list[int]:
        """Return tokens that must come next, and take them in: at least `least` and at most `most` of them, or none. No
        token of `stops` is among them and, unless `completes`, not the token that would complete the output."""
        return []

    def next_token(self) -> Answer:
        """Return the tokens that may come next. It is called only while the guide holds."""
        return None


class GuideKind(ABC):
    """Makes guides of one kind, and asks many of them at once.

    In each step, the guides of rows that have new tokens `accept` them and get `ready`; then the guides of the next
    step's rows, mostly the same, give their `answers`, perhaps in several calls; then those answers are used up.
    """

    def prepare(self, argument: Any) -> Future[Any] | None:
        """Begin the slow part of `make`, such as compiling; None if there is none. An error of the future refuses the
        request."""
        return None

    @abstractmethod
    def make(self, argument: Any) -> TokenGuide:
        """Make the guide of a request."""

    def accept(self, guides: Sequence[Any], tokens: Sequence[list[int]]) -> None:
        """Show each guide its new tokens. A guide that fails gets an error, and the others go on."""
        for guide, new in zip(guides, tokens, strict=True):
            try:
                guide.accept(new)
            except Exception as error:
                guide.error = fault(error)

    def ready(self, guides: Sequence[Any]) -> None:
        """Work out what may come next for guides that hold, if that is done better for all of them at once, and before
        they are asked to jump."""
        return None

    def answers(self, guides: Sequence[Any]) -> tuple[Int32Array, NDArray[np.intp]] | list[Answer]:
        """Return what may come next for each guide. If all are masks: these in any order, and which is each guide's."""
        return [guide.next_token() for guide in guides]

    def used_up(self) -> None:
        """The answers have been used. Their memory may hold others."""
        return None


@dataclass(slots=True)
class GuideStats:
    """Counters since the start, under the names of EngineStats."""

    guided_tokens: int = 0  # output tokens of requests with guides
    guided_passes: int = 0  # times that such a request ran in a step that computed its next token
    jumps: int = 0
    jumped_tokens: int = 0
    mask_seconds: float = 0.0  # of steps that went to guides
    guided_steps: int = 0  # steps whose sampling waited for guides
    lenient_guides: int = 0  # guides that do not enforce everything that was asked for


class Guides:
    """The kinds of guides of one engine."""

    def __init__(self) -> None:
        self.stats = GuideStats()
        self.kinds: dict[str, GuideKind] = {}

    def kind(self, name: str) -> GuideKind:
        if name not in self.kinds:
            raise RequestError(f"no guide is registered under the name {name!r}; known are {sorted(self.kinds)}")
        return self.kinds[name]

    def make(self, name: str, argument: Any) -> TokenGuide:
        """Make the guide that a request asks for."""
        guide = self.kind(name).make(argument)
        guide.kind = name
        self.stats.lenient_guides += guide.is_lenient
        return guide

    def follow(
        self, r: Rows, rows: RowNumbers, tokens: Int32Array, counts: Int32Array, reasons: Int32Array, waits: bool
    ) -> tuple[dict[int, list[int]], dict[int, str], list[int]]:
        """Show the new tokens of rows to their guides, and append the tokens that must follow them. `waits`: the step
        in flight, if there is one, has not sampled yet.

        Returns by line the tokens that are new for the client, if they are others than `tokens`, and why lines fail;
        and rows that must be described to the worker again. Ends are written to `reasons`."""
        start = time.perf_counter()
        lines = np.flatnonzero(r.guided[rows] & (counts > 0))
        if not len(lines):
            return {}, {}, []
        own = rows[lines]
        guided = [_Followed(r, line, row) for line, row in zip(lines.tolist(), own.tolist(), strict=True)]
        new = tokens[lines].tolist()
        if tokens.shape[1] > 1:
            new = [some[:number] for some, number in zip(new, counts[lines].tolist(), strict=True)]
        self.stats.guided_tokens += sum(map(len, new))
        going = (reasons[lines] == FinishReason.NONE).tolist()
        self._accept(guided, new, going)
        shown: dict[int, list[int]] = {}
        failed: dict[int, str] = {}
        changed: list[int] = []
        in_flight = (r.num_computed[own] >= r.num_known[own]).tolist()
        for each, tail, goes_on, computed in zip(guided, new, going, in_flight, strict=True):
            guide, request = each.guide, each.request
            more: list[int] = []
            # If the step in flight waits, a guide that does not jump has nothing to say before its answer.
            if goes_on and guide.holds and guide.error is None and (guide.may_jump or not waits):
                more = self._continue(r, each, computed, waits, changed)
            if guide.error is not None:
                reasons[each.line] = FinishReason.NONE
                failed[each.line] = guide.error
            elif guide.is_complete:
                reasons[each.line] = FinishReason.STOP
            elif more and r.num_known[each.row] >= r.limit[each.row]:
                reasons[each.line] = FinishReason.LENGTH
            if more or request.unsent:
                shown[each.line] = [*request.unsent, *tail, *more]
                self.stats.guided_tokens += len(request.unsent) + len(more)
                request.unsent = []
        r.restricted[own] = [each.guide.holds for each in guided]
        self.stats.mask_seconds += time.perf_counter() - start
        return shown, failed, changed

    def _accept(self, guided: list[_Followed], tokens: list[list[int]], going: list[bool]) -> None:
        """Show the guides their tokens, all of a kind together, and let those get ready that go on."""
        asked: dict[str, list[tuple[TokenGuide, list[int], bool]]] = {}
        for each, new, goes_on in zip(guided, tokens, going, strict=True):
            if each.guide.error is None:
                asked.setdefault(each.guide.kind, []).append((each.guide, new, goes_on))
        for name, some in asked.items():
            kind = self.kinds[name]
            # Also a last token: where other rules forbid all that is allowed, it may be any.
            kind.accept([guide for guide, _, _ in some], [new for _, new, _ in some])
            try:
                kind.ready([guide for guide, _, goes_on in some if goes_on and guide.holds and guide.error is None])
            except Exception:
                logger.exception("Guides failed together and will be asked one by one")

    def _continue(self, r: Rows, each: _Followed, in_flight: bool, waits: bool, changed: list[int]) -> list[int]:
        """Append the tokens that must follow. Each saves a forward pass. If the step in flight computes the last token
        already, its sample is lost, and then a single token is not worth it."""
        sampling = each.request.spec.sampling
        least = 2 if in_flight and waits else 1
        more: list[int] = []
        if each.guide.may_jump:
            most = int(r.limit[each.row]) - int(r.num_known[each.row])
            try:
                more = each.guide.jump(least, most, sampling.stop_token_ids)
            except Exception as error:  # a fault in one guide must not end the other requests
                each.guide.error = fault(error)
        if more:
            r.append_from_host(each.row, more)
            self.stats.jumps += 1
            self.stats.jumped_tokens += len(more)
            if sampling.extras is not None:  # the worker has a history of tokens
                changed.append(each.row)
        elif in_flight and not waits and each.guide.error is None:
            # The guide begins to hold here, and the next token was sampled without it.
            r.compute_last_token_again(each.row)
            changed.append(each.row)
        return more

    def sample_inputs(self, guided: Iterable[tuple[int, TokenGuide]], dropped: list[int]) -> SampleInputs:
        """Return the masks and forced tokens of a step's guided lines. All results before the step must be known.
        `dropped`: lines whose token is discarded."""
        start = time.perf_counter()
        lines: dict[str, list[tuple[int, TokenGuide]]] = {}
        for line, guide in guided:
            if guide.holds and guide.error is None:  # an error ends the request after this step
                lines.setdefault(guide.kind, []).append((line, guide))
        masked: list[int] = []
        masks: list[Int32Array] = []
        forced: list[tuple[int, int]] = []
        for name, asked in lines.items():
            said = self._answers(self.kinds[name], [guide for _, guide in asked])
            if isinstance(said, tuple):
                own = np.empty(len(asked), np.int32)
                own[said[1]] = [line for line, _ in asked]
                masked += own.tolist()
                masks.append(said[0])
                continue
            for (line, _), answer in zip(asked, said, strict=True):
                if isinstance(answer, np.ndarray):
                    masked.append(line)
                    masks.append(answer[None])
                elif answer is not None:
                    forced.append((line, answer))
        forced_lines, forced_tokens = np.array(forced, np.int32).reshape(-1, 2).T
        inputs = SampleInputs(
            mask_lines=np.array(masked, np.int32),
            masks=_joined(masks),
            forced_lines=forced_lines,
            forced_tokens=forced_tokens,
            dropped_lines=np.array(dropped, np.int32),
        )
        for kind in self.kinds.values():
            kind.used_up()
        self.stats.guided_steps += 1
        self.stats.mask_seconds += time.perf_counter() - start
        return inputs

    def _answers(self, kind: GuideKind, guides: list[TokenGuide]) -> tuple[Int32Array, NDArray[np.intp]] | list[Answer]:
        """Ask all guides for the tokens that may come next. A guide that fails gives no answer and ends its own request
        alone."""
        try:
            return kind.answers(guides)
        except Exception:
            logger.exception("Guides failed together and are asked one by one")
        said: list[Answer] = []
        for guide in guides:
            try:
                said += in_order(kind.answers([guide]))
            except Exception as error:
                guide.error = fault(error)
                said.append(None)
        return said


class _Followed:
    """A row that has new tokens, and its guide."""

    __slots__ = ("guide", "line", "request", "row")

    def __init__(self, r: Rows, line: int, row: int) -> None:
        request = r.requests[row]
        assert request is not None and request.guide is not None, f"row {row} has no guide"
        self.line, self.row = line, row
        self.request: Request = request
        self.guide: TokenGuide = request.guide


def in_order(said: tuple[Int32Array, NDArray[np.intp]] | list[Answer]) -> list[Answer]:
    """Answers in the order of the guides that gave them."""
    return said if isinstance(said, list) else [said[0][place] for place in said[1].tolist()]


def fault(error: Exception) -> str:
    logger.error("A guide failed", exc_info=error)
    return f"the rule for its next tokens failed: {type(error).__name__}: {str(error)[:200]}"


def _joined(masks: list[Int32Array]) -> Int32Array:
    if len(masks) == 1:
        return masks[0]
    return np.concatenate(masks) if masks else np.zeros((0, 0), np.int32)


# ---------------------------------------------------------------- requests whose guide is being prepared


@dataclass(slots=True)
class _Pending:
    request: EngineRequest
    ready: Future[Any]


class PendingGuides:
    """Requests that wait for their guide. They join the queue when it is prepared."""

    def __init__(self, guides: Guides) -> None:
        self._guides = guides
        self.requests: dict[int, _Pending] = {}  # by key

    def hold(self, request: EngineRequest) -> bool:
        """Keep a request until its guide is prepared. Returns False if it need not wait."""
        assert request.guide is not None, "only requests with guides wait for them"
        name, argument = request.guide
        ready = self._guides.kind(name).prepare(argument)
        if ready is None:
            return False
        if ready.done():
            ready.result()
            return False
        self.requests[request.key] = _Pending(request, ready)
        return True

    def abort(self, key: int) -> bool:
        """Remove a request, or one of its forks. Returns False if it does not wait here."""
        if self.requests.pop(key, None) is not None:
            return True
        for pending in self.requests.values():
            forks = tuple(fork for fork in pending.request.forks if fork.key != key)
            if len(forks) < len(pending.request.forks):
                pending.request.forks = forks
                return True
        return False

    def take_ready(self, seconds: float) -> list[tuple[EngineRequest, str | None]]:
        """Return requests whose guide is prepared, and those whose guide failed, with the reason. Waits up to `seconds`
        for the first."""
        if seconds:
            wait([pending.ready for pending in self.requests.values()], seconds, FIRST_COMPLETED)
        done = [key for key, pending in self.requests.items() if pending.ready.done()]
        found = [self.requests.pop(key) for key in done]
        return [(each.request, _why(each.ready.exception())) for each in found]


def _why(error: BaseException | None) -> str | None:
    return None if error is None else f"its guide could not be prepared: {error}"


def budget_argument(
    budget: int, opening: int, closing: int, begun: bool, inner: tuple[str, Any] | None, *, jumps: bool = True
) -> dict[str, Any]:
    """Return the argument of a budget guide, as a request sends it. `opening` and `closing`: the tokens around
    reasoning. `begun`: the prompt has opened it. `inner`: another guide, as EngineRequest.guide. `jumps`: the closing
    token may be appended without a pass; if not, it is sampled, and has log-probabilities."""
    return {"budget": budget, "opening": opening, "closing": closing, "begun": begun, "inner": inner, "jumps": jumps}


def without_jumps(guide: tuple[str, Any]) -> tuple[str, Any]:
    """Return the same guide of EngineRequest.guide, with every token sampled, so that each has log-probabilities."""
    name, argument = guide
    inner = argument.get("inner")
    nested = {} if inner is None else {"inner": without_jumps(inner)}
    return name, {**argument, "jumps": False, **nested}


class BudgetGuides(GuideKind):
    """The kind of guides that limit reasoning. `guides` has the kinds that may be inside."""

    def __init__(self, guides: Guides) -> None:
        self._guides = guides

    def prepare(self, argument: Mapping[str, Any]) -> Future[Any] | None:
        inner = argument["inner"]
        return None if inner is None else self._guides.kind(inner[0]).prepare(inner[1])

    def make(self, argument: Mapping[str, Any]) -> BudgetGuide:
        inner = argument["inner"]
        made = None if inner is None else self._guides.kind(inner[0]).make(inner[1])
        name = "" if inner is None else inner[0]
        numbers = (argument["budget"], argument["opening"], argument["closing"], argument["begun"])
        return BudgetGuide(*numbers, made, name, argument["jumps"])

    def answers(self, guides: Sequence[BudgetGuide]) -> list[Answer]:
        found: list[Answer] = [guide.closing if guide.is_spent else None for guide in guides]
        asked: dict[str, list[int]] = {}
        for line, guide in enumerate(guides):
            if not guide.is_spent and guide.inner is not None and guide.inner.holds:
                asked.setdefault(guide.inner_kind, []).append(line)
        for name, lines in asked.items():
            said = self._guides.kind(name).answers([guides[line].inner for line in lines])
            for line, answer in zip(lines, in_order(said), strict=True):
                found[line] = answer
        return found


class BudgetGuide(TokenGuide):
    """Counts the reasoning tokens of one request, and ends the reasoning when the budget is spent."""

    def __init__(
        self,
        budget: int,
        opening: int,
        closing: int,
        begun: bool,
        inner: TokenGuide | None = None,
        inner_kind: str = "",
        jumps: bool = True,
    ) -> None:
        self._jumps = jumps
        self.inner = inner
        self.inner_kind = inner_kind
        self.closing = closing
        self._opening = opening
        self._left: int | None = budget if begun else None  # tokens of reasoning that are left; None: it is not open
        self._budget = budget
        self._may_open = not begun
        self._settle()

    @property
    def is_spent(self) -> bool:
        """Whether the next token must end the reasoning."""
        return self._left == 0

    def accept(self, token_ids: Sequence[int]) -> None:
        self._count(token_ids)
        if self.inner is not None:
            self.inner.accept(token_ids)
        self._settle()

    def jump(self, least: int, most: int, stops: Collection[int], completes: bool = True) -> list[int]:
        if self.is_spent:
            if not self._jumps or not (least <= 1 <= most) or self.closing in stops:
                return []
            self.accept([self.closing])
            return [self.closing]
        found = [] if self.inner is None else self.inner.jump(least, most, stops, completes)
        self._count(found)  # the inner guide has taken them in
        self._settle()
        return found

    def _count(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._left is not None:
                self._left = None if token == self.closing else max(0, self._left - 1)
            elif self._may_open and token == self._opening:
                self._left, self._may_open = self._budget, False

    def _settle(self) -> None:
        inner = self.inner
        self.holds = self.is_spent or (inner is not None and inner.holds)
        if inner is not None:
            self.error = inner.error
            self.is_complete = inner.is_complete
