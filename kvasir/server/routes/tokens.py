"""/tokenize, /detokenize and the plain /generate."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.outputs import RequestOutput
from kvasir.parsers.base import content_of
from kvasir.server.api_request import ApiRequest, read_chat, read_prompts
from kvasir.server.errors import as_api_error, openai_body
from kvasir.server.event_stream import EventStream
from kvasir.server.http import StrictRoute, TheCall, answers, reply, unless_gone
from kvasir.server.schema.base import encode
from kvasir.server.schema.sampling import sampling_params
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
    """Tokenize a prompt, or a conversation with the chat template applied."""
    state.check_model(body.model)
    if body.prompt is not None:
        (made,) = await read_prompts(state, [body.prompt], body.add_special_tokens is not False)
    else:
        made = await read_chat(state, body)
    ids, engine = made.token_ids, state.engine
    tokenizer = engine.input_processor.prompts.tokenizer
    names = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    most = engine.config.model.max_model_len
    return reply(TokenizeReply(count=len(ids), max_model_len=most, tokens=ids, token_strs=names))


@router.post("/detokenize", responses=answers(DetokenizeReply))
async def detokenize(body: DetokenizeRequest, state: State) -> Response:
    """Turn token ids into text."""
    state.check_model(body.model)
    tokenizer, size = state.engine.input_processor.prompts.tokenizer, state.engine.config.model.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise RequestError(f"Token id {token} is not in the vocabulary, which ends at {size - 1}.", "tokens")
    return reply(DetokenizeReply(prompt=tokenizer.decode(body.tokens)))


@router.post("/generate", responses=answers(GenerateReply, "Texts; with `stream`, a line of JSON for each step."))
async def generate(body: GenerateRequest, request: Request, state: State, call: TheCall) -> Response:
    """Complete one prompt, with a plain interface for scripts."""
    call.take_id(body.request_id)
    prompts = await read_prompts(state, [body.prompt], truncate=body.truncate_prompt_tokens, salt=body.cache_salt)
    max_tokens = body.max_tokens or state.default_max_tokens(16)
    params = sampling_params(body, state.default_params, max_tokens=max_tokens, logprobs=None, stream=bool(body.stream))
    job = ApiRequest(state, call, prompts, params, body.priority or 0, body.timeout)
    if body.stream:
        return EventStream(job, _Lines(job, bool(body.return_token_ids)), media_type="application/x-ndjson")
    (output,) = await unless_gone(request, job.whole())
    job.check(output)
    made = GenerateReply(
        text=[content_of(job.parts.read(each.index, each)) for each in output.outputs],
        finish_reason=[each.finish_reason for each in output.outputs],
        usage=job.usage(),
    )
    if body.return_token_ids:
        made.token_ids = [each.token_ids for each in output.outputs]
    return reply(made)


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
