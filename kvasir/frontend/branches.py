"""Several completions of one prompt, given out as one request. API process."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.frontend.state import Ending, RequestState
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.sampling_params import RequestOutputKind


class Branches:
    """The branches of a request, in the order of their indices; at the end the best `num_returned` are given out."""

    def __init__(self, states: Sequence[RequestState], num_returned: int) -> None:
        self.states = list(states)
        self.num_returned = num_returned
        self._endings: dict[int, Ending] = {}  # by key
        self._told: set[int] = set()  # keys whose end was given out

    @property
    def finished(self) -> bool:
        return len(self._endings) == len(self.states)

    def running(self) -> list[int]:
        return [state.key for state in self.states if state.key not in self._endings]

    def end(self, state: RequestState, ending: Ending) -> None:
        self._endings[state.key] = ending
        times = self.states[0].metrics  # what is given out with all of them
        times.max_num_generation_tokens = max(times.max_num_generation_tokens, len(state.token_ids))

    def output(self) -> RequestOutput | None:
        """What there is to give out now. With deltas, the branches in which something is new; else all of them."""
        first = self.states[0]
        if first.kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        shown = self.states
        if len(self.states) > self.num_returned:
            shown = self._best()
            first.metrics.num_unreturned_tokens = _num_tokens(self.states) - _num_tokens(shown)
        completions = [self._completion(index, state) for index, state in enumerate(shown) if self._has_news(state)]
        return first.output(completions, self.finished) if completions else None

    def _best(self) -> list[RequestState]:
        ranked = sorted(self.states, key=lambda state: state.cumulative_logprob or 0.0, reverse=True)
        return ranked[: self.num_returned]

    def _has_news(self, state: RequestState) -> bool:
        if state.kind is not RequestOutputKind.DELTA:
            return True
        ended = state.key in self._endings
        return state.key not in self._told and (ended or (state.num_emitted < len(state.token_ids) and state.is_due))

    def _completion(self, index: int, state: RequestState) -> CompletionOutput:
        ending = self._endings.get(state.key)
        if ending is not None:
            self._told.add(state.key)
        return state.completion(index, ending)


def _num_tokens(states: Sequence[RequestState]) -> int:
    return sum(len(state.token_ids) for state in states)
