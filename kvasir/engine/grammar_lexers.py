"""Matchers of one grammar for many requests at once. Core process.

Copies of a matcher share its lexer behind a lock: their masks are computed one after the other, on any number of
threads. So each running request gets a matcher that was compiled for it alone. That takes less than a millisecond for
most grammars and happens in a thread; until then a request shares another's. A matcher that a request has left serves
the next, with all that its lexer has learned. Grammars that take long to compile have few matchers, which are shared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor

from llguidance import LLMatcher

from kvasir.log import get_logger

logger = get_logger(__name__)

_MOST = 1024  # of one grammar; each takes about 50 kilobytes
_SECONDS = 1.0  # of compiling for one grammar


class Lexer:
    """A matcher at the beginning of its grammar. Requests take copies of it."""

    __slots__ = ("matcher", "users")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.users = 0


class GrammarLexers:
    """The lexers of one grammar. The core's thread takes them, and one of `threads` adds to them."""

    def __init__(self, first: LLMatcher, compile_another: Callable[[], LLMatcher], threads: Executor) -> None:
        self._compile = compile_another
        self._threads = threads
        self._lock = threading.RLock()  # a guide that the garbage collector finds gives its lexer back, at any moment
        self._all = [Lexer(first)]
        self._idle = list(self._all)
        self._num_taken = 0
        self._num_ordered = 0
        self._most = 2  # until it is known how long compiling takes

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_spare(self) -> int:
        """How many `drop_spare` would forget."""
        return min(len(self._idle), len(self._all) - 1)

    def take(self) -> Lexer:
        """Return a lexer that nobody uses, or the one with the fewest users."""
        with self._lock:
            self._num_taken += 1
            lexer = self._idle.pop() if self._idle else min(self._all, key=lambda each: each.users)
            lexer.users += 1
            if lexer.users > 1:
                self._order()
            return lexer

    def exchange(self, shared: Lexer) -> Lexer:
        """Return a lexer that nobody uses for a request that shares one, or that one if there is none yet."""
        with self._lock:
            if not self._idle:
                self._order()
                return shared
            lexer = self._idle.pop()
            lexer.users += 1
            shared.users -= 1
            if not shared.users:
                self._idle.append(shared)
            return lexer

    def give_back(self, lexer: Lexer) -> None:
        with self._lock:
            self._num_taken -= 1
            lexer.users -= 1
            if not lexer.users:
                self._idle.append(lexer)

    def drop_spare(self) -> int:
        """Forget the lexers that nobody uses, except one if there is no other. Returns how many those were."""
        before = len(self._all)
        with self._lock:
            while self._idle and len(self._all) > 1:
                self._all.remove(self._idle.pop())
        return before - len(self._all)

    def _order(self) -> None:
        """Let a thread compile another lexer, if there are fewer than requests, and time for it."""
        if len(self._all) + self._num_ordered < min(self._num_taken, self._most):
            self._num_ordered += 1
            self._threads.submit(self._add)

    def _add(self) -> None:
        made, start = None, time.perf_counter()
        try:
            made = Lexer(self._compile())
        except Exception:
            logger.exception("A grammar could not be compiled again; some requests wait for the masks of others")
        seconds = max(1e-6, time.perf_counter() - start)
        with self._lock:
            self._num_ordered -= 1
            self._most = 0 if made is None else max(2, min(_MOST, int(_SECONDS / seconds)))
            if made is not None:
                self._all.append(made)
                self._idle.append(made)
