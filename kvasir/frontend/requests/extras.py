"""Sampling settings beyond temperature, top-k and top-p, for one model: `Extras`, or None if a request has none.

API process. The engine's start-up logits processors become processors of each request: here, or in the core's process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from kvasir.config.engine import ModelConfig
from kvasir.errors import RequestError
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.messages import Extras
from kvasir.sampling.startup_processors import StartupProcessors, three_arguments
from kvasir.sampling_params import SamplingParams

_NOT_PARAMETERS = ("num_prompt_tokens", "num_virtual_tokens", "ema_key")  # fields of Extras that no parameter sets
_OTHER_NAMES = {"processors": "logits_processors"}  # field of Extras -> its parameter; others have the same name
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_PARAMETERS = [
    _OTHER_NAMES.get(field.name, field.name) for field in fields(Extras) if field.name not in _NOT_PARAMETERS
]
# Parameters that need Extras, with the values that do not.
UNSET: tuple[tuple[str, tuple[object, ...]], ...] = tuple((name, (_DEFAULTS[name], [], {})) for name in _PARAMETERS)


class ExtrasBuilder:
    """`remote`: the core is in another process, which has the start-up processors; callables cannot be sent to it."""

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer | None, num_workers: int = 1, remote: bool = False
    ) -> None:
        self.vocab_size = config.vocab_size
        self.num_workers = num_workers
        self.max_logprobs = config.max_logprobs
        self.tokenizer = tokenizer
        self.remote = remote
        self.has_startup = bool(config.logits_processors)
        self.startup = StartupProcessors(None if remote else config.logits_processors)

    def build(self, params: SamplingParams, key: int, num_prompt_tokens: int) -> Extras | None:
        """Extras of a request; None if its values have no effect."""
        asked = params.prompt_logprobs
        extras = Extras(
            num_prompt_tokens,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=self._bias(params),
            allowed_token_ids=self._ids("allowed_token_ids", params.allowed_token_ids),
            forbidden_token_ids=self._ids("forbidden_token_ids", params.forbidden_token_ids),
            bad_words=self._bad_words(params),
            top_ema_p=params.top_ema_p,
            top_ema_d=params.top_ema_d,
            processors=self._processors(params),
            extra_args=self._extra_args(params),
            logprob_token_ids=self._ids("logprob_token_ids", params.logprob_token_ids),
            prompt_logprobs=None if asked is None else self.count("prompt_logprobs", asked),
        )
        if extras == Extras(num_prompt_tokens):
            return None
        return replace(extras, ema_key=key) if extras.top_ema_p else extras  # Top-EMA alone keeps state by request

    def count(self, name: str, asked: int) -> int:
        """Number of log-probabilities; -1 means the whole vocabulary."""
        wanted = self.vocab_size if asked == -1 else min(asked, self.vocab_size)
        if self.max_logprobs != -1 and wanted > self.max_logprobs:
            means = f" means the whole vocabulary of {wanted} tokens, which" if asked == -1 else ""
            message = f"{name}={asked}{means} is more than the engine's max_logprobs={self.max_logprobs}."
            raise RequestError(message, name)
        return wanted

    def check_possible(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> None:
        """Check that at least one token can be sampled."""
        banned = {*(params.forbidden_token_ids or ()), *(stop_ids if params.min_tokens else ())}
        if params.allowed_token_ids is not None:
            banned |= {word[0] for word in self._bad_words(params) if len(word) == 1}
            if banned.issuperset(params.allowed_token_ids):
                others = "min_tokens, bad_words or forbidden_token_ids"
                raise RequestError(f"allowed_token_ids allows only tokens that {others} forbid.", "allowed_token_ids")
        elif len(banned) >= self.vocab_size:
            name = "forbidden_token_ids" if params.forbidden_token_ids else "min_tokens"
            raise RequestError(f"{name} forbids every token of the vocabulary.", name)

    # ------------------------------------------------------------ tokens

    def _ids(self, name: str, ids: Iterable[int] | None) -> tuple[int, ...]:
        found = tuple(dict.fromkeys(ids or ()))
        for token in found:
            if token >= self.vocab_size:
                message = f"{name} has {token}, but the model's vocabulary ends at {self.vocab_size - 1}."
                raise RequestError(message, name)
        return found

    def _bias(self, params: SamplingParams) -> tuple[tuple[int, float], ...]:
        bias = params.logit_bias or {}
        self._ids("logit_bias", bias)
        return tuple(bias.items())

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Tokens of each word at the beginning of a text and after a space, as in vLLM."""
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            message = "bad_words need a tokenizer, and skip_tokenizer_init=True loads none: use forbidden_token_ids."
            raise RequestError(message, "bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            alone, spaced = (
                tuple(self.tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
            )
            if alone:
                found[alone] = None
            if spaced and alone and spaced[0] != alone[0] and len(spaced) == len(alone):
                found[spaced] = None
        return tuple(found)

    # ------------------------------------------------------------ processors

    def _processors(self, params: SamplingParams) -> tuple[Any, ...]:
        own = params.logits_processors or []
        if own and self.remote:
            message = (
                "A request's logits processors are Python callables, and the engine runs in another process: name them "
                "when the engine starts, as logits_processors=['module:name'], and pass extra_args."
            )
            raise RequestError(message, "logits_processors")
        if (own or self.has_startup) and self.num_workers > 1:  # every worker would run its own copy
            message = f"Logits processors run in one process, but tensor_parallel_size={self.num_workers}."
            raise RequestError(message, "logits_processors")
        if self.remote:
            return ()
        return (*self.startup.for_request(params.extra_args or {}), *map(three_arguments, own))

    def _extra_args(self, params: SamplingParams) -> dict[str, Any] | None:
        asked = params.extra_args or {}
        return asked if self.remote and (asked or self.has_startup) else None
