"""Chunks of a chat completion. The commonest one, some text and nothing else, is put together from bytes that are
ready: a token's way to the socket is the hot path of the server. Tests hold it equal to what the struct gives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.server.answers import FINGERPRINT
from kvasir.server.logprobs import LogprobWriter, prompt_logprobs
from kvasir.server.runs import Run
from kvasir.server.schema.base import encode
from kvasir.server.schema.chat import ChatChunk, ChunkChoice, Delta


@dataclass(slots=True)
class StreamWishes:
    """What a client wants beside the text."""

    usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    num_top_logprobs: int | None = None  # None: no log-probabilities
    echo: str = ""  # every choice begins with this

    @property
    def text_only(self) -> bool:
        return not self.token_ids and not self.continuous_usage and self.num_top_logprobs is None


class ChatChunks:
    """Writes the chunks of one reply."""

    def __init__(self, run: Run, id: str, created: int, model: str, role: str, wishes: StreamWishes) -> None:
        self.run = run
        self.wishes = wishes
        self.role = role
        self._base: dict[str, Any] = {"id": id, "created": created, "model": model, "system_fingerprint": FINGERPRINT}
        self._writer: LogprobWriter | None = None
        self._begun: set[int] = set()
        self._parts: dict[int, tuple[bytes, bytes]] = {}  # a text chunk's bytes around the text, by choice

    def with_logprobs(self, writer: LogprobWriter) -> ChatChunks:
        self._writer = writer
        return self

    async def payloads(self) -> AsyncGenerator[list[bytes], None]:
        """JSON objects, as many at a time as the engine has made ready."""
        plain, source = self.wishes.text_only, self.run.outputs()
        parts = self._parts
        try:
            async for _, output in source:
                completions = output.outputs
                each = completions[0]
                if plain and len(completions) == 1 and each.finish_reason is None and each.index in parts:
                    if each.text:
                        before, after = parts[each.index]
                        yield [before + encode(each.text) + after]
                    continue
                if some := self._chunks(output):
                    yield some
            if self.wishes.usage:
                yield [encode(ChatChunk(**self._base, choices=[], usage=self.run.usage()))]
        finally:
            await source.aclose()

    def _chunks(self, output: RequestOutput) -> list[bytes]:
        self.run.check(output)
        made: list[bytes] = []
        for each in output.outputs:
            if each.index not in self._begun:
                made += self._first(each.index, output)
            if each.text or (each.token_ids and not self.wishes.text_only):
                made.append(encode(self._chunk(self._text(each))))
            if each.finish_reason is not None:
                end = ChunkChoice(index=each.index, delta=Delta(), finish_reason=each.finish_reason)
                end.stop_reason = each.stop_reason
                made.append(encode(self._chunk(end)))
        return made

    def _first(self, index: int, output: RequestOutput) -> list[bytes]:
        """The role, and what is said of the prompt."""
        chunk = self._chunk(ChunkChoice(index=index, delta=Delta(role=self.role, content="")))
        if not self._begun:
            if self.wishes.token_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
            if output.prompt_logprobs is not None:
                chunk.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        self._begun.add(index)
        self._prepare(index)
        made = [encode(chunk)]
        if self.wishes.echo:
            made.append(encode(self._chunk(ChunkChoice(index=index, delta=Delta(content=self.wishes.echo)))))
        return made

    def _prepare(self, index: int) -> None:
        mark = "\x00"
        whole = encode(self._chunk(ChunkChoice(index=index, delta=Delta(content=mark))))
        before, after = whole.split(encode(mark))
        self._parts[index] = before, after

    def _text(self, each: CompletionOutput) -> ChunkChoice:
        choice = ChunkChoice(index=each.index, delta=Delta(content=each.text))
        if self.wishes.token_ids:
            choice.token_ids = each.token_ids
        num = self.wishes.num_top_logprobs
        if num is not None and each.logprobs is not None and self._writer is not None:
            choice.logprobs = self._writer.chat(each.token_ids, each.logprobs, num)
        return choice

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        chunk = ChatChunk(**self._base, choices=[choice])
        if self.wishes.continuous_usage:
            chunk.usage = self.run.usage()
        elif self.wishes.usage:
            chunk.usage = None  # OpenAI's way to say that it comes later
        else:
            chunk.usage = UNSET
        return chunk
