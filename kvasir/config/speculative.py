"""Settings of speculative decoding: the entries of `speculative_config`, by vLLM's names. Any process; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvasir.errors import ConfigError, did_you_mean

LOOKUPS = {"ngram": (5, 5), "lookup": (1, 24), "suffix": (1, 64)}  # with their usual shortest and longest match
HEADS = ("eagle3", "eagle", "medusa", "mtp")  # they read the model's hidden states
METHODS = (*LOOKUPS, "draft_model", *HEADS)
MAX_DRAFTS = 32
USUAL_DRAFTS = {"suffix": 8, "lookup": 8, "mtp": 1}  # of the methods that need no num_speculative_tokens

# Entries of vLLM that Kvasir does not have.
_VLLM_NAMES = """
    attention_backend code_revision disable_by_batch_size disable_logprobs disable_padded_drafter_batch
    draft_sample_method draft_tensor_parallel_size enforce_eager max_model_len moe_backend parallel_drafting
    posterior_alpha posterior_threshold quantization rejection_sample_method revision speculative_token_tree
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob
    tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction
"""
VLLM_ENTRIES = frozenset(_VLLM_NAMES.split())
# Values of them that ask for what Kvasir does anyway; so does null.
_SATISFIED: Mapping[str, Any] = {
    **dict.fromkeys(("disable_logprobs", "disable_padded_drafter_batch", "enforce_eager", "parallel_drafting"), False),
    **dict.fromkeys(("use_heterogeneous_vocab", "use_local_argmax_reduction"), False),
    **{"draft_tensor_parallel_size": 1, "draft_sample_method": "greedy", "rejection_sample_method": "standard"},
}
# other names of methods
_SAME = {"[ngram]": "ngram", "ngram_gpu": "ngram", "draft": "draft_model", "deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp"}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted, and how many."""

    method: str
    num_speculative_tokens: int  # most drafts of a row in a step
    model: str | None = None  # of the draft model
    prompt_lookup_min: int = 1  # tokens that must match before a lookup drafts what followed them
    prompt_lookup_max: int = 1
    adaptive: bool = True  # draft only as much as pays, by measured times and acceptance
    synthetic_acceptance_rate: float | None = None  # accept drafts by chance; the text is then meaningless

    @property
    def is_head(self) -> bool:
        return self.method in HEADS

    @property
    def is_lookup(self) -> bool:
        return self.method in LOOKUPS


def read_speculative(entries: Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """Check the entries of `speculative_config`; None if nothing is drafted."""
    if entries is None:
        return None
    known = [field.name for field in fields(SpeculativeConfig)] + ["suffix_decoding_max_tree_depth"]
    for name, value in entries.items():
        if name in VLLM_ENTRIES:
            if value is None or (name in _SATISFIED and value == _SATISFIED[name]):
                continue
            raise _wrong(f"{name} is an entry of vLLM that Kvasir does not have; leave it out.")
        if name not in known:
            raise _wrong(f"{name} is not one of its entries.{did_you_mean(name, known)} Possible: {', '.join(known)}.")
    method = _method(entries)
    shortest, longest = _match_lengths(entries, method)
    rate = entries.get("synthetic_acceptance_rate")
    if rate is not None and not (isinstance(rate, int | float) and 0 <= rate <= 1):
        raise _wrong(f"synthetic_acceptance_rate={rate!r} must be a number from 0 to 1.")
    if not isinstance(entries.get("adaptive", True), bool):
        raise _wrong(f"adaptive={entries['adaptive']!r} must be true or false.")
    model = entries.get("model")
    if method in LOOKUPS and model not in (None, method, *_SAME):
        raise _wrong(f"method={method!r} drafts from the request's own text and takes no model; leave model out.")
    if method == "draft_model" and not isinstance(model, str):
        raise _wrong("method='draft_model' needs `model`: a directory, a GGUF file or a Hub name.")
    if method in ("eagle3", "eagle", "medusa") and not isinstance(model, str):
        raise _wrong(f"method={method!r} needs `model`: the head's directory or Hub name.")
    if method == "mtp" and model is not None:
        raise _wrong("method='mtp' drafts with a layer of the model's own checkpoint; leave model out.")
    return SpeculativeConfig(
        method,
        _number(entries, "num_speculative_tokens", USUAL_DRAFTS.get(method), 1, MAX_DRAFTS),
        model if method not in LOOKUPS else None,
        shortest,
        longest,
        entries.get("adaptive", True),
        rate,
    )


def _method(entries: Mapping[str, Any]) -> str:
    """The method, or what vLLM concludes from `model`."""
    asked = entries.get("method")
    if asked is None:
        model = entries.get("model")
        if model is None:
            raise _wrong(f"it has neither method nor model. Possible methods: {', '.join(METHODS)}.")
        asked = model if model in LOOKUPS or model in _SAME else _method_of(str(model))
    method = _SAME.get(asked, asked) if isinstance(asked, str) else ""
    if method not in METHODS and ":" not in method:
        raise _wrong(
            f"method={asked!r} is not possible.{did_you_mean(asked, METHODS)} Possible: {', '.join(METHODS)}, or a "
            f"drafter of your own as 'module:Class'."
        )
    return method


def _method_of(model: str) -> str:
    """The method for a model of this name. vLLM knows Medusa by the checkpoint, which is not read here."""
    name = model.lower()
    if "medusa" in name:
        return "medusa"
    return "eagle" if "eagle-" in name else "eagle3" if "eagle3" in name else "draft_model"


def _match_lengths(entries: Mapping[str, Any], method: str) -> tuple[int, int]:
    """Shortest and longest match of a lookup. With one given, vLLM takes it for both."""
    names = ("prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth")
    given = [name for name in names if entries.get(name) is not None]
    if method not in LOOKUPS:
        if given:
            raise _wrong(f"{given[0]} has no effect with method={method!r}; leave it out.")
        return 1, 1
    if "suffix_decoding_max_tree_depth" in given and (method != "suffix" or "prompt_lookup_max" in given):
        raise _wrong("suffix_decoding_max_tree_depth is the longest match of method='suffix'; use prompt_lookup_max.")
    shortest, longest = LOOKUPS[method]
    if method == "ngram" and len(given) == 1:
        shortest = longest = _number(entries, given[0], None, 1, 1024)
    if "suffix_decoding_max_tree_depth" in given:
        longest = _number(entries, "suffix_decoding_max_tree_depth", None, 1, 1024)
    longest = _number(entries, "prompt_lookup_max", longest, 1, 1024)
    shortest = _number(entries, "prompt_lookup_min", min(shortest, longest), 1, 1024)
    if shortest > longest:
        raise _wrong(f"prompt_lookup_min={shortest} is more than prompt_lookup_max={longest}.")
    return shortest, longest


def _number(entries: Mapping[str, Any], name: str, usual: int | None, least: int, most: int) -> int:
    value = entries.get(name)
    if value is None:
        if usual is None:
            raise _wrong(f"{name} is missing: a number from {least} to {most}.")
        return usual
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(f"{name}={value!r} must be a whole number from {least} to {most}.")
    return value


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"speculative_config: {text}")
