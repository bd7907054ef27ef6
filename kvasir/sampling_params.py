"""SamplingParams and BeamSearchParams: the parameters of a request, with vLLM's names, order and defaults. Any process.

They check their values but know nothing of models and tokenizers. frontend/requests/input.py checks values that depend
on those, such as token ids and lengths.
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

# Fields of features that are not supported yet, with the values that turn the feature off. Other values are refused. To
# add a feature, delete its line here and read the field where it takes effect.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "truncate_prompt_tokens": (None,),
    "thinking_token_budget": (None,),
    "routed_experts_prompt_start": (None, 0),
    "trace_decode_token_ids": (None, []),
}

OLDER_NAMES: Mapping[str, str] = {"stop_strings": "stop"}

MAX_COMPLETIONS = 16384
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


@check.accepts_older_names(OLDER_NAMES)
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
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None  # token id -> value added to its logit, cut to [-100, 100]
    allowed_token_ids: list[int] | None = None  # only these can be sampled
    bad_words: list[str] | None = None  # texts that must not appear in the output
    extra_args: dict[str, Any] | None = None  # input of the logits processors in the settings
    skip_reading_prefix_cache: bool | None = None  # compute the whole prompt; prompt_logprobs does it too
    thinking_token_budget: int | None = None
    repetition_detection: Any = None  # RepetitionDetectionParams or a dict of its fields
    routed_experts_prompt_start: int | None = None
    trace_decode_token_ids: list[int] | None = None
    # Names of older vLLM versions and other engines; keyword-only, to keep the positional order above.
    best_of: int | None = field(default=None, kw_only=True)  # sample this many and return the n most likely
    guided_decoding: Any = field(default=None, kw_only=True)
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
            raise RequestError(f"{given} has no effect without {missing}; set both or neither.", given)
        if self.seed is not None:
            self.seed = check.whole("seed", self.seed, -(2**63), 2**64 - 1)

    def _verify_completions(self) -> None:
        self.n = check.whole("n", self.n, 1, MAX_COMPLETIONS)
        if self.best_of is not None:
            self.best_of = check.whole("best_of", self.best_of, 1, MAX_COMPLETIONS)
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
        check.flag("use_beam_search", self.use_beam_search)
        self.length_penalty = check.number("length_penalty", self.length_penalty, -check.LARGEST, check.LARGEST)
        self.num_beam_groups = check.whole("num_beam_groups", self.num_beam_groups, 1)
        self.diversity_penalty = check.number("diversity_penalty", self.diversity_penalty, 0, check.LARGEST)
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
            self.logit_bias = check.logit_bias(self.logit_bias)
        for name in ("allowed_token_ids", "forbidden_token_ids", "logprob_token_ids"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, check.token_ids(name, value))
        if self.allowed_token_ids == []:
            raise RequestError("allowed_token_ids is empty; it must have at least one token.", "allowed_token_ids")
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
        self.stop_token_ids = check.token_ids("stop_token_ids", ids)

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
    structured_outputs: Any = None
    early_stopping: bool | str = (
        False  # True ends at beam_width finished sequences; "never" ends when no better one is possible
    )
    num_beam_groups: int = 1  # diverse beam search: number of groups that the beams are divided into
    diversity_penalty: float = 0.0  # subtracted from scores of tokens that earlier groups selected

    def to_sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams, which check the values."""
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


def _check_supported(name: str, value: object, off_values: tuple[object, ...]) -> None:
    # Types are compared too, because True == 1 and False == 0 in Python.
    for ok in off_values:
        if value is ok or (isinstance(value, bool) == isinstance(ok, bool) and type(value) is not str and value == ok):
            return
    message = f"{name}={reprlib.repr(value)} is not supported yet; leave it at {off_values[0]!r}."
    raise RequestError(message, name)
