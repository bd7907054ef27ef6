"""What a caller asks of one request: `SamplingParams`, with vLLM's names, order and defaults.

Plain data with complete validation; knows nothing of models, tokenizers or devices. What depends on those
(vocabulary size, context length, the model's end tokens) is checked in frontend/input.py.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from kvasir.config import checks as check
from kvasir.errors import RequestError

# Fields that exist by name only, with the values that ask for nothing. Any other value is refused by name until the
# feature is there; turning one on means deleting its line here and reading the field where it takes effect.
NOT_YET: Mapping[str, tuple[object, ...]] = {
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "truncate_prompt_tokens": (None,),
    "thinking_token_budget": (None,),
    "routed_experts_prompt_start": (None, 0),
    "trace_decode_token_ids": (None, []),
}

OLDER_NAMES: Mapping[str, str] = {"stop_strings": "stop"}

MOST_BRANCHES = 16384
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
    """What a step's output holds: all so far, only what is new, or nothing until the request has ended."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@check.accepts_older_names(OLDER_NAMES)
@dataclass(slots=True, repr=False)
class SamplingParams:
    """How to sample one request. `SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)`."""

    n: int = 1  # completions of the prompt
    presence_penalty: float = 0.0  # taken off the logits of tokens that were generated already
    frequency_penalty: float = 0.0  # the same, times how often they were generated
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output, multiplies negative ones
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # keep the smallest set of tokens with this much probability; 1: all
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1: all
    min_p: float = 0.0  # keep tokens at least this likely, as a share of the likeliest one's probability
    seed: int | None = None  # None: derived from the engine's seed, different for each request
    stop: str | list[str] | None = None  # text that ends the request; a list after construction
    stop_token_ids: list[int] | None = None  # tokens that end the request, besides the model's own
    ignore_eos: bool = False  # the model's own end tokens do not end the request
    max_tokens: int | None = 16  # None: as many as fit the model
    min_tokens: int = 0  # nothing but max_tokens ends the request before so many tokens
    logprobs: int | None = None  # log-probabilities of the sampled token and of so many likeliest ones; -1: of all
    prompt_logprobs: int | None = None  # the same for every token of the prompt but the first
    logprob_token_ids: list[int] | None = None  # log-probabilities of these tokens, in place of the likeliest
    flat_logprobs: bool = False  # as one FlatLogprobs in place of a list of dicts
    detokenize: bool = True  # False: token ids only, no text
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # tokens between two outputs; None: the engine's setting
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None  # added to these tokens' logits, cut to [-100, 100]
    allowed_token_ids: list[int] | None = None  # no other can be sampled
    bad_words: list[str] | None = None  # texts that cannot be completed
    extra_args: dict[str, Any] | None = None  # for the engine's start-up logits processors
    skip_reading_prefix_cache: bool | None = None  # compute the whole prompt; implied by prompt_logprobs
    thinking_token_budget: int | None = None
    repetition_detection: Any = None  # RepetitionDetectionParams or a dict of its fields
    routed_experts_prompt_start: int | None = None
    trace_decode_token_ids: list[int] | None = None
    # Names of older vLLM versions and of other engines, kept apart from the positional order above.
    best_of: int | None = field(default=None, kw_only=True)  # sample so many, return the n likeliest
    guided_decoding: Any = field(default=None, kw_only=True)
    forbidden_token_ids: list[int] | None = field(default=None, kw_only=True)  # cannot be sampled
    # callables (output ids, logits) or (prompt ids, output ids, logits), each returning logits
    logits_processors: list[Any] | None = field(default=None, kw_only=True)
    top_ema_p: float = field(default=0.0, kw_only=True)  # Top-EMA, see docs/sampling.md; 0: off
    top_ema_d: int = field(default=0, kw_only=True)
    use_beam_search: bool = field(default=False, kw_only=True)  # search best_of (or n) beams in place of sampling
    length_penalty: float = field(default=1.0, kw_only=True)  # these four: see BeamSearchParams
    early_stopping: bool | str = field(default=False, kw_only=True)
    num_beam_groups: int = field(default=1, kw_only=True)
    diversity_penalty: float = field(default=0.0, kw_only=True)
    truncate_prompt_tokens: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Bring every field to its plain type and raise RequestError for the first that is wrong.

        Called by the constructor, and again when a request is made of the parameters, as fields may be assigned.
        """
        for name, harmless in NOT_YET.items():
            if (value := getattr(self, name)) is not _DEFAULTS[name]:
                _refuse_unless(name, value, harmless)
        self._verify_distribution()
        self._verify_branches()
        self._verify_lengths()
        self._verify_stops()
        self._verify_tokens()
        self._verify_outputs()
        self.repetition_detection = check.repetition_detection(self.repetition_detection)

    def _verify_distribution(self) -> None:
        self.presence_penalty = check.number("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = check.number("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = check.number(
            "repetition_penalty", self.repetition_penalty, 0, check.LARGEST, above=True
        )
        self.temperature = check.number("temperature", self.temperature, 0.0, check.LARGEST)
        self.top_p = check.number("top_p", self.top_p, 0.0, 1.0, above=True)
        self.min_p = check.number("min_p", self.min_p, 0.0, 1.0)
        self.top_k = check.whole("top_k", self.top_k, -1)
        self.top_ema_p = check.number("top_ema_p", self.top_ema_p, 0.0, 1.0)
        self.top_ema_d = check.whole("top_ema_d", self.top_ema_d, 0)
        if bool(self.top_ema_p) != bool(self.top_ema_d):  # each is off without the other
            given, missing = ("top_ema_p", "top_ema_d") if self.top_ema_p else ("top_ema_d", "top_ema_p")
            raise RequestError(f"{given} does nothing without {missing}: set both, or neither.", given)
        if self.seed is not None:
            self.seed = check.whole("seed", self.seed, -(2**63), 2**64 - 1)

    def _verify_branches(self) -> None:
        self.n = check.whole("n", self.n, 1, MOST_BRANCHES)
        if self.best_of is not None:
            self.best_of = check.whole("best_of", self.best_of, 1, MOST_BRANCHES)
            if self.best_of < self.n:
                message = f"best_of={self.best_of} is less than n={self.n}: so many must be generated to return n."
                raise RequestError(message, "best_of")
        self._verify_search()
        if self.num_branches > 1 and self.temperature == 0 and not self.use_beam_search:
            name = "n" if self.n > 1 else "best_of"
            why = "all completions would be the same; set a temperature above 0"
            raise RequestError(f"{name} must be 1 with temperature=0: {why}.", name)

    def _verify_search(self) -> None:
        if all(getattr(self, name) is _DEFAULTS[name] for name in _SEARCH):
            return
        check.flag("use_beam_search", self.use_beam_search)
        self.length_penalty = check.number("length_penalty", self.length_penalty, -check.LARGEST, check.LARGEST)
        self.num_beam_groups = check.whole("num_beam_groups", self.num_beam_groups, 1)
        self.diversity_penalty = check.number("diversity_penalty", self.diversity_penalty, 0, check.LARGEST)
        if self.early_stopping not in (True, False, "never"):
            message = f"early_stopping must be True, False or 'never', not {self.early_stopping!r}."
            raise RequestError(message, "early_stopping")
        for name in _SEARCH[1:]:
            if not self.use_beam_search and getattr(self, name) != _DEFAULTS[name]:
                raise RequestError(f"{name} is for beam search: set use_beam_search=True or leave it out.", name)

    @property
    def num_branches(self) -> int:
        """How many completions are sampled, or searched."""
        return self.best_of or self.n

    def _verify_tokens(self) -> None:
        """What singles out tokens."""
        if self.logit_bias is not None:
            self.logit_bias = check.logit_bias(self.logit_bias)
        for name in ("allowed_token_ids", "forbidden_token_ids", "logprob_token_ids"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, check.token_ids(name, value))
        if self.allowed_token_ids == []:
            raise RequestError("allowed_token_ids is empty, which allows no token.", "allowed_token_ids")
        if self.bad_words is not None:
            self.bad_words = check.texts("bad_words", self.bad_words)
        if self.logits_processors is not None:
            self.logits_processors = check.callables("logits_processors", self.logits_processors)
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise RequestError(f"extra_args must be a dict, not {self.extra_args!r}.", "extra_args")

    def _verify_outputs(self) -> None:
        for name in _FLAGS:
            check.flag(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            check.flag("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}.", "output_kind")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, check.whole(name, value, -1))
        if self.stream_interval is not None:
            self.stream_interval = check.whole("stream_interval", self.stream_interval, 1)

    def _verify_lengths(self) -> None:
        self.min_tokens = check.whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is None:
            return
        self.max_tokens = check.whole("max_tokens", self.max_tokens, 1)
        if self.min_tokens > self.max_tokens:
            message = f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: change one of them."
            raise RequestError(message, "min_tokens")

    def _verify_stops(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if not isinstance(self.stop, list | tuple) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop must be a string or a list of strings, not {reprlib.repr(self.stop)}.", "stop")
        if "" in self.stop:
            raise RequestError("stop has an empty string in it, which would match everywhere; remove it.", "stop")
        self.stop = list(self.stop)
        if self.stop and self.detokenize is False:
            raise RequestError("stop strings are found in text: set detokenize=True or use stop_token_ids.", "stop")
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.stop_token_ids = check.token_ids("stop_token_ids", ids)

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this one."""
        other = copy.copy(self)
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), list | dict):
                setattr(other, f.name, copy.copy(value))
        return other

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        values = ((f.name, f.default, getattr(self, f.name)) for f in fields(self))
        shown = (f"{name}={value!r}" for name, default, value in values if value not in (default, []))
        return f"SamplingParams({', '.join(shown)})"


_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}


@dataclass(slots=True)
class BeamSearchParams:
    """`LLM.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=64))`."""

    beam_width: int  # beams, and texts that come back
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # 0 or 1: log-probabilities are the model's own
    length_penalty: float = 1.0  # a text is ranked by log-probability / length ** length_penalty
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    early_stopping: bool | str = False  # True: end with beam_width texts; "never": only when none can become better
    num_beam_groups: int = 1  # diverse beam search: beams are dealt to so many groups ...
    diversity_penalty: float = 0.0  # ... and a group pays this for a token that beams of earlier groups take

    def to_sampling_params(self) -> SamplingParams:
        """The same as SamplingParams, which check it."""
        check.whole("beam_width", self.beam_width, 1)
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


def _refuse_unless(name: str, value: object, harmless: tuple[object, ...]) -> None:
    # `type` apart, because True == 1 and False == 0 in Python.
    for ok in harmless:
        if value is ok or (isinstance(value, bool) == isinstance(ok, bool) and type(value) is not str and value == ok):
            return
    message = f"{name}={reprlib.repr(value)} is not supported yet; leave it at {harmless[0]!r}."
    raise RequestError(message, name)
