"""Compiles grammars, once for each text, with limits that end what would take long. API and core process; no torch.

The API process checks a request's grammar by compiling it, and the core compiles it for its guides.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvasir.errors import RequestError

MAX_CACHED = 256  # compiled grammars; each holds some hundred kilobytes
COMPILER_THREADS = 2
_TRIED = 64  # forced tokens at the beginning that are tried when a grammar is compiled
_STACK_BYTES = 512 << 20  # of the thread that compiles; only what it touches takes memory


def parser_limits() -> LLParserLimits:
    """Return llguidance's limits for compiling a grammar and for computing a mask. They amount to milliseconds."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=10_000,  # an optional property takes four
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar and return its matcher, or raise a RequestError that says what is wrong with the grammar."""
    return _on_a_deep_stack(lambda: _compile(tokenizer, grammar))


_stack_lock = threading.Lock()


def _on_a_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """llguidance recurses along chains of rules and definitions, and an overflow of the stack would end the process.
    The thread ends with the work, which gives its memory back."""
    done: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="compile-grammar-deep", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


def compile_again(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar that has been checked. The matcher shares nothing with the others of the grammar."""
    return _on_a_deep_stack(lambda: _matcher(tokenizer, grammar))


def _matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    matcher.compute_bitmask()  # what a first mask needs is built here
    return matcher


def _compile(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = _matcher(tokenizer, grammar)
    begun = matcher.deep_copy()  # limits are often reached by what must come first, or right after it
    first = begun.compute_ff_tokens()[:_TRIED]
    if begun.try_consume_tokens(first) < len(first) and not begun.is_error():
        # The library leaves out bytes of forced text for which the vocabulary has no token.
        raise RequestError("the output must begin with text that the model's tokens cannot write", "structured_outputs")
    if first and not begun.is_stopped():
        begun.compute_bitmask()
    for tried in (matcher, begun):
        if tried.is_error():
            raise RequestError(error_of(tried), "structured_outputs")
    return matcher


def error_of(matcher: LLMatcher) -> str:
    """Return what is wrong, without the library's own traces."""
    said = str(matcher.get_error()).split("<backtrace>")[0].replace("<non-verbose/>", "").strip()
    if said.startswith("panic:"):
        return "it is too large or too complex"
    return "no text fits it" if said.startswith("NoExtension") else said


class CompiledGrammars:
    """Compiled grammars by their text, the last used ones. Used by several threads."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer], size: int = MAX_CACHED) -> None:
        self._make_tokenizer = tokenizer
        self._size = size
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._found: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._pool = ThreadPoolExecutor(COMPILER_THREADS, "compile-grammar")
        self.num_compiled = self.num_hits = 0

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:  # a second thread must not make another
            made = self.__dict__.get("tokenizer")
            return self._make_tokenizer() if made is None else made

    def submit(self, grammar: str) -> Future[LLMatcher]:
        """Return a future of the compiled grammar. A thread compiles it unless it is known."""
        with self._lock:
            found = self._found.get(grammar)
            if found is not None:
                self.num_hits += 1
                self._found.move_to_end(grammar)
                return found
            self.num_compiled += 1
            made = self._found[grammar] = self._pool.submit(lambda: compile_grammar(self.tokenizer, grammar))
            while len(self._found) > self._size:
                self._found.popitem(last=False)
            return made
