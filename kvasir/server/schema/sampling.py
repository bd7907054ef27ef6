"""Parameters of generation that chat, completions and /generate share, and how a body's become SamplingParams.

Names are vLLM's and OpenAI's; null means unset.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server.schema.base import MAX_TOKEN_IDS, Body, invalid, refused
from kvasir.server.schema.structured import FIELDS, structured_outputs

TokenIds = Annotated[list[int], Field(max_length=1 << 18)]  # larger than any vocabulary
PromptIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS)]
CacheSalt = Annotated[str, Field(max_length=1024)]
TemplateVariables = Annotated[dict[str, Any], Field(max_length=256)]

_DEFAULTED = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")  # by a generation config

NO_TOOLS_HERE = "only chat requests have tools; use /v1/chat/completions."

# Fields that SamplingParams has with the same name and meaning.
SAMPLING_FIELDS = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "logprob_token_ids"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "logit_bias"),
    *("allowed_token_ids", "forbidden_token_ids", "bad_words", "skip_reading_prefix_cache", "repetition_detection"),
    *("top_ema_p", "top_ema_d", "use_beam_search", "length_penalty", "early_stopping", "num_beam_groups"),
    *("diversity_penalty", "stream_interval"),
)


class ConstraintFields(Body):
    """vLLM's fields for the form of the output. Each interface has one of its own beside them."""

    structured_outputs: dict[str, Any] | None = Field(
        default=None,
        description="Form of the output: one of json, regex, choice, grammar, json_object, structural_tag.",
    )
    guided_json: str | dict[str, Any] | None = Field(default=None, description="Older form of structured_outputs.json.")
    guided_regex: str | None = Field(default=None, description="Older form of structured_outputs.regex.")
    guided_choice: list[str] | None = Field(default=None, description="Older form of structured_outputs.choice.")
    guided_grammar: str | None = Field(default=None, description="Older form of structured_outputs.grammar.")
    guided_json_object: bool | None = Field(default=None, description="Older form of structured_outputs.json_object.")
    guided_whitespace_pattern: str | None = Field(
        default=None, description="Older form of structured_outputs.whitespace_pattern."
    )
    guided_decoding_backend: str | None = Field(default=None, description="auto or guidance; others are refused.")
    structural_tag: str | dict[str, Any] | None = Field(
        default=None, description="Older form of structured_outputs.structural_tag."
    )


class SamplingBody(ConstraintFields):
    """Every field works as docs/sampling.md describes, or is refused by name."""

    n: int | None = Field(default=None, ge=1, description="Number of completions per prompt.")
    best_of: int | None = Field(
        default=None, ge=1, description="Sample this many completions and return the n likeliest. Not with stream."
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1 << 16)
    allowed_token_ids: TokenIds | None = None
    forbidden_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: TokenIds | None = Field(
        default=None, description="With logprobs: return these tokens at each position instead of the likeliest."
    )
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: dict[str, Any] | None = None
    top_ema_p: float | None = None
    top_ema_d: int | None = None
    use_beam_search: bool | None = Field(
        default=None, description="Run a beam search over n beams instead of sampling."
    )
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    stream_interval: int | None = Field(
        default=None, ge=1, description="Number of tokens between two chunks of a stream."
    )

    # other parameters
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        description="Keep only this many tokens of the prompt; -1: as many as the model takes.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="Where truncate_prompt_tokens removes tokens: left (default) keeps the last ones."
    )
    priority: int | None = Field(default=None, description="Lower goes first; needs --scheduling-policy priority.")
    timeout: float | None = Field(
        default=None, gt=0, description="Seconds after which the request ends, finished or not."
    )
    request_id: str | None = Field(default=None, description="The request's id, like the header X-Request-Id.")
    cache_salt: CacheSalt | None = Field(
        default=None, description="Requests share cached prefixes only with requests of the same salt."
    )
    return_token_ids: bool | None = Field(default=None, description="Return prompt_token_ids and token_ids.")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Write tokens as 'token_id:7' in log-probabilities."
    )
    vllm_xargs: dict[str, Any] | None = Field(
        default=None, description="Arguments of the logits processors that the engine was started with."
    )

    # the form of the output, see schema/structured.py
    response_format: dict[str, Any] | None = Field(
        default=None, description="Form of the output: type text, json_object, json_schema or structural_tag."
    )
    thinking_token_budget: Any = refused("only chat requests have reasoning; use /v1/chat/completions.")
    prompt_embeds: Any = refused("only /v1/completions takes it.")
    mm_processor_kwargs: Any = refused("this model takes text only.")
    kv_transfer_params: Any = refused("KV caches are not transferred between engines.")
    session_id: Any = refused("requests have no sessions; use cache_salt to separate cached prefixes.")
    routed_experts_prompt_start: Any = refused("the chosen experts are not returned.", 0)
    trace_decode_token_ids: Any = refused("decoding is not traced.", [])
    logits_processors: Any = refused("the server runs no code of clients; start it with --logits-processors.", [])

    @model_validator(mode="after")
    def _fits_stream(self) -> SamplingBody:
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise invalid("truncation_side", "truncation_side needs truncate_prompt_tokens: set both or none.")
        stream = bool(getattr(self, "stream", None))
        if self.stream_interval is not None and not stream:
            message = "stream_interval is for streams: set stream to true or leave it out."
            raise invalid("stream_interval", message)
        if stream and (self.best_of or 1) > (self.n or 1) and not self.use_beam_search:
            message = (
                "best_of larger than n cannot be streamed, as the best are known at the end: leave one of them out."
            )
            raise invalid("best_of", message)
        return self


def sampling_params(
    body: Body, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, stream: bool
) -> SamplingParams:
    """Parameters from a body, which need not have all fields; `defaults` stand in for some. Errors name the field."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name, None)) is not None}
    if given.get("stop") == "":  # clients' empty input fields mean that there is none
        del given["stop"]
    if not given.get("use_beam_search"):  # a beam search samples nothing
        given = {**{name: getattr(defaults, name) for name in _DEFAULTED}, **given}
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        extra_args=getattr(body, "vllm_xargs", None),
        structured_outputs=structured_outputs(body) if asks_for_structure(body) else None,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def asks_for_structure(body: Body) -> bool:
    return not body.model_fields_set.isdisjoint(FIELDS)


class StreamOptions(Body):
    include_usage: bool = Field(default=False, description="Send a last chunk with usage.")
    continuous_usage_stats: bool = Field(default=False, description="Send the usage so far in every chunk.")
    include_obfuscation: Any = refused("chunks are not padded.", False)
