"""Stored responses and chat completions of one API process, up to a number and a size; the oldest are dropped first.

A streamed completion is put together again from its chunks (`StoringChunks`).
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel

from kvasir.server.api_keys import ApiKey
from kvasir.server.errors import ApiError, not_found
from kvasir.server.schema.chat import ChatCompletion
from kvasir.server.schema.responses import ResponseReply

if TYPE_CHECKING:
    from kvasir.server.api_request import ApiRequest
    from kvasir.server.event_stream import PayloadWriter
from collections.abc import Callable, Sequence

from msgspec import UNSET

from kvasir.outputs import RequestOutput
from kvasir.server.schema.chat import (
    CalledCustom,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ReplyCall,
    ReplyMessage,
)

MAX_BYTES = 256 << 20
_PIECE = 64 << 10  # bytes of events that are sent at once


@dataclass(slots=True)
class StoredResponse:
    response: ResponseReply
    items: list[dict[str, Any]]  # the conversation without instructions, and the answer once it is complete
    owner: str  # name of the API key that alone may see it
    request: ApiRequest | None = None  # while it runs
    task: asyncio.Task[None] | None = None  # of a background response
    log: EventLog | None = None  # of a streamed background response
    num_input: int = 0  # how many of the items are its input
    num_bytes: int = 0


class EventLog:
    """The events of a response, which several clients may follow, from any of them on."""

    def __init__(self) -> None:
        self.events: list[bytes] = []  # by sequence number
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(self, frames: bytes) -> None:
        self.events += [event + b"\n\n" for event in frames.split(b"\n\n")[:-1]]
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, number: int) -> AsyncIterator[bytes]:
        """Yield the events from this sequence number on: first those that exist, then each new one. They come in
        pieces, so that a client that does not read holds no copy of all of them."""
        while True:
            changed = self._changed
            if new := self._piece(number):
                number += len(new)
                yield b"".join(new)
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _piece(self, number: int) -> list[bytes]:
        end, size = number, 0
        while end < len(self.events) and size < _PIECE:
            size += len(self.events[end])
            end += 1
        return self.events[number:end]


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, stored: StoredResponse) -> None:
        """Store a new one. Running responses are never dropped, so their number limits background responses."""
        running = sum(each.request is not None for each in self._stored.values())
        if stored.response.background and running >= self.max_responses:
            message = f"{running} responses are running, as many as are stored (--max-stored-responses): wait."
            raise ApiError(429, message, "queue_full", "background", "queue_full", retry_after=1.0)
        self._put(stored)
        if self.num_bytes > self.max_bytes and running and stored.request is not None:
            self._drop(stored.response.id)
            message = f"The responses that are running take {self.max_bytes >> 20} MiB, all that are stored: wait."
            raise ApiError(429, message, "queue_full", "input", "queue_full", retry_after=1.0)

    def update(self, stored: StoredResponse) -> None:
        """Measure a response again that has changed, unless it was deleted meanwhile."""
        if stored.response.id in self._stored:
            self._drop(stored.response.id)
            self._put(stored)

    def _put(self, stored: StoredResponse) -> None:
        stored.num_bytes = size_in_memory([stored.response, stored.items, stored.log and stored.log.events])
        self.num_bytes += stored.num_bytes
        self._stored[stored.response.id] = stored
        done = [key for key, each in self._stored.items() if each.request is None]
        for key in done:
            if len(self._stored) <= self.max_responses and self.num_bytes <= self.max_bytes:
                break
            self._drop(key)

    def find(self, response_id: str, key: ApiKey) -> StoredResponse:
        """The response; a 404 if it is not stored, or belongs to another key."""
        found = self._stored.get(response_id)
        if found is None or found.owner != key.name:
            raise not_found(f"The response {response_id!r} is not stored here; it may have been dropped to make room.")
        return found

    def delete(self, response_id: str, key: ApiKey) -> None:
        self.find(response_id, key)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self.num_bytes -= self._stored.pop(response_id).num_bytes


@dataclass(slots=True)
class StoredCompletion:
    completion: ChatCompletion  # with its metadata
    messages: list[dict[str, Any]]  # of the request
    owner: str  # name of the API key that alone may see it
    num_bytes: int = 0


class CompletionStore:
    """Chat completions whose requests asked for it with `store`. Clients may choose ids, so each key has its own."""

    def __init__(self, max_completions: int, max_bytes: int = MAX_BYTES) -> None:
        self.max_completions = max_completions
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._stored: OrderedDict[tuple[str, str], StoredCompletion] = OrderedDict()  # by owner and id, oldest first

    def add(self, stored: StoredCompletion) -> None:
        """Store a completion. An earlier one of the same id makes room for it."""
        place = stored.owner, stored.completion.id
        self._drop(place)
        self._stored[place] = stored
        self.update(stored)

    def update(self, stored: StoredCompletion) -> None:
        """Measure a completion that is new or has changed."""
        self.num_bytes -= stored.num_bytes
        stored.num_bytes = size_in_memory([stored.completion, stored.messages])
        self.num_bytes += stored.num_bytes
        while self._stored and (len(self._stored) > self.max_completions or self.num_bytes > self.max_bytes):
            self._drop(next(iter(self._stored)))

    def find(self, completion_id: str, key: ApiKey) -> StoredCompletion:
        """Return the completion. It is a 404 if it is not stored, or belongs to another key."""
        found = self._stored.get((key.name, completion_id))
        if found is None:
            name = f"The chat completion {completion_id!r}"
            raise not_found(f"{name} is not stored here; it may have been dropped to make room.")
        return found

    def delete(self, completion_id: str, key: ApiKey) -> None:
        self.find(completion_id, key)
        self._drop((key.name, completion_id))

    def of(self, key: ApiKey) -> list[StoredCompletion]:
        """List all completions of a key, the oldest first."""
        return [each for each in self._stored.values() if each.owner == key.name]

    def _drop(self, place: tuple[str, str]) -> None:
        if (found := self._stored.pop(place, None)) is not None:
            self.num_bytes -= found.num_bytes


def size_in_memory(value: Any) -> int:
    """Bytes that an object takes with all that it holds. In a list of short parts the objects take more than their
    text."""
    total, todo = 0, [value]
    while todo:
        each = todo.pop()
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            todo += each.keys()
            todo += each.values()
        elif isinstance(each, list | tuple):
            todo += each
        elif isinstance(each, msgspec.Struct):
            todo += [getattr(each, name) for name in each.__struct_fields__]
        elif isinstance(each, BaseModel):
            todo += [each.__dict__, each.model_extra or {}]
    return total


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
    """Add further pieces to calls, in the order in which they come."""
    for piece in pieces:
        if piece.id is not UNSET:
            known.append(ReplyCall(id=piece.id, type=piece.type, function=piece.function, custom=piece.custom))
        elif isinstance(piece.function, CalledFunction):
            add_text(known[-1], piece.function.arguments or "")
        elif isinstance(piece.custom, CalledCustom):
            add_text(known[-1], piece.custom.input or "")
    return known
