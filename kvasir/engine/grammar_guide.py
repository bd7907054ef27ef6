"""Grammars as guides, by llguidance. Core process; no torch, no text.

A grammar is compiled and checked in a thread before the first request that has it runs. Every request follows it with
a matcher of its own (grammar_lexers.py). The masks of a step are computed on several threads, without Python's lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLTokenizer
from numpy.typing import NDArray

from kvasir.engine.grammar_compile import COMPILER_THREADS, MAX_CACHED, CompiledGrammars, compile_again, error_of
from kvasir.engine.grammar_lexers import GrammarLexers, Lexer
from kvasir.engine.guides import GuideKind, TokenGuide
from kvasir.log import get_logger
from kvasir.messages import LEFT_GRAMMAR, Int32Array

logger = get_logger(__name__)

GRAMMAR_GUIDE = "grammar"
_MAX_SPARE = 256  # matchers of all grammars that no request uses, beyond one of each
_MAX_MASK_THREADS = 16
_CALLERS = 4  # threads that wait for masks
_BATCH = 64  # masks of rows that may jump
_FEW = 2  # so many masks are computed without the threads ...
_FEW_TOKENS = 8  # ... and so many tokens taken in: that is a matter of microseconds


class GrammarGuides(GuideKind):
    """The kind of guides that follow grammars. An argument is what `guide_argument` makes.

    With several threads, masks are computed as soon as tokens are taken in, beside the core's own work. That also finds
    out what is forced, so looking for jumps is quick then; on one thread it is quicker to jump first. Masks lie in one
    block of memory, which is used again for every step.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer], vocab_size: int, num_threads: int = 1) -> None:
        self.compiled = CompiledGrammars(tokenizer)
        self._words = -(-vocab_size // 32)  # of a mask for the model; the tokenizer's may be longer
        self._masks = np.empty((0, 0), np.int32)
        self._owners: list[GrammarGuide] = []  # of the masks of this step
        self._num_answered = 0  # of these masks: given as answers
        self._batches: list[_Batch] = []  # masks that are being computed
        self._callers = ThreadPoolExecutor(_CALLERS, "compute-masks")  # each waits for a batch
        self._called = threading.Semaphore(0)
        self._num_threads = min(num_threads, _MAX_MASK_THREADS)
        self._lexers: OrderedDict[str, GrammarLexers] = OrderedDict()
        self._compilers = ThreadPoolExecutor(COMPILER_THREADS, "compile-grammar-again")

    @cached_property
    def _executor(self) -> LLExecutor:
        logger.info("Masks of structured outputs are computed on %d threads", self._num_threads)
        return LLExecutor(self._num_threads)

    def prepare(self, argument: Mapping[str, Any]) -> Future[Any]:
        futures = [self.compiled.submit(grammar) for grammar in _grammars(argument)]
        return futures[0] if len(futures) == 1 else _all(futures)

    def make(self, argument: Mapping[str, Any]) -> GrammarGuide:
        grammar = argument["grammar"]
        guide = GrammarGuide(
            None if not grammar else self.lexers(grammar),
            argument["gate"],
            {token: self.lexers(grammar) for token, grammar in argument["tags"]},
            argument["jumps"],
        )
        guide.is_lenient = argument["lenient"]
        return guide

    def lexers(self, grammar: str) -> GrammarLexers:
        """Return the lexers of a grammar, which is compiled now unless it has been."""
        first = self.compiled.submit(grammar).result()  # always, so that both know when it was last used
        found = self._lexers.pop(grammar, None)
        if found is None:
            too_many = sum(each.num_spare for each in self._lexers.values()) - _MAX_SPARE
            for other in self._lexers.values():  # the first was used longest ago
                if too_many <= 0:
                    break
                too_many -= other.drop_spare()
            if len(self._lexers) >= MAX_CACHED:
                self._lexers.popitem(last=False)
            tokenizer = self.compiled.tokenizer
            found = GrammarLexers(first, lambda: compile_again(tokenizer, grammar), self._compilers)
        self._lexers[grammar] = found
        return found

    def accept(self, guides: Sequence[GrammarGuide], tokens: Sequence[list[int]]) -> None:
        self._wait()
        one = [len(new) == 1 and guide.holds for guide, new in zip(guides, tokens, strict=True)]
        pairs = [(guide, new[0]) for guide, new, is_one in zip(guides, tokens, one, strict=True) if is_one]
        if self._num_threads < 2 or len(pairs) <= _FEW_TOKENS or not self._accept_together(pairs):
            super().accept(guides, tokens)
        elif len(pairs) < len(guides):
            others = [number for number, is_one in enumerate(one) if not is_one]
            super().accept([guides[number] for number in others], [tokens[number] for number in others])

    def _accept_together(self, pairs: Sequence[tuple[GrammarGuide, int]]) -> bool:
        """Let the threads take in a token of each guide. Returns False if none was taken in."""
        for guide, _ in pairs:
            if guide.shares_lexer:
                guide.leave_shared_lexer()
        try:
            taken = self._executor.consume_token_par([(guide.matcher, token) for guide, token in pairs])
        except Exception:  # they are checked before the first takes its token in
            logger.exception("Tokens could not be taken in together and will be taken in one by one")
            return False
        for (guide, token), is_taken in zip(pairs, taken, strict=True):
            if not is_taken or guide.shares_lexer or guide.matcher.is_stopped():
                guide.took_in(token, is_taken)
            else:
                guide.mask_line = None
        return True

    def ready(self, guides: Sequence[GrammarGuide]) -> None:
        self.used_up()
        if self._num_threads < 2 or len(guides) <= _FEW:
            return
        matchers, count = self._lines_for(guides), len(guides)
        # Those who jump wait for their batch, while the next is computed. The last has all that are left.
        size = _BATCH if any(guide.may_jump for guide in guides) else count
        begins = list(range(0, max(1, count - size + 1), size))[:_CALLERS]
        _ = self._executor  # made by one thread
        for begin, end in zip(begins, [*begins[1:], count], strict=True):
            done = self._callers.submit(self._compute, matchers[begin:end])
            self._batches.append(_Batch(guides[begin:end], done))
        for _ in begins:  # the threads need Python's lock to begin, and this one keeps it unless it waits
            self._called.acquire()

    def _compute(self, matchers: list[tuple[Any, int]]) -> None:
        self._called.release()
        address, size = self._masks.ctypes.data, self._masks.strides[0]
        self._executor.unsafe_compute_mask_ptr(matchers, address, size, len(self._masks))

    def _wait(self) -> None:
        for batch in self._batches:
            batch.wait()
        self._batches.clear()

    def answers(self, guides: Sequence[GrammarGuide]) -> tuple[Int32Array, NDArray[np.intp]]:
        self._wait()
        self._add_masks([guide for guide in guides if guide.mask_line is None])
        lines = np.array([guide.mask_line for guide in guides], np.intp)
        begin, end = self._num_answered, self._num_answered + len(guides)
        beyond = lines >= end
        if beyond.any():  # masks of guides that have jumped or ended make room
            is_asked = np.zeros(len(self._owners), np.bool_)
            is_asked[lines] = True
            free = np.flatnonzero(~is_asked[begin:end]) + begin
            self._masks[free] = self._masks[lines[beyond]]
            lines[beyond] = free
            for line in free.tolist():
                self._owners[line].mask_line = None
        for guide, line in zip(guides, lines.tolist(), strict=True):
            self._owners[line], guide.mask_line = guide, line
        self._num_answered = end
        return self._masks[begin:end, : self._words], lines - begin

    def used_up(self) -> None:
        self._wait()
        for guide in self._owners:
            guide.mask_line = None
        self._owners.clear()
        self._num_answered = 0

    def _lines_for(self, guides: Sequence[GrammarGuide]) -> list[tuple[Any, int]]:
        """Take memory for the masks of guides. Returns each matcher and its line."""
        begin, end = len(self._owners), len(self._owners) + len(guides)
        if end > len(self._masks):
            more = np.zeros((2 * end, -(-self.compiled.tokenizer.vocab_size // 32)), np.int32)
            more[:begin] = self._masks[:begin] if begin else 0
            self._masks = more
        self._owners += guides
        for line, guide in enumerate(guides, begin):
            guide.mask_line = line
        return [(guide.matcher, line) for line, guide in enumerate(guides, begin)]

    def _add_masks(self, guides: Sequence[GrammarGuide]) -> None:
        """Compute the masks of guides that have none."""
        if not guides:
            return
        matchers = self._lines_for(guides)
        address, size = self._masks.ctypes.data, self._masks.strides[0]
        try:
            if len(matchers) <= _FEW or self._num_threads < 2:
                for matcher, line in matchers:
                    matcher.unsafe_compute_mask_ptr(address + line * size, size)
            else:
                self._executor.unsafe_compute_mask_ptr(matchers, address, size, len(self._masks))
        except BaseException:
            _forget(guides)
            raise
        for guide in guides:
            guide.check()


class _Batch:
    """Guides whose masks are being computed. Until that is done, nothing else may use their matchers."""

    def __init__(self, guides: Sequence[GrammarGuide], done: Future[None]) -> None:
        self._guides = guides
        self._done = done
        for guide in guides:
            guide.batch = self

    def wait(self) -> None:
        """Wait for the masks, once."""
        guides, self._guides = self._guides, ()
        if not guides:
            return
        try:
            self._done.result()
        except Exception:
            logger.exception("Masks failed together and will be computed one by one")
            _forget(guides)
        for guide in guides:
            guide.batch = None
            if guide.matcher is not None and guide.matcher.is_error():
                guide.check()


def _forget(guides: Sequence[GrammarGuide]) -> None:
    for guide in guides:
        guide.mask_line = None


def guide_argument(
    grammar: str,
    *,
    gate: int | None = None,
    tags: Sequence[tuple[int, str]] = (),
    jumps: bool = True,
    lenient: bool = False,
) -> dict[str, Any]:
    """Return the argument of a grammar guide, as a request sends it. `gate`: a token up to which the output is free.
    `tags`: tokens after which the output is held to a grammar until that is complete, instead of one `grammar` for the
    whole output. `lenient`: the grammar leaves out something that was asked for, which is counted."""
    own_tags = [list(tag) for tag in tags]
    return {"grammar": grammar, "gate": gate, "tags": own_tags, "jumps": jumps, "lenient": lenient}


def _grammars(argument: Mapping[str, Any]) -> list[str]:
    return [argument["grammar"]] if argument["grammar"] else [grammar for _, grammar in argument["tags"]]


def _all(futures: Sequence[Future[Any]]) -> Future[Any]:
    """Return a future that is done when all of these are."""
    done: Future[Any] = Future()
    left = len(futures)
    lock = threading.Lock()

    def count(each: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            error = next((found for future in futures if (found := future.exception()) is not None), None)
            done.set_result(None) if error is None else done.set_exception(error)

    for future in futures:
        future.add_done_callback(count)
    return done


class GrammarGuide(TokenGuide):
    """Follows the grammar of one request."""

    _lexers: GrammarLexers | None = None  # where its lexer comes from
    _lexer: Lexer | None = None  # of the matcher, while it holds
    _taken_in: list[int] | None = None  # the matcher's tokens while it shares its lexer with older guides
    mask_line: int | None = None  # where its next mask is, if that has been computed, or is being: ...
    batch: _Batch | None = None  # ... then with these

    def __init__(
        self, whole: GrammarLexers | None, gate: int | None, tags: Mapping[int, GrammarLexers], jumps: bool = True
    ) -> None:
        self._whole = whole
        self._gate = gate
        self._tags = tags
        self.may_jump = jumps
        self.matcher: Any = None  # the LLMatcher while it holds
        self.holds = False
        if gate is None and whole is not None:
            self._begin(whole)

    def accept(self, token_ids: Sequence[int]) -> None:
        if self.batch is not None:
            self.batch.wait()
        for token in token_ids:
            if self.holds:
                if self._taken_in is not None:
                    self.leave_shared_lexer()
                self.took_in(token, self.matcher.consume_token(token))
            elif self._gate is not None:
                if token == self._gate:
                    self._gate = None
                    if self._whole is not None:
                        self._begin(self._whole)
            elif token in self._tags:
                self._begin(self._tags[token])
            if self.error is not None or self.is_complete:
                return

    def took_in(self, token: int, is_taken: bool) -> None:
        """Follow the matcher, which has taken in a token, or has failed to."""
        self.mask_line = None
        if self._taken_in is not None:
            self._taken_in.append(token)
        if not is_taken:
            self.check()
        elif self.matcher.is_stopped():
            self._complete()

    def _begin(self, lexers: GrammarLexers) -> None:
        lexer = lexers.take()
        self._lexers, self._lexer = lexers, lexer
        self._taken_in = [] if lexer.users > 1 else None
        self.matcher, self.holds = lexer.matcher.deep_copy(), True

    @property
    def shares_lexer(self) -> bool:
        """Whether its matcher has the lexer of an older guide."""
        return self._taken_in is not None

    def leave_shared_lexer(self) -> None:
        """Go on with a lexer of its own, if there is one by now."""
        assert self._lexers is not None and self._lexer is not None and self._taken_in is not None, "it shares a lexer"
        own = self._lexers.exchange(self._lexer)
        if own is self._lexer:
            return
        matcher = own.matcher.deep_copy()
        taken_in, self._lexer, self._taken_in = self._taken_in, own, None
        if matcher.try_consume_tokens(taken_in) == len(taken_in):
            self.matcher = matcher  # in the same state

    def _complete(self) -> None:
        if self._whole is not None:
            self.is_complete = True
        self._release()  # after a tag the output is free again

    def _release(self) -> None:
        if self._lexers is not None and self._lexer is not None:
            self._lexers.give_back(self._lexer)
        self._lexers = self._lexer = self._taken_in = self.matcher = self.mask_line = None
        self.holds = False

    def __del__(self) -> None:
        self._release()

    def check(self) -> None:
        """Note an error of the matcher: it has reached a limit, or a token came that the grammar does not allow."""
        if self.holds and self.matcher.is_error() and self.error is None:
            self._fail()

    def _fail(self) -> None:
        why = error_of(self.matcher)[:300]
        if not why or "doesn't satisfy the grammar" in why:
            why = (
                "a token came that it forbids; do allowed_token_ids, bad_words or others leave none that it allows, or "
                "does it need text that the model's tokens cannot write?"
            )
        self.error = f"{LEFT_GRAMMAR}: {why}"

    def jump(self, least: int, most: int, stops: Collection[int], completes: bool = True) -> list[int]:
        if not (self.may_jump and self.holds and most >= least):
            return []
        if self.batch is not None:
            self.batch.wait()
            if self.error is not None:
                return []
        tokens: list[int] = self.matcher.compute_ff_tokens()[:most]
        for place, token in enumerate(tokens):
            if token in stops:
                tokens = tokens[:place]
                break
        if len(tokens) < least:
            return []
        self.mask_line = None
        if self.matcher.try_consume_tokens(tokens) < len(tokens):  # forced tokens are allowed: a limit was reached
            self._fail()
            return []
        if self.matcher.is_stopped() and self.error is None:
            if completes:
                self._complete()
                return tokens
            self.matcher.rollback(1)
            tokens = tokens[:-1]
        if self._taken_in is not None:
            self._taken_in += tokens
        return tokens
