"""One request of a client to a pooling model: an ApiRequest whose outputs are vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvasir.errors import PromptTooLongError
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.outputs import PoolingRequestOutput, RequestOutput
from kvasir.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from kvasir.server.api_request import ApiRequest, check_length, within
from kvasir.server.errors import ApiError, timed_out, too_large
from kvasir.server.http import Call
from kvasir.server.state import ServerState

_NOTHING = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)  # no token is sampled


@dataclass(slots=True, eq=False)
class PoolingRequest(ApiRequest):
    pooling: PoolingParams = field(default_factory=PoolingParams)

    @classmethod
    async def make(
        cls,
        state: ServerState,
        call: Call,
        texts: Sequence[Any],  # texts, pairs of texts, or token ids
        pooling: PoolingParams,
        *,
        priority: int | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> PoolingRequest:
        async with within(state, call, timeout):
            prompts = await read_texts(state, texts, pooling)
        return cls(state, call, prompts, _NOTHING, priority or 0, timeout, user, pooling=pooling)

    @property
    def asked(self) -> PoolingParams:
        return self.pooling

    async def vectors(self) -> list[PoolingRequestOutput]:
        """Run to the end; return every prompt's result, or raise why there is none."""
        return cast(list[PoolingRequestOutput], await self.whole())

    def check(self, output: RequestOutput) -> None:
        reason = cast(Any, output).finish_reason
        if reason == "error":
            raise ApiError(500, cast(Any, output).error or "The request failed.", "engine", code="request_failed")
        if reason == "timeout":
            raise timed_out(self.timeout, cast(Any, output).error or "")
        if reason == "abort" and not self.cancelled:
            raise ApiError(503, "The server was shut down before the answer was complete.", "draining")

    def take(self, output: RequestOutput) -> None:
        if output.num_cached_tokens:
            self.tokens.cached[output.request_id] = output.num_cached_tokens
        metrics, reason = self.state.metrics, cast(Any, output).finish_reason
        metrics.ended(output.metrics, len(output.prompt_token_ids), output.num_cached_tokens or 0, 0)
        self.reasons.append(reason)
        metrics.finished(reason)

    def num_charged(self, left_early: bool) -> int:
        return 0


async def read_texts(state: ServerState, texts: Sequence[Any], params: PoolingParams) -> list[TokenizedPrompt]:
    """Tokenize and check texts, pairs of texts and token ids, within the server's limits."""
    engine = state.engine
    processor, pool = engine.input_processor.pooling, engine.text_pool
    processor.pooler_for(params.task)
    sizes = [sum(map(len, each)) if isinstance(each, tuple) else len(each) for each in texts]
    if max(sizes, default=0) > pool.max_characters:
        message = f"A text has {max(sizes)} characters that must be tokenized at once"
        raise too_large(f"{message}; this server takes {pool.max_characters} (--max-tokenizing-characters).", "input")
    cut = params.truncate_prompt_tokens
    try:
        found = await pool.run(sum(sizes), lambda: processor.tokenize(texts, cut))
    except PromptTooLongError as error:
        error.parameter = "input"
        check_length(state, error.num_tokens or 0)
        raise
    for each in found:
        check_length(state, len(each.token_ids))
    return found
