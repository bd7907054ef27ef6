"""One API request on its way through the engine: admitted, followed, counted, logged; aborted when nobody reads on.

A request may have several prompts; each becomes one of the engine's requests.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from kvasir.async_llm import AsyncLLM
from kvasir.errors import RequestError
from kvasir.log import get_logger
from kvasir.outputs import RequestOutput
from kvasir.prompts import TokensPrompt
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server.calls import Call
from kvasir.server.errors import ApiError, as_api_error, timed_out
from kvasir.server.schema.usage import PromptTokensDetails, Usage
from kvasir.server.state import ServerState

logger = get_logger(__name__)
_numbers = itertools.count()


@dataclass(slots=True)
class Terms:
    """On what terms a request runs, besides its parameters."""

    priority: int = 0
    timeout: float | None = None
    user: str | None = None  # for the log


@dataclass(slots=True, eq=False)
class Run:
    state: ServerState
    call: Call
    prompts: Sequence[TokensPrompt]
    params: SamplingParams
    terms: Terms = field(default_factory=Terms)
    num_prompt_tokens: int = 0
    num_generated: int = 0
    num_cached: int = 0
    first_token: float | None = None  # seconds after arrival
    reasons: list[str] = field(default_factory=list)  # how its completions ended
    ids: list[str] = field(default_factory=list)  # of the engine's requests
    cancelled: bool = False  # by its client
    engine: AsyncLLM = field(init=False)  # asked for once: while the server drains, no new request gets it

    def __post_init__(self) -> None:
        self.engine = self.state.engine
        self.num_prompt_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in self.prompts)
        most = self.state.config.request_timeout
        if most is not None:
            self.terms.timeout = most if self.terms.timeout is None else min(most, self.terms.timeout)

    # ------------------------------------------------------------ the outputs

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(which prompt, output) as they come. Whatever ends this generator ends the request."""
        self._check_choices()
        self.state.limits.admit(self.call.key, self.num_prompt_tokens, len(self.prompts))
        self.state.began(self)
        self._log_arrival()
        error: ApiError | None = None
        try:
            number = next(_numbers)
            self.ids = [f"{number}-{index}" for index in range(len(self.prompts))]
            parts = [
                self.engine.generate(
                    prompt,
                    self.params,
                    request_id,
                    priority=self.terms.priority,
                    tenant=self.call.key.name,
                    weight=self.call.key.weight,
                    timeout=self.terms.timeout,
                )
                for prompt, request_id in zip(self.prompts, self.ids, strict=True)
            ]
            source = _numbered(parts[0]) if len(parts) == 1 else merged(parts)
            try:
                if self.params.output_kind is RequestOutputKind.FINAL_ONLY:
                    async for index, output in source:
                        self._note_whole(output)
                        yield index, output
                else:
                    last = time.time()
                    tally = self.state.metrics
                    async for index, output in source:
                        now = time.time()
                        new = 0
                        for each in output.outputs:
                            new += len(each.token_ids)
                        if new:
                            self.num_generated += new
                            tally.tally.generated += new
                            if self.first_token is None:
                                self.first_token = now - self.call.arrived
                            elif len(parts) == 1:
                                tally.tally.gap(now - last, new)
                            last = now
                        if output.finished:
                            self._note_end(output)
                        yield index, output
            finally:
                await source.aclose()
        except (asyncio.CancelledError, GeneratorExit):
            error = ApiError(499, "the client went away", "disconnect")
            raise
        except Exception as raised:
            error = as_api_error(raised)
            raise error from raised
        finally:
            self._close(error)

    async def whole(self) -> list[RequestOutput]:
        """The last output of every prompt."""
        last: dict[int, RequestOutput] = {}
        source = self.outputs()
        try:
            async for index, output in source:
                last[index] = output
        finally:
            await source.aclose()
        return [last[index] for index in range(len(self.prompts))]

    async def abort(self) -> None:
        """End it from outside; its outputs end with finish_reason "abort"."""
        await self.engine.abort(self.ids)

    async def cancel(self) -> None:
        """The same because its client wants it."""
        self.cancelled = True
        await self.abort()

    def _check_choices(self) -> None:
        asked, most = len(self.prompts) * self.params.num_branches, self.state.config.max_choices
        if asked > most:
            raise RequestError(f"{asked} completions are asked for at once; this server gives at most {most}.", "n")
        policy = self.engine.config.scheduler.scheduling_policy
        if self.terms.priority and policy != "priority":
            message = f"priority needs --scheduling-policy priority; this server orders its queue by {policy}."
            raise RequestError(message, "priority")

    # ------------------------------------------------------------ counting

    def _note_whole(self, output: RequestOutput) -> None:
        for each in output.outputs:
            self.num_generated += len(each.token_ids)
            self.state.metrics.tally.generated += len(each.token_ids)
        self._note_end(output)

    def _note_end(self, output: RequestOutput) -> None:
        cached = output.num_cached_tokens or 0
        self.num_cached += cached
        times = output.metrics
        generated = times.num_generation_tokens if times is not None else 0
        self.state.metrics.ended(times, len(output.prompt_token_ids), cached, generated)
        for each in output.outputs:
            if each.finish_reason is not None:
                self.reasons.append(each.finish_reason)
                self.state.metrics.finished(each.finish_reason)

    def usage(self) -> Usage:
        details = PromptTokensDetails(cached_tokens=self.num_cached)
        usage = Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_generated,
            total_tokens=self.num_prompt_tokens + self.num_generated,
        )
        if self.state.config.enable_prompt_tokens_details:
            usage.prompt_tokens_details = details
        return usage

    def check(self, output: RequestOutput) -> None:
        """Raise what ended a request that has no answer to show for it."""
        for each in output.outputs:
            if each.finish_reason == "error":
                raise ApiError(500, str(each.stop_reason or "The request failed."), "engine", code="request_failed")
            if each.finish_reason == "timeout" and not each.token_ids and self.num_generated == 0:
                raise timed_out(self.terms.timeout)
            if each.finish_reason == "abort" and not self.cancelled:
                raise ApiError(503, "The server was shut down before the answer was complete.", "draining")

    # ------------------------------------------------------------ the log

    def _log_arrival(self) -> None:
        metrics, params = self.state.metrics, self.params
        metrics.params_n.observe(params.n)
        if params.max_tokens is not None:
            metrics.params_max_tokens.observe(params.max_tokens)
        facts = {
            "request_id": self.call.id,
            "path": self.call.path,
            "key": self.call.log_name,
            "prompt_tokens": self.num_prompt_tokens,
            "user": self.terms.user,
        }
        text = ""
        if self.state.config.enable_log_requests:
            prompts = [prompt.get("prompt") or prompt["prompt_token_ids"] for prompt in self.prompts]
            text = f" {params}, prompts: {str(prompts)[: self.state.config.max_log_len]}"
        logger.info(
            "%s arrived: %s, %d prompt tokens, key %s%s",
            *(self.call.id, self.call.path, self.num_prompt_tokens, self.call.log_name, text),
            extra={"fields": facts},
        )

    def _close(self, error: ApiError | None) -> None:
        self.state.ended(self)
        self.state.limits.release(self.call.key, self.num_generated)
        now = time.time()
        if error is not None and error.cause != "disconnect":
            self.state.metrics.failed(error.cause)
            error.counted = True
        elif error is not None and len(self.reasons) < len(self.prompts):
            self.state.metrics.failed("disconnect")
        took = now - self.call.arrived
        reason = ",".join(sorted(set(self.reasons))) if error is None else error.cause
        per_token = None
        if self.first_token is not None and self.num_generated > 1:
            per_token = (took - self.first_token) / (self.num_generated - 1)
        facts = {
            "request_id": self.call.id,
            "path": self.call.path,
            "key": self.call.log_name,
            "finish_reason": reason,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached,
            "completion_tokens": self.num_generated,
            "seconds": round(took, 4),
            "time_to_first_token": None if self.first_token is None else round(self.first_token, 4),
            "time_per_token": None if per_token is None else round(per_token, 5),
            "error": None if error is None else error.message,
        }
        logger.info(
            "%s ended: %s, %d tokens in, %d out, %.3f s, first token after %s s, %s s per token, key %s%s",
            *(self.call.id, reason, self.num_prompt_tokens, self.num_generated, took),
            *(facts["time_to_first_token"] or "-", facts["time_per_token"] or "-", self.call.log_name),
            "" if error is None else f": {error.message}",
            extra={"fields": facts},
        )
        self._trace(now, reason, error)

    def _trace(self, now: float, reason: str, error: ApiError | None) -> None:
        facts = {
            "gen_ai.request.model": self.state.model_names[0],
            "gen_ai.request.id": self.call.id,
            "gen_ai.request.max_tokens": self.params.max_tokens,
            "gen_ai.request.temperature": self.params.temperature,
            "gen_ai.request.top_p": self.params.top_p,
            "gen_ai.request.n": self.params.n,
            "gen_ai.usage.prompt_tokens": self.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": self.num_generated,
            "gen_ai.latency.time_to_first_token": self.first_token,
            "gen_ai.latency.e2e": now - self.call.arrived,
            "gen_ai.response.finish_reasons": reason,
        }
        problem = None if error is None else error.message
        self.state.tracer.request(self.call.path, self.call.traceparent, self.call.arrived, now, facts, problem)


async def _numbered(
    part: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    try:
        async for output in part:
            yield 0, output
    finally:
        await part.aclose()


async def merged(
    parts: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several generators as they come; the first error ends them all."""
    pending = {asyncio.ensure_future(anext(part, None)): index for index, part in enumerate(parts)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                index, output = pending.pop(future), future.result()
                if output is not None:
                    yield index, output
                    pending[asyncio.ensure_future(anext(parts[index], None))] = index
    finally:
        for future in pending:
            future.cancel()
        if pending:
            await asyncio.wait(pending)
        for part in parts:
            await part.aclose()
