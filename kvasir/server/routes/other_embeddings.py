"""Embeddings as other servers give them: Cohere, Ollama, and Text Embeddings Inference (TEI)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from kvasir.errors import PromptTooLongError
from kvasir.frontend.requests.pooling import PoolingParams
from kvasir.server.errors import answers
from kvasir.server.http import Call, StrictRoute, TheCall, reply, unless_gone
from kvasir.server.routes.pooling import at_most, make_job, params_of, written
from kvasir.server.schema.base import MAX_TOKEN_IDS, Body, Reply, example, one_complaint, refused
from kvasir.server.schema.pooling import INPUT_KINDS, PoolingBody, TeiSide, inputs_of, refuse_several, side_of
from kvasir.server.schema.sampling import PromptIds
from kvasir.server.state import ServerState, State

router = APIRouter(route_class=StrictRoute, tags=["embeddings, scores and classes"])


@contextmanager
def _named(field: str, value: str) -> Iterator[None]:
    """Let the error about a text that is too long name this interface's fields: its texts, and the value of `truncate`
    that cuts them."""
    try:
        yield
    except PromptTooLongError as error:
        said = (
            f"{str(error).partition(' Please shorten it')[0]} Please shorten it, or set truncate to {value} to cut it."
        )
        raise PromptTooLongError(said, field, error.num_tokens) from error


# ---------------------------------------------------------------- Text Embeddings Inference


class TeiEmbedRequest(Body):
    """TEI's body."""

    max_values = MAX_TOKEN_IDS
    model_config = example(inputs=["The cat sat on the mat."])

    inputs: Annotated[str | list[str] | PromptIds | list[PromptIds], one_complaint("inputs", f"inputs {INPUT_KINDS}")]
    normalize: bool | None = None
    truncate: bool | None = Field(default=None, description="Cut texts that are too long; otherwise they are refused.")
    truncation_direction: TeiSide | None = Field(default=None, description="Where texts are cut; right (default).")
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None
    dimensions: int | None = Field(default=None, ge=1)


@router.post("/embed", responses=answers(description="A list of embeddings, each a list of numbers."))
async def embed_as_tei(body: TeiEmbedRequest, request: Request, state: State, call: TheCall) -> Response:
    """Embed texts, as Text Embeddings Inference does."""
    params = PoolingParams(
        task="embed",
        normalize=body.normalize is not False,
        dimensions=body.dimensions,
        truncate_prompt_tokens=-1 if body.truncate else None,
        truncation_side=None if body.truncation_direction is None else side_of(body.truncation_direction),
    )
    texts = state.engine.input_processor.pooling.with_prompt(inputs_of(body.inputs, "inputs"), body.prompt_name)
    with _named("inputs", "true"):
        job, _ = await make_job(state, call, PoolingBody(), texts, params)
    vectors = await unless_gone(request, job.vectors())
    return reply([written(each.outputs.data, body.encoding_format) for each in vectors])


# ---------------------------------------------------------------- Ollama


class OllamaEmbedRequest(Body):
    """Ollama's body."""

    max_values = MAX_TOKEN_IDS
    model_config = example(input=["The cat sat on the mat."])

    model: str | None = None
    input: Annotated[str | list[str], one_complaint("input", "input must be a text or a list of texts.")]
    truncate: bool | None = Field(default=None, description="Cut texts that are too long (default: yes).")
    dimensions: int | None = Field(default=None, ge=1)
    keep_alive: Any = Field(default=None, description="Taken and not needed: the model stays loaded.")
    options: Any = refused("embeddings have no options.", {})


class OllamaEmbedReply(Reply, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsRequest(Body):
    """The body of Ollama's older route, which takes one text."""

    model_config = example(prompt="The cat sat on the mat.")

    model: str | None = None
    prompt: str
    keep_alive: Any = Field(default=None, description="Taken and not needed: the model stays loaded.")
    options: Any = refused("embeddings have no options.", {})


class OllamaEmbeddingsReply(Reply, kw_only=True):
    embedding: list[float]


@router.post("/api/embed", responses=answers(OllamaEmbedReply))
async def embed_as_ollama(body: OllamaEmbedRequest, request: Request, state: State, call: TheCall) -> Response:
    """Embed texts, as Ollama does: texts that are too long are cut, unless `truncate` is false."""
    started = time.monotonic()
    cut = None if body.truncate is False else -1
    params = PoolingParams(task="embed", normalize=True, dimensions=body.dimensions, truncate_prompt_tokens=cut)
    vectors, tokens, model = await _ollama(body.model, inputs_of(body.input), params, request, state, call)
    made = OllamaEmbedReply(
        model=body.model or model,
        embeddings=vectors,
        total_duration=int((time.monotonic() - started) * 1e9),
        load_duration=0,
        prompt_eval_count=tokens,
    )
    return reply(made)


@router.post("/api/embeddings", responses=answers(OllamaEmbeddingsReply))
async def embed_one_as_ollama(body: OllamaEmbeddingsRequest, request: Request, state: State, call: TheCall) -> Response:
    """Embed one text, as Ollama's older route does: a text that is too long is cut, and the vector has any length."""
    params = PoolingParams(task="embed", normalize=False, truncate_prompt_tokens=-1)
    vectors, _, _ = await _ollama(body.model, inputs_of(body.prompt, "prompt"), params, request, state, call)
    return reply(OllamaEmbeddingsReply(embedding=vectors[0]))


async def _ollama(
    model: str | None, texts: list[Any], params: PoolingParams, request: Request, state: ServerState, call: Call
) -> tuple[list[list[float]], int, str]:
    """The vectors, the number of tokens, and the model's name. Ollama's clients add a tag to names."""
    name = None if model is None or model in state.model_names else model.removesuffix(":latest")
    with _named("input", "true"):
        job, found = await make_job(state, call, PoolingBody(model=name), texts, params)
    vectors = [each.outputs.data.tolist() for each in await unless_gone(request, job.vectors())]
    return vectors, job.tokens.num_prompt, found


# ---------------------------------------------------------------- Cohere

_CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
# What a text is for -> the names that models give to the prompt for it.
_PURPOSES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class CohereEmbedRequest(PoolingBody):
    """Cohere's body."""

    model_config = example(texts=["The cat sat on the mat."], input_type="search_document")

    texts: list[str] = Field(description="Texts to embed.")
    input_type: Literal["search_query", "search_document", "classification", "clustering"] | None = Field(
        default=None, description="Puts the model's prompt for this purpose before each text, if it has one."
    )
    embedding_types: list[_CohereType] | None = Field(default=None, description="How numbers are written (float).")
    output_dimension: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1, description="Keep so many tokens of each text.")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        default=None, description="END (default) and START cut texts that are too long there, NONE refuses them."
    )
    images: Any = refused("this server embeds texts.")
    inputs: Any = refused("send texts.")

    @model_validator(mode="after")
    def _one_length(self) -> CohereEmbedRequest:
        names = ("max_tokens", "truncate_prompt_tokens")
        refuse_several(self, *names, *(("truncate",) if self.truncate == "NONE" else ()))
        return self

    def may_cut(self) -> bool:
        return self.truncate != "NONE"


class CohereEmbedReply(Reply, kw_only=True):
    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]


@router.post("/v2/embed", responses=answers(CohereEmbedReply))
async def embed_as_cohere(body: CohereEmbedRequest, request: Request, state: State, call: TheCall) -> Response:
    """Embed texts, as Cohere does: texts that are too long are cut, unless `truncate` is NONE."""
    processor = state.engine.input_processor.pooling
    names = _PURPOSES.get(body.input_type or "", ())
    prompt = next((name for name in names if name in processor.config.prompts), None)
    cut = body.truncate_prompt_tokens or (None if body.truncate == "NONE" else -1)
    if body.max_tokens is not None:
        cut = at_most(state, body.max_tokens)
    side = "left" if body.truncate == "START" else body.truncation_side
    body = body.model_copy(update={"truncate_prompt_tokens": cut, "truncation_side": side})
    params = params_of(body, "embed", dimensions=body.output_dimension)
    texts = processor.with_prompt(inputs_of(body.texts, "texts"), prompt)
    with _named("texts", "END"):
        job, _ = await make_job(state, call, body, texts, params)
    vectors = await unless_gone(request, job.vectors())
    kinds: Sequence[str] = body.embedding_types or ["float"]
    made = CohereEmbedReply(
        id=f"embd-{call.id}",
        embeddings={kind: [written(each.outputs.data, kind) for each in vectors] for kind in kinds},
        texts=body.texts,
        meta={"api_version": {"version": "2"}, "billed_units": {"input_tokens": job.tokens.num_prompt}},
    )
    return reply(made)
