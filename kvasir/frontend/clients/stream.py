"""Stream: the outputs of one request on their way to its reader. API process, one event loop.

The engine never waits for a reader: a slow one finds the outputs that it missed merged into one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Self

from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.sampling_params import RequestOutputKind


class Stream:
    def __init__(self, request_id: str, kind: RequestOutputKind) -> None:
        self.request_id = request_id
        self.finished = False  # the last output, or the error, has arrived
        self._merges = kind is RequestOutputKind.DELTA
        self._pending: RequestOutput | None = None
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None  # set while a task waits in `next`
        self._end: asyncio.Future[None] | None = None  # set while tasks wait in `wait_finished`

    def put(self, output: RequestOutput) -> None:
        if self.finished:
            return
        if self._pending is not None and self._merges:
            output = merge(self._pending, output)
        self._pending = output
        self.finished = output.finished
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The reader gets the outputs that came before, then the error."""
        if not self.finished:
            self._error, self.finished = error, True
            self._wake()

    async def next(self) -> RequestOutput | None:
        """The next output; None after the last one."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            if self.finished:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        output, self._pending = self._pending, None
        return output

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self.next()
        if output is None:
            raise StopAsyncIteration
        return output

    async def wait_finished(self) -> None:
        """Wait until the last output has arrived, whether or not anything reads it."""
        if not self.finished:
            self._end = self._end or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._end)

    def _wake(self) -> None:
        if self.finished and self._end is not None and not self._end.done():
            self._end.set_result(None)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merge(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Merge two deltas of one request."""
    completions = {each.index: each for each in older.outputs}
    for each in newer.outputs:
        before = completions.get(each.index)
        completions[each.index] = each if before is None else _merge_completions(before, each)
    return replace(
        newer,
        prompt_logprobs=older.prompt_logprobs if newer.prompt_logprobs is None else newer.prompt_logprobs,
        outputs=[completions[index] for index in sorted(completions)],
    )


def _merge_completions(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    logprobs = newer.logprobs
    if older.logprobs is not None and logprobs is not None:
        logprobs = older.logprobs + logprobs  # type: ignore[operator]
    return replace(newer, text=older.text + newer.text, token_ids=older.token_ids + newer.token_ids, logprobs=logprobs)
