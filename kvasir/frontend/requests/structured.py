"""Structured outputs of requests for one engine: grammars are checked here, before anything reaches the core.

API process; the core's process uses `grammar_guides` for its half. llguidance compiles a grammar for a model's
vocabulary, so both processes make its tokenizer from the model's.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from kvasir.config.engine import EngineConfig, ModelConfig
from kvasir.engine.grammar_compile import CompiledGrammars
from kvasir.engine.grammar_guide import GRAMMAR_GUIDE, GrammarGuides, guide_argument
from kvasir.errors import ModelError, RequestError, excerpt
from kvasir.frontend.text.grammar import PARAMETER, Grammar, JsonStyle, Markers, build_grammar, from_triggers
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import tokenizer_of
from kvasir.frontend.text.tokenizer_gguf import end_token_ids
from kvasir.messages import Extras, RowSampling
from kvasir.platforms.limits import allowed_cpus, usable_cpus
from kvasir.quantization.gguf_file import read_gguf
from kvasir.sampling_params import StructuredOutputsParams

COMPILE_SECONDS = 10.0  # a grammar is refused that is not compiled by then; its limits make that milliseconds
_MAX_CHECKED = 1024  # grammars whose arguments are kept ...
_MAX_CHECKED_CHARACTERS = 1 << 26  # ... while their texts are no longer together
_ADVICE = "or set structured_outputs.lenient to skip what cannot be enforced"
_WITH_STRICT = ("response_format", "text", "output_config", "output_format", "tools")  # they have `strict` instead
_SCHEMA, _REGEX = "JSON schema", "regular expression"
# Then why, and after that lines of the grammar.
_SCHEMA_IN_LARK, _REGEX_IN_LARK = "failed to compile JSON schema: ", " (in regex): "
# Groups of tokens of which llguidance looks at none if all fit: white space, and text in strings. The library has the
# lengths 10 and 30. The dearest masks are those in the middle of a short string; with more lengths they take 0.7 ms
# instead of 1.2, and masks of schemas with short strings a quarter less on average.
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_TEXT}{{1,{length}}}" for length in (2, 3, 4, 5, 6, 8, 12, 20, 30)),
    f"{_TEXT}+",
]
_LINE_OF_LARK = re.compile(r"\n +\d+ \| ")


class _TooSlow(RequestError):
    """A grammar took too long to compile."""


class StructuredOutputs:
    """Turns StructuredOutputsParams into the arguments of guides."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        settings = config.structured_outputs_config
        self._config = config
        self._tokenizer = tokenizer
        self.style = JsonStyle(
            "compact" if settings.get("disable_any_whitespace") else settings.get("whitespace", "spaced"),
            lenient=settings.get("lenient", False),
            closed=settings.get("disable_additional_properties", False),
        )
        self.may_jump = settings.get("jump_forward", True)
        self.compiled = CompiledGrammars(lambda: grammar_tokenizer(config, tokenizer))
        self._checked: OrderedDict[Grammar, dict[str, Any]] = OrderedDict()
        self._checked_characters = 0
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make llguidance's tokenizer now, unless the model generates no text. It takes a second for a large
        vocabulary."""
        if not self._config.poolers and self._tokenizer is not None and self._tokenizer.can_serialize:
            _ = self.markers

    @cached_property
    def markers(self) -> Markers:
        """Added tokens by their text. No other tokens spell such a text."""
        assert self._tokenizer is not None, "markers are tokens of a tokenizer"
        added, known = self._tokenizer.added_tokens(skip_special_tokens=False), self.compiled.tokenizer
        return {text: token for token, text in added.items() if known.is_special_token(token)}

    def guide(self, params: StructuredOutputsParams, sampling: RowSampling) -> tuple[str, dict[str, Any]]:
        """Return the guide of a request, or raise a RequestError that says what is wrong with its grammar."""
        argument = self.check(params)
        return GRAMMAR_GUIDE, {**argument, "jumps": self.may_jump and jumps_are_exact(sampling)}

    def check(self, params: StructuredOutputsParams) -> dict[str, Any]:
        """Compile the grammar unless it is known. Call it in a thread first where waiting would hold up others."""
        try:
            return self._check(params)
        except RequestError as error:
            source, said = self._where(params, str(error), isinstance(error, _TooSlow))
            if source in _WITH_STRICT:
                said = said.replace("structured_outputs.lenient", "strict to false")
            raise RequestError(said if source in said else f"{source}: {said}", source) from error

    def _where(self, params: StructuredOutputsParams, said: str, slow: bool) -> tuple[str, str]:
        """Return the field that is wrong, and what is wrong with it. For a constraint made of several parts that is the
        first wrong part, unless compiling the parts again is `slow`."""
        for name, part in () if slow else params.parts:
            try:
                self._check(part)
            except RequestError as error:
                return part.source, f"{name}: {error}" if name else str(error)
        return params.source, said

    def _check(self, params: StructuredOutputsParams) -> dict[str, Any]:
        if self._tokenizer is None:
            message = "structured_outputs need a tokenizer, and skip_tokenizer_init=True loads none; leave them out."
            raise RequestError(message, PARAMETER)
        if not self._tokenizer.can_serialize:
            message = "structured_outputs need a tokenizer with a tokenizer.json, which this model's does not have."
            raise RequestError(message, PARAMETER)
        grammar = build_grammar(params, self.style, self.markers)
        with self._lock:
            found = self._checked.get(grammar)
            if found is not None:
                self._checked.move_to_end(grammar)
                return found
        argument = self._argument(grammar)
        texts = [argument["grammar"]] if argument["grammar"] else [text for _, text in argument["tags"]]
        kind = "grammar" if params.regex is None else _REGEX
        skips = [self._compile(text, kind) for text in texts]
        argument["lenient"] = any(skips)
        with self._lock:
            if grammar not in self._checked:
                self._checked_characters += grammar.size
            self._checked[grammar] = argument
            while len(self._checked) > _MAX_CHECKED or self._checked_characters > _MAX_CHECKED_CHARACTERS:
                self._checked_characters -= self._checked.popitem(last=False)[0].size
        return argument

    def _argument(self, grammar: Grammar) -> dict[str, Any]:
        """Return the guide's argument. A grammar that begins at a marker waits for that token and needs no masks
        before. Other texts may be spelled in many ways, so they become part of the grammar."""
        markers, after = self.markers, grammar.starts_after
        is_gated = not after or after in markers
        if is_gated:
            gate = markers[after] if after else None
            if not grammar.tags:
                return guide_argument(grammar.text, gate=gate)
            if all(trigger in markers for trigger, _ in grammar.tags):
                return guide_argument("", gate=gate, tags=[(markers[name], text) for name, text in grammar.tags])
            return guide_argument(from_triggers(Grammar("", "", grammar.tags), markers), gate=gate)
        return guide_argument(from_triggers(grammar, markers))

    def _compile(self, text: str, kind: str) -> bool:
        """Compile a grammar. Returns whether keywords of a schema were skipped. `kind`: what the caller calls it."""
        try:
            compiled = self.compiled.submit(text).result(COMPILE_SECONDS)
        except FutureTimeoutError as error:
            message = f"The grammar was not compiled within {COMPILE_SECONDS:g} s; make it simpler."
            raise _TooSlow(message, PARAMETER) from error
        except RequestError as error:
            kind = _SCHEMA if '"json_schema"' in text else kind
            raise RequestError(_explained(str(error), kind), PARAMETER) from error
        return bool(compiled.get_grammar_warnings())


def _explained(error: str, kind: str) -> str:
    within = error.partition(_SCHEMA_IN_LARK if kind != _REGEX else _REGEX_IN_LARK)[2]
    if (line := _LINE_OF_LARK.search(within)) is not None:  # the text of the grammar around it is not the caller's
        error, kind = within[: line.start()], kind if kind == _REGEX else _SCHEMA
    said = excerpt(error.strip().rstrip("."))
    if said.startswith("oneOf"):
        said = "oneOf is possible only where no value can match two of its schemas. Use anyOf"
    elif said.startswith(("Unimplemented keys", "Unknown format")):
        said += ". Remove it"
    elif not said.startswith("min/maxProperties"):
        return f"The {kind} cannot be used: {said}."
    return f"The JSON schema cannot be enforced: {said}, {_ADVICE}."


def jumps_are_exact(sampling: RowSampling) -> bool:
    """Whether forced tokens may be appended without sampling them: nothing else is asked about each token, and nothing
    else could forbid one."""
    extras = sampling.extras
    if sampling.logprobs is not None or sampling.banned_until:
        return False
    return extras is None or extras == Extras(
        extras.num_prompt_tokens,
        presence_penalty=extras.presence_penalty,
        frequency_penalty=extras.frequency_penalty,
        repetition_penalty=extras.repetition_penalty,
        logit_bias=extras.logit_bias,
    )


# ---------------------------------------------------------------- the model's vocabulary

_tokenizers: OrderedDict[tuple[str, int], LLTokenizer] = (
    OrderedDict()
)  # the last ones: an engine asks twice for its own
_MAX_TOKENIZERS = 4
_tokenizers_lock = threading.Lock()


def grammar_tokenizer(config: ModelConfig, tokenizer: Tokenizer | None = None) -> LLTokenizer:
    """The model's tokenizer for llguidance. Its vocabulary is the tokenizer's or the model's, whichever is larger."""
    key = (config.tokenizer, config.vocab_size)
    with _tokenizers_lock:
        if key not in _tokenizers:
            tokenizer = tokenizer or tokenizer_of(config)
            if tokenizer is None or not tokenizer.can_serialize:
                raise ModelError(f"{config.tokenizer} has no tokenizer.json, which structured outputs need.")
            ends = sorted(find_eos_token_ids(config, tokenizer))
            size = max(config.vocab_size, len(tokenizer))
            _tokenizers[key] = LLTokenizer(tokenizer.serialized(), size, ends or None, _SLICES)
            if len(_tokenizers) > _MAX_TOKENIZERS:
                _tokenizers.popitem(last=False)
        return _tokenizers[key]


def grammar_guides(config: EngineConfig) -> GrammarGuides | None:
    """Make the core's half; None if there is no tokenizer, or no text to hold to a grammar."""
    model = config.model
    if model.skip_tokenizer_init or model.poolers:
        return None
    return GrammarGuides(lambda: grammar_tokenizer(model), model.vocab_size, mask_threads(config))


def mask_threads(config: EngineConfig) -> int:
    """How many threads compute masks. On a GPU they hide behind the forward pass, so OMP_NUM_THREADS, which containers
    often set to 1, does not bound them; one CPU of eight is left to other work. On a CPU the model computes with the
    same CPUs, and that setting bounds both."""
    if config.device.device == "cpu":
        return usable_cpus()
    own = max(1, allowed_cpus() // config.parallel.data_parallel_size)
    return own - own // 8


def find_eos_token_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The model's end tokens: all that its generation config, its tokenizer and its GGUF file know."""
    found = config.generation.get("eos_token_id", config.hf.get("eos_token_id"))
    ids = set(found if isinstance(found, list | tuple) else [] if found is None else [found])
    if tokenizer is not None:
        ids |= tokenizer.end_token_ids
    if Path(config.path).is_file():
        ids |= end_token_ids(read_gguf(config.path))
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"The ids of the model's end tokens (eos_token_id) must be ints, not {found!r}.")
    return frozenset(token for token in ids if 0 <= token < config.vocab_size)
