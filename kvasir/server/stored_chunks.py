"""Puts the chunks of a streamed chat completion together again, to store it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from kvasir.outputs import RequestOutput
from kvasir.server.event_stream import PayloadWriter
from kvasir.server.schema.chat import (
    CalledCustom,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ReplyCall,
    ReplyMessage,
)


class StoringChunks:
    """Stores the completion that the chunks add up to."""

    def __init__(self, chunks: PayloadWriter, role: str, store: Callable[[list[ChatChoice], ChatChunk], None]) -> None:
        """`store` is called at the end with the choices and the first chunk."""
        self._chunks = chunks
        self._role = role
        self._store = store
        self._choices: dict[int, ChatChoice] = {}
        self._first_chunk: ChatChunk | None = None

    def payloads(self, output: RequestOutput) -> Sequence[bytes]:
        made = self._chunks.payloads(output)
        for payload in made:
            self._add(msgspec.json.decode(payload, type=ChatChunk))
        return made

    def last_payloads(self) -> Sequence[bytes]:
        if self._first_chunk is not None:
            self._store([self._choices[index] for index in sorted(self._choices)], self._first_chunk)
        return self._chunks.last_payloads()

    def _add(self, chunk: ChatChunk) -> None:
        self._first_chunk = self._first_chunk or chunk
        (new,) = chunk.choices
        choice = self._choices.get(new.index)
        if choice is None:
            message = ReplyMessage(role=self._role, content="")
            choice = self._choices[new.index] = ChatChoice(index=new.index, message=message)
        message = choice.message
        message.content = (message.content or "") + (new.delta.content or "")
        if new.delta.reasoning is not UNSET:
            message.reasoning = message.reasoning_content = (message.reasoning or "") + new.delta.reasoning
        if new.delta.tool_calls is not UNSET:
            message.tool_calls = _joined_calls(message.tool_calls or [], new.delta.tool_calls)
        choice.finish_reason = new.finish_reason
        if new.stop_reason is not UNSET:
            choice.stop_reason = new.stop_reason
        if new.token_ids is not UNSET:
            choice.token_ids = [*(choice.token_ids or []), *new.token_ids]
        if new.logprobs is not None:
            earlier = [] if choice.logprobs is None else choice.logprobs.content
            choice.logprobs = ChatLogprobs(content=[*earlier, *new.logprobs.content])


def add_text(call: ReplyCall, text: str) -> None:
    if isinstance(call.function, CalledFunction):
        call.function.arguments = (call.function.arguments or "") + text
    elif isinstance(call.custom, CalledCustom):
        call.custom.input = (call.custom.input or "") + text


def _joined_calls(known: list[ReplyCall], pieces: list[ReplyCall]) -> list[ReplyCall]:
    """Calls with further pieces of them, which come in their order."""
    for piece in pieces:
        if piece.id is not UNSET:
            known.append(ReplyCall(id=piece.id, type=piece.type, function=piece.function, custom=piece.custom))
        elif isinstance(piece.function, CalledFunction):
            add_text(known[-1], piece.function.arguments or "")
        elif isinstance(piece.custom, CalledCustom):
            add_text(known[-1], piece.custom.input or "")
    return known
