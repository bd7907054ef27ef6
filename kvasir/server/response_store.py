"""Responses that are kept, the oldest forgotten first: so many, and so many bytes. Of this process alone."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir.server.api_keys import Key
from kvasir.server.errors import ApiError, not_found
from kvasir.server.schema.base import encode
from kvasir.server.schema.chat import Message
from kvasir.server.schema.responses import ResponseReply

if TYPE_CHECKING:
    from kvasir.server.api_request import Run

MOST_BYTES = 256 << 20


@dataclass(slots=True)
class Stored:
    response: ResponseReply
    messages: list[Message]  # the conversation, without instructions; with the answer, once it is there
    owner: str  # the key's name: nobody else sees it
    run: Run | None = None  # while it runs
    task: asyncio.Task[None] | None = None  # one that runs in the background
    num_bytes: int = 0


class ResponseStore:
    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, stored: Stored) -> None:
        """Keep a new one. Those that run are not forgotten, so a store that is full of them takes none that runs in the
        background: nothing but this bounds those."""
        running = sum(each.run is not None for each in self._kept.values())
        if stored.response.background and running >= self.most:
            message = f"{running} responses run, as many as are stored here (--max-stored-responses): wait for one."
            raise ApiError(429, message, "queue_full", "background", "queue_full", retry_after=1.0)
        self._put(stored)

    def update(self, stored: Stored) -> None:
        """Note how large it has become, unless it was deleted while it ran."""
        if stored.response.id in self._kept:
            self._drop(stored.response.id)
            self._put(stored)

    def _put(self, stored: Stored) -> None:
        stored.num_bytes = len(encode(stored.response)) + _size(stored.messages)
        self.num_bytes += stored.num_bytes
        self._kept[stored.response.id] = stored
        done = [key for key, each in self._kept.items() if each.run is None]
        for key in done:
            if len(self._kept) <= self.most and self.num_bytes <= self.most_bytes:
                break
            self._drop(key)

    def find(self, response_id: str, key: Key) -> Stored:
        """A 404 for what is not kept, or is another key's."""
        found = self._kept.get(response_id)
        if found is None or found.owner != key.name:
            raise not_found(f"The response {response_id!r} is not stored here, or not any more.")
        return found

    def delete(self, response_id: str, key: Key) -> None:
        self.find(response_id, key)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self.num_bytes -= self._kept.pop(response_id).num_bytes


def _size(messages: Sequence[Message]) -> int:
    return sum(len(str(message.content)) for message in messages)
