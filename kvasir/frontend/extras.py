"""What a request asks of sampling beyond temperature and its kin, for one model: `Extras`, or None. API process.

Loads the engine's start-up logits processors, too: for each request they become some of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

from kvasir.config import ModelConfig
from kvasir.errors import ConfigError, RequestError
from kvasir.frontend.tokenizer import Tokenizer
from kvasir.messages import Extras
from kvasir.sampling_params import SamplingParams

# Fields that make Extras, with the values that ask for nothing; found without making any.
_UNSET: tuple[tuple[str, tuple[object, ...]], ...] = (
    *((name, (0,)) for name in ("presence_penalty", "frequency_penalty", "top_ema_p")),
    ("repetition_penalty", (1,)),
    *((name, (None, [])) for name in ("allowed_token_ids", "forbidden_token_ids", "bad_words", "logprob_token_ids")),
    *((name, (None, [], {})) for name in ("logits_processors", "logit_bias", "extra_args")),
    ("prompt_logprobs", (None,)),
)


class ExtrasBuilder:
    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, num_workers: int = 1) -> None:
        self.vocab_size = config.vocab_size
        self.num_workers = num_workers
        self.max_logprobs = config.max_logprobs
        self.tokenizer = tokenizer
        self.plugins = [_load(entry) for entry in config.logits_processors or []]

    def build(self, params: SamplingParams, key: int, num_prompt_tokens: int) -> Extras | None:
        """None for the many that ask for nothing of the kind."""
        if not self.plugins and all(getattr(params, name) in unset for name, unset in _UNSET):
            return None
        extras = Extras(
            num_prompt_tokens,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=self._bias(params),
            allowed_token_ids=self._ids("allowed_token_ids", params.allowed_token_ids),
            forbidden_token_ids=self._ids("forbidden_token_ids", params.forbidden_token_ids),
            bad_words=self._bad_words(params),
            top_ema_p=params.top_ema_p if params.top_ema_d else 0.0,
            top_ema_d=params.top_ema_d if params.top_ema_p else 0,
            processors=self._processors(params),
            logprob_token_ids=self._ids("logprob_token_ids", params.logprob_token_ids),
            prompt_logprobs=self.count("prompt_logprobs", params.prompt_logprobs),
        )
        if extras == Extras(num_prompt_tokens):
            return None
        return replace(extras, ema_key=key) if extras.top_ema_p else extras  # only there does a row's identity matter

    def count(self, name: str, asked: int | None) -> int | None:
        """How many log-probabilities: -1 means the whole vocabulary."""
        if asked is None:
            return None
        wanted = self.vocab_size if asked == -1 else min(asked, self.vocab_size)
        if self.max_logprobs != -1 and wanted > self.max_logprobs:
            message = f"{name}={asked} is more than the engine's max_logprobs={self.max_logprobs}."
            raise RequestError(message, name)
        return wanted

    def check_possible(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> None:
        """Something must be left to sample."""
        banned = {*(params.forbidden_token_ids or ()), *(stop_ids if params.min_tokens else ())}
        if params.allowed_token_ids is not None:
            if banned.issuperset(params.allowed_token_ids):
                message = "allowed_token_ids allows only tokens that min_tokens or forbidden_token_ids forbid."
                raise RequestError(message, "allowed_token_ids")
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
        """Each word as it is tokenized at the beginning of a text and after a space, as vLLM does it."""
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
        asked = params.extra_args or {}
        if asked and not any(hasattr(plugin, "for_request") for plugin in self.plugins):
            message = "extra_args are for start-up logits processors with a for_request method; this engine has none."
            raise RequestError(message, "extra_args")
        found = [plugin.for_request(asked) if hasattr(plugin, "for_request") else plugin for plugin in self.plugins]
        wanted = [each for each in [*found, *(params.logits_processors or ())] if each is not None]
        if wanted and self.num_workers > 1:  # each would run its own copy, on what it alone has seen
            message = f"Logits processors run in one process, but tensor_parallel_size={self.num_workers}."
            raise RequestError(message, "logits_processors")
        return tuple(_three_arguments(each) for each in wanted)


def _load(entry: Any) -> Any:
    """A start-up processor: "module:name", or the thing itself; of a class, one instance."""
    found = entry
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        try:
            found = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            message = f"logits_processors: {entry!r} cannot be loaded ({error}); write it as 'module:name'."
            raise ConfigError(message) from error
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as error:
            raise ConfigError(f"logits_processors: {entry!r} must be made without arguments ({error}).") from error
    if not callable(found) and not hasattr(found, "for_request"):
        raise ConfigError(f"logits_processors: {entry!r} is neither callable nor has it a for_request method.")
    return found


def _three_arguments(processor: Callable[..., Any]) -> Callable[..., Any]:
    """Processors may take (output ids, logits) or (prompt ids, output ids, logits)."""
    try:
        kinds = [p.kind for p in inspect.signature(processor).parameters.values()]
    except (TypeError, ValueError):  # builtins may not tell
        return processor
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in positional for kind in kinds) != 2:
        return processor
    return lambda prompt, output, logits: processor(output, logits)
