"""The events of a streamed response, in OpenAI's order."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from kvasir.server.errors import as_api_error
from kvasir.server.response_job import ResponseJob
from kvasir.server.schema.base import encode
from kvasir.server.schema.responses import OutputText


class ResponseEvents:
    def __init__(self, job: ResponseJob) -> None:
        self.job = job
        self._number = 0
        self._place = {"item_id": job.item_id, "output_index": 0, "content_index": 0}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        job, source = self.job, self.job.run.outputs()
        text: list[str] = []
        logprobs: list[Any] = []
        opened = False
        try:
            async for _, output in source:
                job.run.check(output)
                (each,) = output.outputs
                frames = b"" if opened else self._opening()
                opened = True
                if each.text or each.logprobs:
                    new = job.logprobs(each)
                    text.append(each.text)
                    logprobs += new
                    frames += self._event("response.output_text.delta", **self._place, delta=each.text, logprobs=new)
                if each.finish_reason is not None:
                    job.complete("".join(text), logprobs, each.finish_reason)
                    frames += self._closing()
                if frames:
                    yield frames
        finally:
            await source.aclose()
            job.ended()

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that fails on its way."""
        self.job.fail(as_api_error(error))
        return self._event("response.failed", response=self.job.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"

    def _opening(self) -> bytes:
        part = OutputText(text="", annotations=[], logprobs=[])
        item = {"id": self.job.item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        return (
            self._event("response.created", response=self.job.response)
            + self._event("response.in_progress", response=self.job.response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=part)
        )

    def _closing(self) -> bytes:
        response = self.job.response
        (item,) = response.output
        (part,) = item.content
        return (
            self._event("response.output_text.done", **self._place, text=part.text, logprobs=part.logprobs)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{response.status}", response=response)
        )
