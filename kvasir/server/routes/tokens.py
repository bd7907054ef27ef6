"""/tokenize, /detokenize, /tokenizer_info, /generative_scoring and the plain /generate, with their bodies."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.outputs import RequestOutput
from kvasir.parsers.base import content_of
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server.api_request import ApiRequest, read_chat, read_prompts, within
from kvasir.server.errors import ERRORS, answers, as_api_error, not_found, openai_body
from kvasir.server.event_stream import EventStream
from kvasir.server.http import StrictRoute, TheCall, reply, unless_gone
from kvasir.server.limits import check_limits
from kvasir.server.schema.base import (
    MAX_TOKEN_IDS,
    Body,
    Reply,
    Usage,
    encode,
    example,
    invalid,
    one_complaint,
    refused,
)
from kvasir.server.schema.chat import ChatTemplateFields, Message
from kvasir.server.schema.sampling import NO_TOOLS_HERE, PromptIds, SamplingBody, sampling_params
from kvasir.server.state import ServerState, State
from kvasir.server.tools import chat_tools

_ELSEWHERE = "use /v1/completions for log-probabilities."


class TokenizeRequest(ChatTemplateFields):
    """A prompt, or the messages of a conversation."""

    model_config = example(prompt="Once upon a time")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None  # type: ignore[assignment]  # either this or prompt
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise invalid("prompt", "Give either prompt or messages.")
        return self


class TokenizeReply(Reply, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeRequest(Body):
    max_values = MAX_TOKEN_IDS
    model_config = example(tokens=[15, 16, 17])

    model: str | None = None
    tokens: PromptIds


class DetokenizeReply(Reply, kw_only=True):
    prompt: str


class GenerateRequest(SamplingBody):
    """The plain interface: one prompt in, texts out."""

    max_values = MAX_TOKEN_IDS
    model_config = example(prompt="Once upon a time", max_tokens=32)

    prompt: Annotated[str | PromptIds, one_complaint("prompt", "prompt must be a string or a list of token ids.")]
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = Field(
        default=None, description="Send a line of JSON for each new piece of text, instead of one object."
    )
    logprobs: Any = refused(_ELSEWHERE)
    prompt_logprobs: Any = refused(_ELSEWHERE)
    logprob_token_ids: Any = refused(_ELSEWHERE)
    return_tokens_as_token_ids: Any = refused(_ELSEWHERE)
    tools: Any = refused(NO_TOOLS_HERE, [])
    tool_choice: Any = refused(NO_TOOLS_HERE, "none")


class GenerateReply(Reply, kw_only=True):
    text: list[str]
    finish_reason: list[str | None]
    token_ids: list[list[int]] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


class ScoringRequest(Body):
    """Items to be scored by a query about them."""

    model_config = example(query="Is this a city? ", items=["Paris", "Bread"], label_token_ids=[15, 16])

    model: str | None = None
    query: Annotated[str | list[int], one_complaint("query", "query must be a string or a list of token ids.")]
    items: Annotated[
        list[str] | list[list[int]],
        one_complaint("items", "items must be a list of strings or of lists of token ids."),
    ] = Field(min_length=1)
    label_token_ids: list[int] = Field(
        min_length=1, max_length=1024, description="The score is the probability of the first of these tokens."
    )
    apply_softmax: bool | None = Field(
        default=None, description="Probabilities among the labels (default), or among all tokens."
    )
    item_first: bool | None = Field(default=None, description="Put the item before the query instead of behind it.")
    add_special_tokens: bool | None = Field(default=None, description="Add special tokens to the query (default: yes).")
    priority: int | None = Field(default=None, description="Lower goes first; needs --scheduling-policy priority.")
    timeout: float | None = Field(default=None, gt=0)
    request_id: str | None = None


class ItemScore(Reply, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoringReply(Reply, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage


router = APIRouter(route_class=StrictRoute, tags=["text and tokens"])


@router.post("/tokenize", responses=answers(TokenizeReply))
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> Response:
    """Tokenize a prompt, or a conversation with the chat template applied, however long it is."""
    state.check_model(body.model, None)
    if body.prompt is not None:
        (made,) = await read_prompts(state, [body.prompt], body.add_special_tokens is not False, for_counting=True)
    else:
        tools = chat_tools(body.tools, None, None)
        made = await read_chat(state, body, tools=tools.shown(), for_counting=True)
    ids, engine = made.token_ids, state.engine
    names = None
    if body.return_token_strs:
        tokenizer = engine.input_processor.prompts.tokenizer
        names = await engine.text_pool.run(len(ids), lambda: tokenizer.convert_ids_to_tokens(ids))
    most = engine.config.model.max_model_len
    return reply(TokenizeReply(count=len(ids), max_model_len=most, tokens=ids, token_strs=names))


@router.post("/detokenize", responses=answers(DetokenizeReply))
async def detokenize(body: DetokenizeRequest, state: State) -> Response:
    """Turn token ids into text."""
    state.check_model(body.model, None)
    engine = state.engine
    tokenizer, size = engine.input_processor.prompts.tokenizer, engine.config.model.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise RequestError(f"Token id {token} is not in the vocabulary, which ends at {size - 1}.", "tokens")
    return reply(
        DetokenizeReply(prompt=await engine.text_pool.run(len(body.tokens), lambda: tokenizer.decode(body.tokens)))
    )


@router.get("/tokenizer_info", responses=ERRORS, summary="The tokenizer's special tokens and chat template")
async def tokenizer_info(state: State) -> Response:
    if not state.config.enable_tokenizer_info_endpoint:
        raise not_found("This server does not show its tokenizer (--no-enable-tokenizer-info-endpoint).")
    engine = state.engine
    tokenizer = engine.input_processor.prompts.tokenizer
    template = engine.config.model.chat_template or tokenizer.chat_template
    found: dict[str, Any] = {
        **tokenizer.special_tokens_map,
        "additional_special_tokens": tokenizer.additional_special_tokens,
        "model_max_length": engine.config.model.max_model_len,
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class that has the same results
    }
    return reply(found if template is None else {**found, "chat_template": template})


@router.post(
    "/generate",
    responses=answers(
        GenerateReply, description="Texts; with `stream`, a line of JSON for each step.", stream="application/x-ndjson"
    ),
)
async def generate(body: GenerateRequest, request: Request, state: State, call: TheCall) -> Response:
    """Complete one prompt, with a plain interface for scripts."""
    call.take_id(body.request_id)
    truncate, side = body.truncate_prompt_tokens, body.truncation_side
    max_tokens = body.max_tokens or state.default_max_tokens(16)
    params = sampling_params(body, state.default_params, max_tokens=max_tokens, logprobs=None, stream=bool(body.stream))
    async with within(state, call, body.timeout):
        prompts = await read_prompts(state, [body.prompt], truncate=truncate, salt=body.cache_salt, side=side)
    job = ApiRequest(state, call, prompts, params, body.priority or 0, body.timeout)
    if body.stream:
        return EventStream(job, _Lines(job, bool(body.return_token_ids)), media_type="application/x-ndjson")
    (output,) = await unless_gone(request, job.whole())
    made = GenerateReply(
        text=[content_of(job.parts.read(each.index, each)) for each in output.outputs],
        finish_reason=[each.finish_reason for each in output.outputs],
        usage=job.usage(),
    )
    if body.return_token_ids:
        made.token_ids = [each.token_ids for each in output.outputs]
    return reply(made)


@router.post("/generative_scoring", responses=answers(ScoringReply))
async def score(body: ScoringRequest, request: Request, state: State, call: TheCall) -> Response:
    """Score items by the probability of a label as the token that follows the query and the item."""
    call.take_id(body.request_id)
    model = state.check_model(body.model)
    params = SamplingParams(
        max_tokens=1,
        temperature=0,
        logprobs=0,
        logprob_token_ids=body.label_token_ids,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    check_limits(params, len(body.items), state.config.max_choices)
    names = {"logprob_token_ids": "label_token_ids"}
    prompts = await _scored_prompts(state, body)
    job = ApiRequest(state, call, prompts, params, body.priority or 0, body.timeout, names=names, model=model)
    data = []
    for index, output in enumerate(await unless_gone(request, job.whole())):
        (each,) = output.outputs
        position = next(iter(each.logprobs or ()), None)
        assert position is not None, "log-probabilities were asked for"
        logprobs = [position[label].logprob for label in body.label_token_ids]
        data.append(ItemScore(index=index, score=_probability(logprobs, body.apply_softmax is not False)))
    made = ScoringReply(
        id=f"generative-scoring-{call.id}", created=int(time.time()), model=model, data=data, usage=job.usage()
    )
    return reply(made)


async def _scored_prompts(state: ServerState, body: ScoringRequest) -> list[TokenizedPrompt]:
    (query,) = await read_prompts(state, [body.query], body.add_special_tokens is not False)
    items = await read_prompts(state, body.items, False)  # the query has the special tokens
    both = [(item, query) if body.item_first else (query, item) for item in items]
    return await read_prompts(state, [[*first.token_ids, *second.token_ids] for first, second in both])


def _probability(logprobs: list[float], among_labels: bool) -> float:
    """Probability of the first label, among all tokens or among the labels alone."""
    if not among_labels:
        return math.exp(logprobs[0])
    highest = max(logprobs)
    weights = [math.exp(each - highest) for each in logprobs]
    return weights[0] / sum(weights)


class _Lines:
    """Writes what is new in each output as a line of JSON."""

    def __init__(self, request: ApiRequest, with_ids: bool) -> None:
        self.request = request
        self.with_ids = with_ids

    def write(self, output: RequestOutput) -> bytes:
        self.request.check(output)
        n = self.request.params.n
        new = GenerateReply(text=[""] * n, finish_reason=[None] * n)
        ids: list[list[int]] = [[] for _ in range(n)]
        for each in output.outputs:
            ids[each.index] = each.token_ids
            new.text[each.index] = content_of(self.request.parts.read(each.index, each))
            new.finish_reason[each.index] = each.finish_reason
        if self.with_ids:
            new.token_ids = ids
        return encode(new) + b"\n"

    def finish(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        return encode(openai_body(as_api_error(error))) + b"\n"
