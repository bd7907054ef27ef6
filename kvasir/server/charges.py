"""What a request is charged for tokens that nobody has counted.

A client that goes away ends its request before the engine has said how much it made of it; were that free, a key's
tokens_per_minute would bind only those who wait for the answer.
"""

from __future__ import annotations

from kvasir.outputs import RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams


class Uncounted:
    """Of one request with its prompts: tokens that it may generate and that no output has told of."""

    def __init__(self, params: SamplingParams, prompt_lengths: list[int], max_model_len: int, interval: int) -> None:
        self._params = params
        self._max_model_len = max_model_len
        self._interval = params.stream_interval or interval
        self._num_open = len(prompt_lengths)  # prompts whose completions have not ended
        self._most = sum(map(self._most_of, prompt_lengths))

    def ended(self, output: RequestOutput) -> None:
        """All completions of a prompt have ended. One that was aborted is not told of unless it streams."""
        if self._streams or all(each.finish_reason != "abort" for each in output.outputs):
            self._num_open -= 1
            self._most -= self._most_of(len(output.prompt_token_ids))

    @property
    def num_tokens(self) -> int:
        """All that was asked for; of a stream only what can have come since its last output."""
        if not self._streams:
            return self._most
        return min(self._most, (self._interval - 1) * self._params.num_branches * self._num_open)

    @property
    def _streams(self) -> bool:
        """Whether its tokens are told of as they come; a search tells only of those that are settled."""
        return self._params.output_kind is RequestOutputKind.DELTA and not self._params.use_beam_search

    def _most_of(self, prompt_length: int) -> int:
        room = max(0, self._max_model_len - prompt_length)
        asked = room if self._params.max_tokens is None else min(room, self._params.max_tokens)
        return asked * self._params.num_branches
