"""Groups of requests: parallel samples that share a prompt, and beam searches. Core process.

The core adds every request here and passes every output through. Groups use the scheduler to add, fork and abort
requests and to append tokens to them, so the scheduler knows nothing of samples or searches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from kvasir.engine.beam_search import Beam, BeamSearch, Proposals, candidates_per_beam
from kvasir.engine.scheduler import Scheduler
from kvasir.errors import RequestError
from kvasir.messages import (
    LOGPROBS,
    BeamOutput,
    BeamSpec,
    EngineOutput,
    EngineRequest,
    Hypothesis,
    Part,
    RowSampling,
    Started,
    select_parts,
)


class RequestGroups:
    """All groups of one engine. A step skips this class if there are none."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.forks = PendingForks(scheduler)
        self.beams = BeamGroups(scheduler)

    def __len__(self) -> int:
        """Number of groups that need work between steps."""
        return len(self.forks) + len(self.beams)

    def __contains__(self, key: int) -> bool:
        """Whether the request is a fork that has not started, or a beam search."""
        return key in self.forks or key in self.beams

    @property
    def num_known(self) -> int:
        """Number of forks that have not started, and of beam searches."""
        return self.forks.num_waiting + len(self.beams)

    def add(self, request: EngineRequest) -> None:
        if request.beam is not None:
            self.beams.add(request)
        else:
            self._scheduler.add(request)
            self.forks.expect(request)

    def start_forks(self) -> None:
        """Start the forks of requests whose prompts are planned. Call after a step was planned."""
        self.forks.start()

    def update(self, output: EngineOutput) -> EngineOutput:
        """Replace the tokens of beams in a step's output by the state of their searches."""
        return self.beams.update(output) if len(self.beams) else output

    def abort(self, key: int) -> bool:
        """Abort a request that is known here. False if only the scheduler knows it."""
        return self.forks.abort(key) or self.beams.abort(key)


# ------------------------------------------------------------ parallel samples


class PendingForks:
    """Requests with the same prompt as another. They wait until it is computed and start on its blocks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[int, list[EngineRequest]] = {}  # forks by the key of their parent
        self._parents: dict[int, int] = {}  # key of the parent by the key of a fork

    def __len__(self) -> int:
        """Number of parents with waiting forks."""
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._parents

    @property
    def num_waiting(self) -> int:
        return len(self._parents)

    def expect(self, request: EngineRequest) -> None:
        if request.forks:
            self._waiting[request.key] = list(request.forks)
            self._parents |= dict.fromkeys((fork.key for fork in request.forks), request.key)

    def start(self) -> None:
        """Start forks whose parent's prompt is planned: the device computes it before the forks' first step."""
        ready = [key for key, forks in self._waiting.items() if self._scheduler.num_computed(key) >= _length(forks)]
        for key in ready:
            for fork in self._take(key):
                self._scheduler.fork(key, fork)

    def abort(self, key: int) -> bool:
        """Remove a fork that has not started. Forks of an aborted parent are queued as requests of their own."""
        for fork in self._take(key):
            self._scheduler.add(fork)
        parent = self._parents.pop(key, None)
        if parent is None:
            return False
        self._waiting[parent] = [fork for fork in self._waiting[parent] if fork.key != key]
        return True

    def _take(self, parent: int) -> list[EngineRequest]:
        """Remove and return the forks of a parent."""
        forks = self._waiting.pop(parent, [])
        for fork in forks:
            del self._parents[fork.key]
        return forks


def _length(forks: list[EngineRequest]) -> int:
    return max((len(fork.prompt_token_ids) for fork in forks), default=0)


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

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._running: dict[int, SearchGroup] = {}  # by the request's key
        self._waiting: deque[SearchGroup] = deque()
        self._of_beam: dict[int, SearchGroup] = {}  # by a beam's key
        self._keys = count(-1, -1)  # requests of the API process have no negative keys

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._running or any(search.request.key == key for search in self._waiting)

    def is_running(self, key: int) -> bool:
        search = self._running.get(key)
        return search is not None and any(self._scheduler.num_computed(beam) for beam in search.keys)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

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
        self._waiting.append(search)
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
        while self._waiting:
            held = [*self._running.values(), self._waiting[0]]
            rows = sum(search.search.spec.width for search in held)
            blocks = sum(search.blocks for search in held)
            limits = self._scheduler.limits
            if rows > limits.max_num_seqs or blocks > self._scheduler.cache.pool.usable:
                return
            search = self._waiting.popleft()
            self._running[search.request.key] = search
            key = next(self._keys)
            self._of_beam[key] = search
            search.keys = [key]
            self._scheduler.add(replace(search.beam, key=key))

    def abort(self, key: int) -> bool:
        if key in self._running:
            self._end(self._running[key])
            return True
        for search in self._waiting:
            if search.request.key == key:
                self._waiting.remove(search)
                return True
        return False

    def _end(self, search: SearchGroup) -> None:
        del self._running[search.request.key]
        self._abort_beams(search.keys)
        self._start()

    def _abort_beams(self, keys: Iterable[int]) -> None:
        for key in keys:
            del self._of_beam[key]
            self._scheduler.abort(key)

    # ------------------------------------------------------------ steps

    def update(self, output: EngineOutput) -> EngineOutput:
        """Replace the proposals of beams in a step's output by the state of their searches."""
        output.started = [start for each in output.started if (start := self._start_of(each)) is not None]
        ours = np.array([key in self._of_beam for key in output.keys.tolist()], np.bool_)
        if not ours.any():
            return output
        touched = self._collect(output.keys.tolist(), output.parts[LOGPROBS])
        others = np.flatnonzero(~ours)
        rest = EngineOutput(
            keys=output.keys[others],
            token_ids=output.token_ids[others],
            counts=output.counts[others],
            parts=select_parts(output.parts, others, len(output.keys)),
            finished=output.finished,
            started=output.started,
        )
        ready = [search for search in touched if len(search.proposals) == len(search.keys)]
        rest.beams = [found for search in ready for found in self._advance(search)]
        return rest

    def _start_of(self, start: Started) -> Started | None:
        """Return the start of a search for the start of its first beam; None for its other beams."""
        if start.key >= 0:
            return start
        search = self._of_beam.get(start.key)
        if search is None or search.has_started:
            return None
        search.has_started = True
        return replace(start, key=search.request.key)

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
            key = next(self._keys)
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
