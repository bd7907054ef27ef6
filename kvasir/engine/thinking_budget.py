"""Limits how long a request reasons: after so many tokens the marker that ends reasoning is forced. Core process.

The guide counts tokens between the markers and restricts nothing until the budget is spent, so steps do not wait for
it. It may have another guide inside, such as a grammar for the answer, which sees all tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kvasir.engine.guides import Answer, Guides, TokenGuide

BUDGET_GUIDE = "thinking_budget"


def budget_argument(
    budget: int, opening: int, closing: int, begun: bool, inner: tuple[str, Any] | None
) -> dict[str, Any]:
    """What a request sends. `opening` and `closing`: the tokens around reasoning. `begun`: the prompt has opened it.
    `inner`: another guide, as EngineRequest.guide."""
    return {"budget": budget, "opening": opening, "closing": closing, "begun": begun, "inner": inner}


class BudgetGuides:
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
        return BudgetGuide(argument["budget"], argument["opening"], argument["closing"], argument["begun"], made, name)

    def answers(self, guides: Sequence[BudgetGuide]) -> list[Answer]:
        found: list[Answer] = [guide.closing if guide.is_spent else None for guide in guides]
        asked: dict[str, list[int]] = {}
        for line, guide in enumerate(guides):
            if not guide.is_spent and guide.inner is not None and guide.inner.holds:
                asked.setdefault(guide.inner_kind, []).append(line)
        for name, lines in asked.items():
            said = self._guides.kind(name).answers([guides[line].inner for line in lines])
            for line, answer in zip(lines, said, strict=True):
                found[line] = answer
        return found


class BudgetGuide(TokenGuide):
    """Counts the reasoning of one request."""

    def __init__(
        self,
        budget: int,
        opening: int,
        closing: int,
        begun: bool,
        inner: TokenGuide | None = None,
        inner_kind: str = "",
    ) -> None:
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
        """The next token must end the reasoning."""
        return self._left == 0

    def accept(self, token_ids: Sequence[int]) -> None:
        self._count(token_ids)
        if self.inner is not None:
            self.inner.accept(token_ids)
        self._settle()

    def jump(self, least: int, most: int, stops: Collection[int], completes: bool = True) -> list[int]:
        if self.is_spent:
            if not (least <= 1 <= most) or self.closing in stops:
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
