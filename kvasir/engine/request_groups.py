"""Groups of requests: parallel samples that share a prompt, and beam searches. Core process.

The core adds such requests here, and passes outputs through while there are any. Groups use the scheduler to add, fork
and abort requests and to append tokens to them, so the scheduler knows nothing of samples or searches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from kvasir.engine.beam_search import Beam, BeamSearch, Proposals, candidates_per_beam
from kvasir.engine.scheduler import MemberResults, Scheduler
from kvasir.errors import RequestError
from kvasir.log import get_logger
from kvasir.messages import (
    LOGPROBS,
    BeamOutput,
    BeamSpec,
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
    Hypothesis,
    Part,
    RowSampling,
)

logger = get_logger(__name__)


class RequestGroups:
    """All groups of one engine. A step skips this class while `keys` is empty.

    The beams of a search run as members with negative keys. The scheduler reports them apart from other requests
    (MemberResults), and only this class turns such a report into something that clients see, under the search's key."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.keys: set[int] = set()  # of beam searches, and of forks that have not started
        self.forks = PendingForks(scheduler, self.keys)
        self.beams = BeamGroups(scheduler, self.keys)

    def add(self, request: EngineRequest) -> None:
        """Add a beam search, or a request with forks."""
        if request.beam is not None:
            self.beams.add(request)
        else:
            for each in request.forks:
                each.embeddings = request.embeddings  # which are sent once
            self._scheduler.add(request)
            self.forks.expect(request)

    def start_forks(self) -> None:
        """Start the forks of requests whose prompts are planned. Call after a step was planned."""
        self.forks.start()

    def update(self, output: EngineOutput, members: MemberResults) -> EngineOutput:
        """Add the state of searches to a step's output, by what their beams yielded."""
        return self.beams.update(output, members)

    def owner(self, request: EngineRequest) -> EngineRequest | None:
        """Return the request that clients know: a beam's search, or the request itself. None if the search has
        ended."""
        return request if request.key >= 0 else self.beams.owner(request.key)

    def end_forks(self, parent: Finished) -> list[Finished]:
        """End the forks that wait for a request which has failed, in the same way."""
        return [replace(parent, key=fork.key) for fork in self.forks.take(parent.key)]

    def abort(self, key: int) -> bool:
        """Abort a request that is known here. False if only the scheduler knows it."""
        return self.forks.abort(key) or self.beams.abort(key)


# ------------------------------------------------------------ parallel samples


class PendingForks:
    """Requests with the same prompt as another. They wait until it is computed and start on its blocks."""

    def __init__(self, scheduler: Scheduler, keys: set[int]) -> None:
        self._scheduler = scheduler
        self._keys = keys  # of all groups
        self._waiting: dict[int, list[EngineRequest]] = {}  # forks by the key of their parent
        self._parents: dict[int, int] = {}  # key of the parent by the key of a fork

    def expect(self, request: EngineRequest) -> None:
        """Hold the request's forks until its prompt is computed."""
        self._waiting[request.key] = list(request.forks)
        self._parents |= dict.fromkeys((fork.key for fork in request.forks), request.key)
        self._keys.update(fork.key for fork in request.forks)

    def start(self) -> None:
        """Start forks whose parent's prompt is planned: the device computes it before the forks' first step."""
        ready = [key for key, forks in self._waiting.items() if self._scheduler.num_computed(key) >= _length(forks)]
        for key in ready:
            for fork in self.take(key):
                self._scheduler.fork(key, fork)

    def abort(self, key: int) -> bool:
        """Remove a fork that has not started. Forks of an aborted parent are queued as requests of their own."""
        for fork in self.take(key):
            self._scheduler.add(fork)
        parent = self._parents.pop(key, None)
        if parent is None:
            return False
        self._keys.remove(key)
        self._waiting[parent] = [fork for fork in self._waiting[parent] if fork.key != key]
        if not self._waiting[parent]:
            del self._waiting[parent]
        return True

    def take(self, parent: int) -> list[EngineRequest]:
        """Remove and return the forks that wait for a parent."""
        forks = self._waiting.pop(parent, [])
        for fork in forks:
            del self._parents[fork.key]
            self._keys.remove(fork.key)
        return forks


def _length(forks: list[EngineRequest]) -> int:
    return max(len(fork.prompt_token_ids) for fork in forks)


# ------------------------------------------------------------ beam search


@dataclass(slots=True, eq=False)
class SearchGroup:
    """A beam search and the requests that run its beams."""

    request: EngineRequest
    beam: EngineRequest  # template of a beam's request
    search: BeamSearch
    blocks: int  # upper bound of the KV blocks that it needs
    keys: list[int] = field(default_factory=list)  # keys of its beams, in the order of the search
    proposals: dict[int, Proposals] = field(default_factory=dict)  # by key of the beam
    has_started: bool = False


class BeamGroups:
    """Runs each beam as a request with external tokens. After every step of a search its beams continue in place, fork
    or end, so the KV of a common prefix exists once."""

    def __init__(self, scheduler: Scheduler, keys: set[int]) -> None:
        self.running: dict[int, SearchGroup] = {}  # by the request's key
        self.waiting: deque[SearchGroup] = deque()
        self._scheduler = scheduler
        self._keys = keys  # of all groups
        self._of_beam: dict[int, SearchGroup] = {}  # by a beam's key
        self._beam_keys = count(-1, -1)  # requests of the API process have no negative keys

    def is_running(self, key: int) -> bool:
        search = self.running.get(key)
        return search is not None and any(self._scheduler.num_computed(beam) for beam in search.keys)

    def add(self, request: EngineRequest) -> None:
        spec = request.beam
        assert spec is not None, "only beam searches are added here"
        search = SearchGroup(request, self._beam(request, spec), BeamSearch(spec, request.max_tokens), 0)
        search.blocks = self._max_blocks(request, spec)
        rows, usable = self._scheduler.limits.max_num_seqs, self._scheduler.cache.pool.usable
        if spec.width > rows:
            raise RequestError(
                f"{spec.width} beams run as {spec.width} sequences, but max_num_seqs={rows}; lower beam_width.",
                "beam_width",
            )
        if search.blocks > usable:
            raise RequestError(
                f"{spec.width} beams of this prompt may need {search.blocks} KV blocks, but the cache has {usable}; "
                f"lower beam_width or max_tokens, or give the engine more KV cache memory",
                "beam_width",
            )
        self._keys.add(request.key)
        self.waiting.append(search)
        self._start()

    def _beam(self, request: EngineRequest, spec: BeamSpec) -> EngineRequest:
        wanted = candidates_per_beam(spec.eos_token_ids, spec.width // spec.num_groups)
        wanted += spec.width if spec.diversity_penalty else 0  # penalties may push that many tokens down
        return EngineRequest(
            0,
            request.prompt_token_ids,
            request.max_tokens + 1,  # never reached, because the search ends first
            RowSampling(logprobs=wanted),
            cache_salt=request.cache_salt,
            embeddings=request.embeddings,
            resource=request.resource,
            reads_cache=request.reads_cache,
            external_tokens=True,
            awaited=True,
            terms=request.terms,
        )

    def _max_blocks(self, request: EngineRequest, spec: BeamSpec) -> int:
        """Upper bound of the blocks of all beams. They share the prompt's full blocks, unless a preempted beam must
        recompute them for itself."""
        cache, prompt = self._scheduler.cache, len(request.prompt_token_ids)
        full = prompt - prompt % cache.block_size if cache.caching and request.reads_cache else 0
        shared = cache.blocks_for(full)
        own = cache.blocks_for(prompt + request.max_tokens) - shared + cache.num_groups  # one per group for a copy
        return shared + spec.width * own

    def _start(self) -> None:
        """Start searches as long as all running ones can hold every block they may need. With fewer blocks they could
        wait for each other forever."""
        while self.waiting:
            search = self._next()
            held = [*self.running.values(), search]
            rows = sum(search.search.spec.width for search in held)
            blocks = sum(search.blocks for search in held)
            limits = self._scheduler.limits
            if rows > limits.max_num_seqs or blocks > self._scheduler.cache.pool.usable:
                return
            self.waiting.remove(search)
            self.running[search.request.key] = search
            key = next(self._beam_keys)
            self._of_beam[key] = search
            search.keys = [key]
            self._scheduler.add(replace(search.beam, key=key))

    def _next(self) -> SearchGroup:
        """Return the search to start next: the oldest or, under a policy that shares, the oldest of the tenant that
        runs the fewest beams."""
        if self._scheduler.waiting.sharing is None or len(self.waiting) == 1:
            return self.waiting[0]
        beams: Counter[str] = Counter()
        for search in self.running.values():
            beams[search.request.terms.tenant] += search.search.spec.width
        return min(self.waiting, key=lambda s: beams[s.request.terms.tenant] / s.request.terms.weight)

    def abort(self, key: int) -> bool:
        if key in self.running:
            self._end(self.running[key])
            return True
        for search in self.waiting:
            if search.request.key == key:
                self.waiting.remove(search)
                self._keys.remove(key)
                return True
        return False

    def _end(self, search: SearchGroup) -> None:
        del self.running[search.request.key]
        self._keys.remove(search.request.key)
        self._abort_beams(search.keys)
        self._start()

    def _abort_beams(self, keys: Iterable[int]) -> None:
        for key in keys:
            del self._of_beam[key]
            self._scheduler.abort(key)

    # ------------------------------------------------------------ steps

    def update(self, output: EngineOutput, members: MemberResults) -> EngineOutput:
        """Add the state of the searches whose beams yielded something. Members of ended searches are dropped."""
        for start in members.started:
            search = self._of_beam.get(start.key)
            if search is not None and not search.has_started:
                search.has_started = True
                output.started.append(replace(start, key=search.request.key))
        for end in members.finished:
            search = self._of_beam.get(end.key)
            if search is not None:
                output.finished.append(self._fail(search, end.error or "a beam ended"))
        beams: list[BeamOutput] = []
        for search in self._collect(members.keys, members.parts[LOGPROBS]) if LOGPROBS in members.parts else ():
            if len(search.proposals) < len(search.keys):
                continue
            try:
                beams += self._advance(search)
            except Exception as error:  # a fault in one search must not end the other requests
                logger.exception("The beam search with key %d failed", search.request.key)
                output.finished.append(self._fail(search, f"the beam search failed: {type(error).__name__}: {error}"))
        if beams:
            output.beams = beams
        return output

    def _fail(self, search: SearchGroup, error: str) -> Finished:
        """End a search with an error, whatever state its beams are in."""
        request = search.request
        search.keys = [key for key, owner in self._of_beam.items() if owner is search]
        if request.key in self.running:
            self._end(search)
        tokens = None if request.stream else np.zeros(0, np.int32)
        return Finished(request.key, FinishReason.ERROR, None, tokens, error)

    def owner(self, key: int) -> EngineRequest | None:
        """The request whose search a beam belongs to."""
        search = self._of_beam.get(key)
        return None if search is None else search.request

    def _collect(self, keys: list[int], logprobs: Part) -> list[SearchGroup]:
        touched: dict[int, SearchGroup] = {}
        for index, ids, values in zip(
            logprobs.index.tolist(),
            logprobs.ints["token_ids"].tolist(),
            logprobs.floats["values"].tolist(),
            strict=True,
        ):
            search = self._of_beam.get(keys[index])
            if search is None:
                continue
            wanted = search.beam.sampling.logprobs or 0
            search.proposals[keys[index]] = Proposals(ids[1 : 1 + wanted], values[1 : 1 + wanted])
            touched[search.request.key] = search
        return list(touched.values())

    def _advance(self, search: SearchGroup) -> list[BeamOutput]:
        proposals = [search.proposals[key] for key in search.keys]
        search.proposals.clear()
        self._scheduler.stats.generated_tokens += search.search.spec.width
        beams = search.search.advance(proposals)
        if search.search.done:
            self._end(search)
            return [self._result(search)]
        self._continue(search, beams)
        if not search.request.stream:
            return []
        tokens, agreed = search.search.best()
        best = Hypothesis(np.array(tokens, np.int32), 0.0, 0.0)
        return [BeamOutput(search.request.key, [best], agreed, finished=False)]

    def _continue(self, search: SearchGroup, beams: list[Beam]) -> None:
        """End beams without a child, continue each other beam with its first child, and fork its other children."""
        old, parents = search.keys, {beam.parent for beam in beams}
        self._abort_beams(key for place, key in enumerate(old) if place not in parents)
        search.keys = []
        first: dict[int, int] = {}  # by parent: the token of its first child
        for beam in beams:
            if beam.parent not in first:
                first[beam.parent] = beam.tokens[-1]
                search.keys.append(old[beam.parent])
                continue
            key = next(self._beam_keys)
            prompt = np.concatenate([search.request.prompt_token_ids, np.array(beam.tokens, np.int32)])
            left = search.beam.max_tokens - len(beam.tokens)
            fork = replace(search.beam, key=key, prompt_token_ids=prompt, max_tokens=left)
            self._scheduler.fork(old[beam.parent], fork)
            self._of_beam[key] = search
            search.keys.append(key)
        for parent, token in first.items():
            self._scheduler.append(old[parent], [token])

    def _result(self, search: SearchGroup) -> BeamOutput:
        texts = [
            Hypothesis(np.array(text.tokens, np.int32), text.score, text.logprob, text.stop_token_id)
            for text in search.search.finished()
        ]
        return BeamOutput(search.request.key, texts, len(texts[0].token_ids), True)
