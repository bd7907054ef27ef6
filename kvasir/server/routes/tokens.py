"""/tokenize, /detokenize and the plain /generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.server.api_request import Run
from kvasir.server.errors import as_api_error, openai_body
from kvasir.server.event_stream import EventStream
from kvasir.server.http import StrictRoute, TheCall, answers, reply, unless_gone
from kvasir.server.params import default_max_tokens, sampling_params, take_id, terms
from kvasir.server.prompts import PromptMaker
from kvasir.server.schema.base import encode
from kvasir.server.schema.tokens import (
    DetokenizeReply,
    DetokenizeRequest,
    GenerateReply,
    GenerateRequest,
    TokenizeReply,
    TokenizeRequest,
)
from kvasir.server.state import State

router = APIRouter(route_class=StrictRoute, tags=["text and tokens"])


@router.post("/tokenize", responses=answers(TokenizeReply))
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> Response:
    """A prompt's token ids, or those of a conversation with the chat template applied."""
    state.check_model(body.model)
    maker = PromptMaker(state, truncate=None)
    if body.prompt is not None:
        (made,) = await maker.texts([body.prompt], body.add_special_tokens is not False)
    else:
        made = await maker.chat(body)
    ids = list(made["prompt_token_ids"])
    names = maker.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    most = state.engine.config.model.max_model_len
    return reply(TokenizeReply(count=len(ids), max_model_len=most, tokens=ids, token_strs=names))


@router.post("/detokenize", responses=answers(DetokenizeReply))
async def detokenize(body: DetokenizeRequest, state: State) -> Response:
    state.check_model(body.model)
    maker, size = PromptMaker(state), state.engine.config.model.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise RequestError(f"Token id {token} is not in the vocabulary, which ends at {size - 1}.", "tokens")
    return reply(DetokenizeReply(prompt=maker.tokenizer.decode(body.tokens)))


@router.post("/generate", responses=answers(GenerateReply, "Texts; with `stream`, a line of JSON for each step."))
async def generate(body: GenerateRequest, request: Request, state: State, call: TheCall) -> Response:
    """One prompt in, texts out: for scripts."""
    take_id(call, body)
    maker = PromptMaker(state, body.truncate_prompt_tokens, body.cache_salt)
    prompts = await maker.texts([body.prompt]) if isinstance(body.prompt, str) else [maker.ids(body.prompt)]
    max_tokens = body.max_tokens or default_max_tokens(state, 16)
    params = sampling_params(state, body, max_tokens=max_tokens, logprobs=None, stream=bool(body.stream))
    run = Run(state, call, prompts, params, terms(body))
    if body.stream:
        lines = EventStream(_lines(run, bool(body.return_token_ids)), _error_line, media_type="application/x-ndjson")
        return await lines.prime(request.receive)
    (output,) = await unless_gone(request, run.whole())
    run.check(output)
    made = GenerateReply(
        text=[each.text for each in output.outputs],
        finish_reason=[each.finish_reason for each in output.outputs],
        usage=run.usage(),
    )
    if body.return_token_ids:
        made.token_ids = [each.token_ids for each in output.outputs]
    return reply(made)


async def _lines(run: Run, with_ids: bool) -> AsyncGenerator[bytes, None]:
    """What is new, in each line."""
    source = run.outputs()
    try:
        async for _, output in source:
            run.check(output)
            new = GenerateReply(text=[""] * run.params.n, finish_reason=[None] * run.params.n)
            ids: list[list[int]] = [[] for _ in range(run.params.n)]
            for each in output.outputs:
                ids[each.index] = each.token_ids
                new.text[each.index], new.finish_reason[each.index] = each.text, each.finish_reason
            if with_ids:
                new.token_ids = ids
            yield encode(new) + b"\n"
    finally:
        await source.aclose()


def _error_line(error: Exception) -> bytes:
    return encode(openai_body(as_api_error(error))) + b"\n"
