"""Resources that requests need on the device before they can run, such as adapters: which slot holds which, who uses
them, and who waits. Core process; knows digests and slots, not what they stand for.

A request that needs a resource holds its slot from the load to its end, through preemptions. Until the load is done it
waits here, outside the queue, so that it keeps nobody else waiting. A slot that nobody holds keeps its content until
another resource needs it; the least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvasir.engine.request import Request
from kvasir.errors import RequestError
from kvasir.messages import Resource

# Requests for resources on the device that may overtake one which waits for a slot. Then they wait behind it, or a few
# busy resources could keep all slots for ever.
MOST_OVERTAKING = 64


@dataclass(slots=True)
class ResourceStats:
    """Counters since the start, under the names of EngineStats."""

    resource_loads: int = 0
    resource_evictions: int = 0
    resource_hits: int = 0  # requests whose resource was on the device


@dataclass(slots=True)
class _Held:
    """A slot that holds a resource, or will when its load is done."""

    resource: Resource
    slot: int
    is_ready: bool = False
    num_holders: int = 0
    waiting: dict[int, Request] = field(default_factory=dict)  # holders that wait for the load, by key


class ResourceSlots:
    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self.stats = ResourceStats()
        self._held: dict[bytes, _Held] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # ready and without holders, least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._unplaced: dict[int, Request] = {}  # requests for which there is no slot, first come first
        self._num_overtaking = 0  # requests that were placed before the first of these since it came
        self._num_waiting = 0
        self._loads: list[tuple[int, Resource]] = []
        self._ready: list[Request] = []

    def __len__(self) -> int:
        """Number of requests that wait here."""
        return self._num_waiting + len(self._unplaced)

    @property
    def is_busy(self) -> bool:
        return bool(self._num_waiting or self._loads or self._unplaced or self._ready)

    @property
    def num_used(self) -> int:
        """Number of slots that requests hold."""
        return sum(held.num_holders > 0 for held in self._held.values())

    # ------------------------------------------------------------ requests

    def claim(self, request: Request) -> bool:
        """Take the slot of the request's resource. Returns False if the request waits here for it."""
        if not self.num_slots:
            raise RequestError("this engine takes no adapters: start it with enable_lora=True", "lora_request")
        must_wait = self._unplaced and self._num_overtaking >= MOST_OVERTAKING
        if not must_wait and self._place(request):
            self._num_overtaking += bool(self._unplaced)
            return self._is_ready(request)
        self._unplaced[request.key] = request
        return False

    def attach(self, request: Request) -> None:
        """Hold the slot that another request with the same resource holds now."""
        assert request.spec.resource is not None, "a request without a resource needs no slot"
        held = self._held[request.spec.resource.digest]
        assert held.is_ready and held.num_holders, "a running request holds its resource"
        held.num_holders += 1
        request.resource_slot = held.slot

    def release(self, request: Request) -> None:
        """Give back what the request holds or waits for, because it has ended."""
        if self._unplaced.pop(request.key, None) is not None:
            self._place_more()
            return
        assert request.spec.resource is not None, "a request without a resource holds no slot"
        held = self._held[request.spec.resource.digest]
        self._num_waiting -= held.waiting.pop(request.key, None) is not None
        self._ready = [each for each in self._ready if each is not request]
        held.num_holders -= 1
        request.resource_slot = -1
        self._settle(held)

    def waits(self, request: Request) -> bool:
        """Whether the request waits here and not in the queue."""
        resource = request.spec.resource
        if resource is None:
            return False
        held = self._held.get(resource.digest)
        here = held is not None and request.key in held.waiting
        return here or request.key in self._unplaced or any(each is request for each in self._ready)

    def take_ready(self) -> list[Request]:
        """Return the requests whose resources have become ready since the last call."""
        ready, self._ready = self._ready, []
        return ready

    # ------------------------------------------------------------ loads

    def take_loads(self) -> list[tuple[int, Resource]]:
        """Return the loads to start now, as slots with their resources."""
        loads, self._loads = self._loads, []
        return loads

    def loaded(self, slot: int, failed: bool) -> list[Request]:
        """Record that a load is done. Returns the requests that cannot run because it failed; the caller ends them."""
        (held,) = (each for each in self._held.values() if each.slot == slot)
        waiting, held.waiting = list(held.waiting.values()), {}
        self._num_waiting -= len(waiting)
        if not failed:
            held.is_ready = True
            self._ready += waiting
            self._settle(held)
            return []
        assert held.num_holders == len(waiting), "nothing runs with a resource that is not loaded"
        del self._held[held.resource.digest]
        self._free.append(slot)
        for request in waiting:
            request.resource_slot = -1
        self._place_more()
        return waiting

    # ------------------------------------------------------------ slots

    def _place(self, request: Request) -> bool:
        """Give the request the slot of its resource, or a slot for it. Returns False if no slot is free."""
        assert request.spec.resource is not None, "only requests with resources come here"
        resource = request.spec.resource
        held = self._held.get(resource.digest)
        if held is None:
            slot = self._take_slot()
            if slot is None:
                return False
            held = self._held[resource.digest] = _Held(resource, slot)
            self._loads.append((slot, resource))
            self.stats.resource_loads += 1
        else:
            self.stats.resource_hits += 1
        self._idle.pop(resource.digest, None)
        held.num_holders += 1
        request.resource_slot = held.slot
        if not held.is_ready:
            held.waiting[request.key] = request
            self._num_waiting += 1
        return True

    def _is_ready(self, request: Request) -> bool:
        assert request.spec.resource is not None, "only requests with resources come here"
        return self._held[request.spec.resource.digest].is_ready

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        digest, _ = self._idle.popitem(last=False)
        self.stats.resource_evictions += 1
        return self._held.pop(digest).slot

    def _settle(self, held: _Held) -> None:
        if held.num_holders == 0 and held.is_ready:
            self._idle[held.resource.digest] = None
        self._place_more()

    def _place_more(self) -> None:
        """Place requests that wait for a slot, in order of arrival. At most MOST_OVERTAKING others overtake the
        first."""
        is_first = True
        for key, request in list(self._unplaced.items()):
            if not is_first and self._num_overtaking >= MOST_OVERTAKING:
                return
            if not self._place(request):
                is_first = False
                continue
            del self._unplaced[key]
            if self._is_ready(request):
                self._ready.append(request)
            if is_first:
                self._num_overtaking = 0
            else:
                self._num_overtaking += 1
