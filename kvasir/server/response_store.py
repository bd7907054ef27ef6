"""Stored responses of one API process, up to a number and a size; the oldest are dropped first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir.server.api_keys import ApiKey
from kvasir.server.errors import ApiError, not_found
from kvasir.server.schema.base import encode
from kvasir.server.schema.chat import Message
from kvasir.server.schema.responses import ResponseReply

if TYPE_CHECKING:
    from kvasir.server.api_request import ApiRequest

MAX_BYTES = 256 << 20


@dataclass(slots=True)
class StoredResponse:
    response: ResponseReply
    messages: list[Message]  # the conversation without instructions, and the answer once it is complete
    owner: str  # name of the API key that alone may see it
    request: ApiRequest | None = None  # while it runs
    task: asyncio.Task[None] | None = None  # of a background response
    num_bytes: int = 0


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

    def update(self, stored: StoredResponse) -> None:
        """Measure a response again that has changed, unless it was deleted meanwhile."""
        if stored.response.id in self._stored:
            self._drop(stored.response.id)
            self._put(stored)

    def _put(self, stored: StoredResponse) -> None:
        stored.num_bytes = len(encode(stored.response)) + _size(stored.messages)
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


def _size(messages: Sequence[Message]) -> int:
    return sum(len(str(message.content)) for message in messages)
