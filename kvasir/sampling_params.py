"""The parameters of a request: SamplingParams, StructuredOutputsParams and BeamSearchParams, with vLLM's names, order
and defaults. Any process.

They check their values but know nothing of models and tokenizers. frontend/requests/input.py checks values that depend
on those, such as token ids and lengths.
"""

from __future__ import annotations

import copy
import functools
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from typing import Any

from kvasir.errors import RequestError, did_you_mean
from kvasir.log import get_logger, warn_once

logger = get_logger(__name__)

# Fields of features that are not supported yet, with the values that turn the feature off. Other values are refused. To
# add a feature, delete its line here and read the field where it takes effect.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "truncate_prompt_tokens": (None,),
    "routed_experts_prompt_start": (None, 0),
    "trace_decode_token_ids": (None, []),
}

OLDER_NAMES: Mapping[str, str] = {"stop_strings": "stop", "guided_decoding": "structured_outputs"}

MAX_COMPLETIONS = 16384
WHITESPACE_STYLES = ("spaced", "compact", "flexible")  # of constrained JSON
_STRUCTURED = "structured_outputs"
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OF_WHITESPACE = ("whitespace", "disable_any_whitespace", "whitespace_pattern")
_OF_JSON = (*_OF_WHITESPACE, "disable_additional_properties", "lenient")
_LARGEST = sys.float_info.max
_MAX_DIGITS = 20  # of a token id in a string
_BIAS_LIMIT = 100.0  # larger biases are cut to it, as in vLLM; it forces or bans a token already
_SEARCH = ("use_beam_search", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
)


class RequestOutputKind(Enum):
    """Content of an output: everything so far, only new tokens, or only one output when the request has ended."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, frozen=True)
class GrammarTag:
    """A grammar that begins to hold where the model writes `trigger`, and until it is complete."""

    trigger: str  # a marker such as "<tool_call>"
    grammar: str  # Lark text with a rule `start`: what follows the trigger, an end marker included


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must look like: exactly one of the first six fields, or `tags`. See docs/structured_output.md."""

    json: Any = None  # a JSON schema: a dict, its text, or a pydantic model
    regex: str | None = None
    choice: list[str] | None = None  # the output is one of these texts
    grammar: str | None = None  # Lark, or EBNF as llama.cpp writes it (GBNF)
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict[str, Any] | None = None  # free text with parts that are held to a schema
    disable_any_whitespace: bool = False  # write JSON without spaces, which is whitespace="compact"
    disable_additional_properties: bool = False  # objects have only the properties that the schema names
    whitespace_pattern: str | None = None  # a regular expression of the space between the tokens of JSON
    # Not in vLLM.
    whitespace: str | None = None  # of JSON: "spaced", "compact" or "flexible"; None uses the engine's setting
    lenient: bool | None = None  # skip keywords of a schema that cannot be enforced; None uses the engine's setting
    # Set by the server, not by callers.
    tags: tuple[GrammarTag, ...] = ()  # the output is free text but for what follows these triggers
    starts_after: str = ""  # the output is free up to this text, such as "</think>"; empty: constrained from the start
    source: str = "structured_outputs"  # the caller's name for all this, for errors
    # What it was made of, by name, to find an error in.
    parts: tuple[tuple[str, StructuredOutputsParams], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Raise a RequestError unless the fields are of the right types and name one constraint."""
        if hasattr(self.json, "model_json_schema"):  # a pydantic model
            self.json = self.json.model_json_schema()
        kinds: dict[str, tuple[Any, str]] = {
            "json": (str | dict | bool, "a JSON schema as a dict or as text"),
            "regex": (str, "a string"),
            "choice": (list | tuple, "a list of strings"),
            "grammar": (str, "a string"),
            "structural_tag": (str | dict, "a dict or text"),
            "whitespace_pattern": (str, "a string"),
            "starts_after": (str, "a string"),
            "tags": (list | tuple, "a list"),
        }
        for name, (kind, words) in kinds.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                message = f"structured_outputs.{name} must be {words}, not {reprlib.repr(value)}."
                raise RequestError(message, _STRUCTURED)
        if self.json is False:
            raise RequestError("structured_outputs.json is the schema false, which no value fits.", _STRUCTURED)
        for name in ("json_object", "lenient"):
            if getattr(self, name) is not None:
                check_flag(f"structured_outputs.{name}", getattr(self, name))
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_flag(f"structured_outputs.{name}", getattr(self, name))
        if self.whitespace not in (None, *WHITESPACE_STYLES):
            styles = ", ".join(WHITESPACE_STYLES)
            message = f"structured_outputs.whitespace must be one of {styles}, not {reprlib.repr(self.whitespace)}."
            raise RequestError(message, _STRUCTURED)
        if self.choice is not None:
            self.choice = list(self.choice)
            if not self.choice or not all(isinstance(text, str) for text in self.choice):
                given = reprlib.repr(self.choice)
                raise RequestError(f"structured_outputs.choice must be a list of strings, not {given}.", _STRUCTURED)
        self.tags = tuple(self.tags)
        if len(self.constraints) != 1:
            given = f"{' and '.join(self.constraints)} were" if self.constraints else "none was"
            known = "json, regex, choice, grammar, json_object, structural_tag"
            message = f"structured_outputs needs exactly one of {known}, but {given} given."
            raise RequestError(message, _STRUCTURED)
        self._verify_style()

    def _verify_style(self) -> None:
        """Refuse options about JSON that would be ignored: beside a constraint that is not JSON, or beside another."""
        asked = [name for name in _OF_JSON if getattr(self, name) not in (None, False)]
        (kind,) = self.constraints
        if asked and kind in ("regex", "choice", "grammar"):
            message = f"structured_outputs.{asked[0]} is for JSON, but the output is held to a {kind}; leave it out."
            raise RequestError(message, _STRUCTURED)
        spaces = [name for name in asked if name in _OF_WHITESPACE]
        if len(spaces) > 1 and not (self.whitespace == "compact" and self.whitespace_pattern is None):
            names = " and ".join(f"structured_outputs.{name}" for name in spaces)
            raise RequestError(f"{names} both say how JSON is spaced; give one of them.", _STRUCTURED)

    @property
    def constraints(self) -> list[str]:
        """The names of the constraints that are set."""
        named = [name for name in _CONSTRAINTS if getattr(self, name) is not None and getattr(self, name) is not False]
        return [*named, "tags"] if self.tags else named


GuidedDecodingParams = StructuredOutputsParams  # the name in older versions of vLLM


@dataclass(slots=True, frozen=True)
class ReasoningTokens:
    """The tokens with which a model marks its reasoning. The server finds them by the model's format."""

    opening: int
    closing: int
    begun: bool = False  # the prompt has opened the reasoning


@dataclass(slots=True, repr=False)
class SamplingParams:
    """Sampling parameters of one request: `SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)`."""

    n: int = 1  # number of completions
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # the same, multiplied by their number in the output
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output, multiplies negative ones
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the smallest set of tokens with this total probability
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 keeps all
    min_p: float = 0.0  # minimum probability, as a fraction of that of the most likely token
    seed: int | None = None  # None derives a different one for each request from the engine's seed
    stop: str | list[str] | None = None  # stop strings; always a list after construction
    stop_token_ids: list[int] | None = None  # tokens that end the request, besides the model's end tokens
    ignore_eos: bool = False  # the model's end tokens do not end the request
    max_tokens: int | None = 16  # None allows as many as max_model_len does
    min_tokens: int = 0  # no end token or stop string ends the request before
    logprobs: int | None = None  # of the sampled token and this many most likely ones; -1 is all
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    logprob_token_ids: list[int] | None = None  # for these tokens instead of the most likely ones
    flat_logprobs: bool = False  # return FlatLogprobs instead of lists of dicts
    detokenize: bool = True  # False returns token ids without text
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # tokens between two outputs; None uses the engine's setting
    structured_outputs: StructuredOutputsParams | None = None  # what the output must look like; may be a dict
    logit_bias: dict[int, float] | None = None  # token id -> value added to its logit, cut to [-100, 100]
    allowed_token_ids: list[int] | None = None  # only these can be sampled
    bad_words: list[str] | None = None  # texts that must not appear in the output
    extra_args: dict[str, Any] | None = None  # input of the logits processors in the settings
    skip_reading_prefix_cache: bool | None = None  # compute the whole prompt; prompt_logprobs does it too
    thinking_token_budget: int | None = None  # most tokens of reasoning; then the marker that ends it is forced
    repetition_detection: Any = None  # RepetitionDetectionParams or a dict of its fields
    routed_experts_prompt_start: int | None = None
    trace_decode_token_ids: list[int] | None = None
    # Names of older vLLM versions and other engines; keyword-only, to keep the positional order above.
    best_of: int | None = field(default=None, kw_only=True)  # sample this many and return the n most likely
    forbidden_token_ids: list[int] | None = field(default=None, kw_only=True)  # cannot be sampled
    # callables (output ids, logits) or (prompt ids, output ids, logits), each returning logits
    logits_processors: list[Any] | None = field(default=None, kw_only=True)
    top_ema_p: float = field(default=0.0, kw_only=True)  # Top-EMA, see docs/sampling.md; 0 turns it off
    top_ema_d: int = field(default=0, kw_only=True)
    use_beam_search: bool = field(default=False, kw_only=True)  # search with best_of (or n) beams instead of sampling
    length_penalty: float = field(default=1.0, kw_only=True)  # for this and the next three see BeamSearchParams
    early_stopping: bool | str = field(default=False, kw_only=True)
    num_beam_groups: int = field(default=1, kw_only=True)
    diversity_penalty: float = field(default=0.0, kw_only=True)
    truncate_prompt_tokens: int | None = field(default=None, kw_only=True)
    # special tokens that stay in the text under skip_special_tokens, such as markers of tool calls
    keep_special_tokens: list[str] | None = field(default=None, kw_only=True)
    reasoning_tokens: ReasoningTokens | None = field(default=None, kw_only=True)  # for thinking_token_budget

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Convert every field to a plain type and raise a RequestError for the first wrong one.

        The constructor calls it, and InputProcessor calls it again, because fields may be assigned in between.
        """
        for name, off_values in UNSUPPORTED.items():
            if (value := getattr(self, name)) is not _DEFAULTS[name]:
                _check_supported(name, value, off_values)
        self._verify_distribution()
        self._verify_completions()
        self._verify_lengths()
        self._verify_stops()
        self._verify_tokens()
        self._verify_outputs()
        if self.structured_outputs is not None:
            self._verify_structure()
        self.repetition_detection = _repetition_detection(self.repetition_detection)

    def _verify_distribution(self) -> None:
        self.presence_penalty = check_number("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = check_number("repetition_penalty", self.repetition_penalty, 0, _LARGEST, above=True)
        self.temperature = check_number("temperature", self.temperature, 0.0, _LARGEST)
        self.top_p = check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        self.min_p = check_number("min_p", self.min_p, 0.0, 1.0)
        self.top_k = check_whole("top_k", self.top_k, -1)
        self.top_ema_p = check_number("top_ema_p", self.top_ema_p, 0.0, 1.0)
        self.top_ema_d = check_whole("top_ema_d", self.top_ema_d, 0)
        if bool(self.top_ema_p) != bool(self.top_ema_d):  # each is off without the other
            given, missing = ("top_ema_p", "top_ema_d") if self.top_ema_p else ("top_ema_d", "top_ema_p")
            raise RequestError(f"{given} has no effect without {missing}; set both or neither.", given)
        if self.seed is not None:
            self.seed = check_whole("seed", self.seed, -(2**63), 2**64 - 1)

    def _verify_completions(self) -> None:
        self.n = check_whole("n", self.n, 1, MAX_COMPLETIONS)
        if self.best_of is not None:
            self.best_of = check_whole("best_of", self.best_of, 1, MAX_COMPLETIONS)
            if self.best_of < self.n:
                message = f"best_of={self.best_of} is less than n={self.n}; it must be at least n."
                raise RequestError(message, "best_of")
        self._verify_search()
        if self.num_branches > 1 and self.temperature == 0 and not self.use_beam_search:
            name = "n" if self.n > 1 else "best_of"
            why = "all completions would be the same; set a temperature above 0"
            raise RequestError(f"{name} must be 1 with temperature=0: {why}.", name)

    def _verify_search(self) -> None:
        if all(getattr(self, name) is _DEFAULTS[name] for name in _SEARCH):
            return
        check_flag("use_beam_search", self.use_beam_search)
        self.length_penalty = check_number("length_penalty", self.length_penalty, -_LARGEST, _LARGEST)
        self.num_beam_groups = check_whole("num_beam_groups", self.num_beam_groups, 1)
        self.diversity_penalty = check_number("diversity_penalty", self.diversity_penalty, 0, _LARGEST)
        if self.early_stopping not in (True, False, "never"):
            message = f"early_stopping must be True, False or 'never', not {self.early_stopping!r}."
            raise RequestError(message, "early_stopping")
        for name in _SEARCH[1:]:
            if not self.use_beam_search and getattr(self, name) != _DEFAULTS[name]:
                raise RequestError(f"{name} is for beam search; set use_beam_search=True or leave it out.", name)

    @property
    def num_branches(self) -> int:
        """Number of completions that are generated."""
        return self.best_of or self.n

    def _verify_tokens(self) -> None:
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)
        for name in ("allowed_token_ids", "forbidden_token_ids", "logprob_token_ids"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, check_token_ids(name, value))
        if self.allowed_token_ids == []:
            raise RequestError("allowed_token_ids is empty; it must have at least one token.", "allowed_token_ids")
        if self.bad_words is not None:
            self.bad_words = _texts("bad_words", self.bad_words)
        if self.logits_processors is not None:
            self.logits_processors = _callables("logits_processors", self.logits_processors)
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise RequestError(f"extra_args must be a dict, not {self.extra_args!r}.", "extra_args")

    def _verify_outputs(self) -> None:
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            check_flag("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}.", "output_kind")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, check_whole(name, value, -1))
        if self.stream_interval is not None:
            self.stream_interval = check_whole("stream_interval", self.stream_interval, 1)
        kept = self.keep_special_tokens
        if kept is not None and not (isinstance(kept, list | tuple) and all(isinstance(each, str) for each in kept)):
            message = f"keep_special_tokens must be a list of strings, not {reprlib.repr(kept)}."
            raise RequestError(message, "keep_special_tokens")
        self._verify_budget()

    def _verify_budget(self) -> None:
        if self.thinking_token_budget is None:
            return
        self.thinking_token_budget = check_whole("thinking_token_budget", self.thinking_token_budget, 0)
        if self.reasoning_tokens is None:
            message = (
                "thinking_token_budget needs reasoning_tokens, the tokens around the model's reasoning. The server "
                "sets them for models whose format it knows: this one's has no reasoning that one token ends."
            )
            raise RequestError(message, "thinking_token_budget")

    def _verify_structure(self) -> None:
        self.structured_outputs = _structured_outputs(self.structured_outputs)
        if self.use_beam_search:
            name = self.structured_outputs.source
            raise RequestError(f"{name} cannot be used with beam search; sample with n or best_of instead.", name)

    def _verify_lengths(self) -> None:
        self.min_tokens = check_whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is None:
            return
        self.max_tokens = check_whole("max_tokens", self.max_tokens, 1)
        if self.min_tokens > self.max_tokens:
            message = f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; change one of them."
            raise RequestError(message, "min_tokens")

    def _verify_stops(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if not isinstance(self.stop, list | tuple) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop must be a string or a list of strings, not {reprlib.repr(self.stop)}.", "stop")
        if "" in self.stop:
            raise RequestError("stop contains an empty string, which would match everywhere; remove it.", "stop")
        self.stop = list(self.stop)
        if self.stop and self.detokenize is False:
            raise RequestError("stop needs text; set detokenize=True or use stop_token_ids.", "stop")
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.stop_token_ids = check_token_ids("stop_token_ids", ids)

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this one."""
        other = copy.copy(self)
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), list | dict):
                setattr(other, f.name, copy.copy(value))
        return other

    def __repr__(self) -> str:
        """Shows only values that differ from the defaults."""
        values = ((f.name, f.default, getattr(self, f.name)) for f in fields(self))
        shown = (f"{name}={value!r}" for name, default, value in values if value not in (default, []))
        return f"SamplingParams({', '.join(shown)})"


_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=64))`."""

    beam_width: int  # number of beams, and of sequences returned
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # 0 and 1 both use the model's own log-probabilities
    length_penalty: float = 1.0  # sequences are ranked by log-probability / length ** length_penalty
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None  # refused: beams cannot be constrained
    early_stopping: bool | str = (
        False  # True ends at beam_width finished sequences; "never" ends when no better one is possible
    )
    num_beam_groups: int = 1  # diverse beam search: number of groups that the beams are divided into
    diversity_penalty: float = 0.0  # subtracted from scores of tokens that earlier groups selected

    def to_sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams, which check the values."""
        check_whole("beam_width", self.beam_width, 1)
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            structured_outputs=self.structured_outputs,
            early_stopping=self.early_stopping,
            num_beam_groups=self.num_beam_groups,
            diversity_penalty=self.diversity_penalty,
        )


@dataclass(slots=True)
class RepetitionDetectionParams:
    """End a request once its output ends with min_count repetitions of a pattern of min_pattern_size to
    max_pattern_size tokens."""

    max_pattern_size: int = 0  # 0: off
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        name = "repetition_detection"
        self.max_pattern_size = check_whole(f"{name}.max_pattern_size", self.max_pattern_size, 0)
        self.min_pattern_size = max(1, check_whole(f"{name}.min_pattern_size", self.min_pattern_size, 0))
        self.min_count = check_whole(f"{name}.min_count", self.min_count, 2)
        if self.max_pattern_size and self.min_pattern_size > self.max_pattern_size:
            raise RequestError(f"{name}: min_pattern_size must not be more than max_pattern_size.", name)


# ---------------------------------------------------------------- checks
# Each returns the value in a plain type or raises a RequestError with the parameter's name.


def _check_supported(name: str, value: object, off_values: tuple[object, ...]) -> None:
    # Types are compared too, because True == 1 and False == 0 in Python.
    for ok in off_values:
        if value is ok or (isinstance(value, bool) == isinstance(ok, bool) and type(value) is not str and value == ok):
            return
    message = f"{name}={reprlib.repr(value)} is not supported yet; leave it at {off_values[0]!r}."
    raise RequestError(message, name)


def _structured_outputs(value: object) -> StructuredOutputsParams:
    """Check structured_outputs, which may be given as a dict."""
    if isinstance(value, Mapping):
        known = [f.name for f in fields(StructuredOutputsParams)]
        for key in value.keys() - set(known):
            raise RequestError(f"{_STRUCTURED} has no {key!r}.{did_you_mean(key, known)}", _STRUCTURED)
        return StructuredOutputsParams(**value)
    if not isinstance(value, StructuredOutputsParams):
        message = f"{_STRUCTURED} must be StructuredOutputsParams or a dict, not {reprlib.repr(value)}."
        raise RequestError(message, _STRUCTURED)
    value.verify()
    return value


def _repetition_detection(value: object) -> RepetitionDetectionParams | None:
    """Check repetition_detection, which may be given as a dict."""
    name = "repetition_detection"
    if isinstance(value, Mapping):
        known = [f.name for f in fields(RepetitionDetectionParams)]
        for key in value.keys() - set(known):
            raise RequestError(f"{name} has no {key!r}.{did_you_mean(key, known)}", name)
        try:
            return RepetitionDetectionParams(**value)
        except RequestError as error:
            raise RequestError(str(error), name) from error
    if value is None or isinstance(value, RepetitionDetectionParams):
        return value
    raise RequestError(f"{name} must be RepetitionDetectionParams or a dict, not {reprlib.repr(value)}.", name)


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """Check for a float within [low, high], or (low, high] if `above`. NaN is always refused."""
    # the exact type first: the check for an abstract one takes longer than all the rest
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise RequestError(f"{name} must be a number, not {reprlib.repr(value)}.", name)
    found = float(value)
    if not low <= found <= high or (above and found == low):
        where = f"{'above' if above else 'at least'} {low:g}"
        where += " and finite" if high == _LARGEST else f" and at most {high:g}"
        raise RequestError(f"{name} must be {where}, not {found:g}.", name)
    return found


def check_whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """Check for an int within [low, high]."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise RequestError(f"{name} must be an integer, not {reprlib.repr(value)}.", name)
    found = int(value)
    if found < low or (high is not None and found > high):
        where = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {where}, not {reprlib.repr(found)}.", name)
    return found


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {value!r}.", name)
    return value


def check_token_ids(name: str, value: object) -> list[int]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise RequestError(f"{name} must be a list of token ids, not {value!r}.", name)
    return [check_whole(name, token, 0) for token in value]


def _texts(name: str, value: object) -> list[str]:
    """Check for a list of strings that are not blank."""
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise RequestError(f"{name} must be a list of strings, not {reprlib.repr(value)}.", name)
    if not all(text.strip() for text in value):
        raise RequestError(f"{name} contains an empty string; remove it.", name)
    return list(value)


def _logit_bias(value: object) -> dict[int, float]:
    """Check logit_bias. Token ids may be strings, because JSON has no other keys."""
    name = "logit_bias"
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be a dict of token ids and numbers, not {reprlib.repr(value)}.", name)
    found = {}
    for token, bias in value.items():
        is_number = isinstance(token, str) and len(token) <= _MAX_DIGITS and token.isdecimal()
        key = int(token) if is_number else token
        if isinstance(key, bool) or not isinstance(key, Integral) or key < 0:
            raise RequestError(f"{name} must have token ids as keys, not {reprlib.repr(token)}.", name)
        limited = check_number(name, bias, -_LARGEST, _LARGEST)
        found[int(key)] = min(_BIAS_LIMIT, max(-_BIAS_LIMIT, limited))
    return found


def _callables(name: str, value: object) -> list[Any]:
    if not isinstance(value, list | tuple) or not all(callable(each) for each in value):
        raise RequestError(f"{name} must be a list of callables, not {reprlib.repr(value)}.", name)
    return list(value)


def _accept_older_names(older: Mapping[str, str]) -> None:
    """Let SamplingParams(...) accept older names, with a warning, and suggest names for unknown ones."""
    plain_init: Callable[..., None] = SamplingParams.__init__
    known = [f.name for f in fields(SamplingParams)]

    @functools.wraps(plain_init)
    def init(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - set(known):
            newer = older.get(name)
            if newer is None:
                raise _unknown(name, known, older)
            if newer in kwargs:
                raise RequestError(f"{name} and {newer} were both given. Remove {name}, the older name.", newer)
            warn_once(logger, f"SamplingParams({name}=...) is deprecated; use {newer}.")
            kwargs[newer] = kwargs.pop(name)
        if len(args) > len(known):
            raise RequestError(f"SamplingParams takes at most {len(known)} values, but {len(args)} were given.")
        plain_init(self, *args, **kwargs)

    SamplingParams.__init__ = init  # type: ignore[method-assign]


def _unknown(name: str, known: Sequence[str], older: Mapping[str, str]) -> RequestError:
    hint = did_you_mean(name, [*known, *older]) or f" Known are: {', '.join(known)}."
    return RequestError(f"SamplingParams has no parameter {name!r}.{hint}", name)


_accept_older_names(OLDER_NAMES)
