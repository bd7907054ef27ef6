"""A beam search as its caller sees it: the best text while it runs, all texts when it is done. API process."""

from __future__ import annotations

from kvasir.frontend.detokenizer import whole
from kvasir.frontend.state import Ending, RequestState
from kvasir.frontend.tokenizer import Tokenizer
from kvasir.messages import BeamOutput, Hypothesis
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.sampling_params import RequestOutputKind


class BeamState:
    """Cumulative outputs hold the best text so far, which may change; deltas hold what cannot change any more."""

    def __init__(self, state: RequestState, num_returned: int, width: int) -> None:
        self.state = state
        self.num_returned = num_returned
        self.width = width
        self._num_steps = 0  # each generates a token for every beam

    def take(self, beam: BeamOutput, tokenizer: Tokenizer | None, now: float) -> RequestOutput | None:
        """What there is to give out."""
        state = self.state
        if state.metrics.first_token_time is None:
            state.metrics.first_token_time = now
        state.metrics.last_token_time = now
        self._num_steps = max(self._num_steps, *(len(text.token_ids) for text in beam.hypotheses))
        if beam.finished:
            return self._last(beam, tokenizer)
        best = beam.hypotheses[0]
        if state.kind is RequestOutputKind.DELTA:
            state.take(best.token_ids[len(state.token_ids) : beam.num_agreed].tolist(), beam.num_agreed)
            new = len(state.token_ids) > state.num_emitted
            return state.output([state.completion(0, None)], False) if new and state.is_due else None
        if len(best.token_ids) - state.num_emitted < state.stream_interval and state.num_emitted:
            return None
        state.num_emitted = len(best.token_ids)
        return state.output([self._whole(0, best, tokenizer, None)], False)

    def _last(self, beam: BeamOutput, tokenizer: Tokenizer | None) -> RequestOutput:
        state, best = self.state, beam.hypotheses[0]
        shown = [
            self._whole(index, text, tokenizer, _ending(state, text))
            for index, text in enumerate(beam.hypotheses[: self.num_returned])
        ]
        if state.kind is RequestOutputKind.DELTA:
            rest = best.token_ids[len(state.token_ids) :].tolist()
            state.take(rest, len(rest) - self._num_hidden(best))
            state.flush()
            shown[0] = state.completion(0, _ending(state, best))
            shown[0].cumulative_logprob = best.cumulative_logprob
        state.token_ids = best.token_ids.tolist()
        self._note_unreturned([len(text.token_ids) for text in beam.hypotheses[: self.num_returned]])
        return state.output(shown, True)

    def end(self, ending: Ending) -> RequestOutput:
        """The last output of a search that was broken off: what cannot change any more of its best text."""
        self._note_unreturned([len(self.state.token_ids)])
        return self.state.output([self.state.completion(0, ending)], True)

    def _note_unreturned(self, returned: list[int]) -> None:
        self.state.metrics.num_unreturned_tokens = max(0, self._num_steps * self.width - sum(returned))

    def _num_hidden(self, text: Hypothesis) -> int:
        """A token that ends the text has no place in it."""
        return int(text.stop_token_id is not None and not self.state.include_stop)

    def _whole(
        self, index: int, text: Hypothesis, tokenizer: Tokenizer | None, ending: Ending | None
    ) -> CompletionOutput:
        state, ids = self.state, text.token_ids.tolist()
        said = ""
        if tokenizer is not None and state.detokenize:
            request = (state.prompt_token_ids, ids[: len(ids) - self._num_hidden(text)])
            (said,) = whole(tokenizer, [request], state.skip_special_tokens, state.spaces_between_special_tokens)
        reason, stop_reason = ending or (None, None)
        total = None if ending is None else text.cumulative_logprob
        return CompletionOutput(index, said, ids, total, None, reason, stop_reason)


def _ending(state: RequestState, text: Hypothesis) -> Ending:
    if text.stop_token_id is None:
        return Ending("length", None)
    return Ending("stop", None if text.stop_token_id in state.eos_token_ids else text.stop_token_id)
