"""Endpoints of pooling models: embeddings, scores, rerankings and classes."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.outputs import PoolingRequestOutput, ScoringRequestOutput
from kvasir.sampling_params import PoolingParams
from kvasir.server.errors import answers
from kvasir.server.http import Call, StrictRoute, TheCall, reply, unless_gone
from kvasir.server.pooling_request import PoolingRequest
from kvasir.server.schema.pooling import (
    ClassifyReply,
    ClassifyRequest,
    ClassItem,
    EmbeddingItem,
    EmbeddingReply,
    EmbeddingRequest,
    OllamaEmbedReply,
    OllamaEmbedRequest,
    PairScore,
    PoolingBody,
    PoolingBodyRequest,
    PoolingItem,
    PoolingReply,
    RerankDocument,
    RerankItem,
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
    TeiEmbedRequest,
    TeiRank,
)
from kvasir.server.state import ServerState, State

router = APIRouter(route_class=StrictRoute, tags=["embeddings, scores and classes"])


@router.post("/v1/embeddings", responses=answers(EmbeddingReply))
async def create_embeddings(body: EmbeddingRequest, request: Request, state: State, call: TheCall) -> Response:
    """Embed texts."""
    job = await unless_gone(request, EmbeddingJob.make(state, call, body))
    return reply(await unless_gone(request, job.whole()))


@router.post("/pooling", responses=answers(PoolingReply))
async def pool(body: PoolingBodyRequest, request: Request, state: State, call: TheCall) -> Response:
    """What a pooler makes of texts: vectors of each, or of each token."""
    params = PoolingParams(
        task=body.task,
        dimensions=body.dimensions,
        normalize=body.normalize,
        use_activation=body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        step_tag_id=body.step_tag_id,
        returned_token_ids=body.returned_token_ids,
    )
    job, model = await _job(state, call, body, _many(body.input), params)
    outputs = await unless_gone(request, job.vectors())
    data = [
        PoolingItem(index=i, data=written(each.outputs.data, body.encoding_format)) for i, each in enumerate(outputs)
    ]
    return reply(
        PoolingReply(id=f"pool-{call.id}", created=int(time.time()), model=model, data=data, usage=job.usage())
    )


@router.post("/classify", responses=answers(ClassifyReply))
async def classify(body: ClassifyRequest, request: Request, state: State, call: TheCall) -> Response:
    """Classify texts."""
    params = PoolingParams(
        task="classify", use_activation=body.use_activation, truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    job, model = await _job(state, call, body, _many(body.input), params)
    labels = state.engine.config.model.hf.get("id2label") or {}
    data = []
    for i, each in enumerate(await unless_gone(request, job.vectors())):
        shares = each.outputs.data.tolist()
        label = labels.get(str(int(np.argmax(each.outputs.data))))
        data.append(ClassItem(index=i, label=label, probs=shares, num_classes=len(shares)))
    made = ClassifyReply(id=f"classify-{call.id}", created=int(time.time()), model=model, data=data, usage=job.usage())
    return reply(made)


# ---------------------------------------------------------------- scores of pairs


@router.post("/v1/score", responses=answers(ScoreReply))
@router.post("/score", responses=answers(ScoreReply))
async def score(body: ScoreRequest, request: Request, state: State, call: TheCall) -> Response:
    """Score pairs of texts: one with many, or each with the one in the same place."""
    scores, job, model = await unless_gone(
        request, _scores(state, call, body, _many(body.text_1), _many(body.text_2), body.use_activation)
    )
    data = [PairScore(index=i, score=each.outputs.score) for i, each in enumerate(scores)]
    return reply(ScoreReply(id=f"score-{call.id}", created=int(time.time()), model=model, data=data, usage=job.usage()))


@router.post("/v2/rerank", responses=answers(RerankReply))
@router.post("/v1/rerank", responses=answers(RerankReply))
@router.post("/rerank", responses=answers(RerankReply))
async def rerank(body: RerankRequest, request: Request, state: State, call: TheCall) -> Response:
    """Order documents by how well they fit a query."""
    texts = body.texts or [each if isinstance(each, str) else each["text"] for each in body.documents or ()]
    body.truncate_prompt_tokens = body.max_tokens_per_doc or (-1 if body.truncate else body.truncate_prompt_tokens)
    activate = None if body.raw_scores is None else not body.raw_scores
    scores, job, model = await unless_gone(request, _scores(state, call, body, [body.query], texts, activate))
    order = sorted(range(len(texts)), key=lambda i: -scores[i].outputs.score)[: body.top_n]
    if body.texts is not None:
        ranks = [TeiRank(index=i, score=scores[i].outputs.score) for i in order]
        for rank in ranks if body.return_text else ():
            rank.text = texts[rank.index]
        return reply(ranks)
    results = [RerankItem(index=i, relevance_score=scores[i].outputs.score) for i in order]
    for item in results if body.return_documents else ():
        item.document = RerankDocument(text=texts[item.index])
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return reply(RerankReply(id=f"rerank-{call.id}", model=model, results=results, usage=job.usage(), meta=meta))


async def _scores(
    state: ServerState, call: Call, body: PoolingBody, first: list[str], second: list[str], activate: bool | None
) -> tuple[list[ScoringRequestOutput], PoolingRequest, str]:
    model = state.check_model(body.model, "pooling")
    scoring = state.engine.input_processor.pooling.scoring(first, second)
    params = PoolingParams(task=scoring.task, truncate_prompt_tokens=body.truncate_prompt_tokens)
    if scoring.task == "classify":
        params.use_activation = activate
    job, _ = await _job(state, call, body, scoring.prompts, params)
    outputs: list[PoolingRequestOutput] = await job.vectors()
    return scoring.scores(outputs), job, model


# ---------------------------------------------------------------- embeddings as other servers give them


@router.post("/embed", responses=answers(description="A list of embeddings, each a list of numbers."))
async def embed_as_tei(body: TeiEmbedRequest, request: Request, state: State, call: TheCall) -> Response:
    """Embed texts, as Text Embeddings Inference does."""
    params = PoolingParams(
        task="embed",
        normalize=body.normalize is not False,
        dimensions=body.dimensions,
        truncate_prompt_tokens=-1 if body.truncate else None,
    )
    texts = state.engine.input_processor.pooling.with_prompt(_many(body.inputs), body.prompt_name)
    job, _ = await _job(state, call, PoolingBody(), texts, params)
    return reply([each.outputs.data.tolist() for each in await unless_gone(request, job.vectors())])


@router.post("/api/embed", responses=answers(OllamaEmbedReply))
async def embed_as_ollama(body: OllamaEmbedRequest, request: Request, state: State, call: TheCall) -> Response:
    """Embed texts, as Ollama does: texts that are too long are cut, unless `truncate` is false."""
    started = time.monotonic()
    cut = None if body.truncate is False else -1
    params = PoolingParams(task="embed", normalize=True, dimensions=body.dimensions, truncate_prompt_tokens=cut)
    name = None if body.model is None else body.model.removesuffix(":latest")
    job, model = await _job(state, call, PoolingBody(model=name), _many(body.input), params)
    vectors = [each.outputs.data.tolist() for each in await unless_gone(request, job.vectors())]
    made = OllamaEmbedReply(
        model=body.model or model,
        embeddings=vectors,
        total_duration=int((time.monotonic() - started) * 1e9),
        load_duration=0,
        prompt_eval_count=job.tokens.num_prompt,
    )
    return reply(made)


# ---------------------------------------------------------------- what they share


@dataclass(slots=True)
class EmbeddingJob:
    """An embedding request, ready to run; batches make it too."""

    body: EmbeddingRequest
    request: PoolingRequest
    model: str

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: EmbeddingRequest) -> EmbeddingJob:
        params = PoolingParams(
            task="embed",
            dimensions=body.dimensions,
            normalize=body.normalize,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        state.check_model(body.model, "pooling")
        texts = state.engine.input_processor.pooling.with_prompt(_many(body.input), body.prompt_name)
        return cls(body, *await _job(state, call, body, texts, params))

    async def whole(self) -> EmbeddingReply:
        outputs = await self.request.vectors()
        how = self.body.encoding_format
        data = [EmbeddingItem(index=i, embedding=written(each.outputs.data, how)) for i, each in enumerate(outputs)]
        name = f"embd-{self.request.call.id}"
        usage = self.request.usage()
        return EmbeddingReply(id=name, created=int(time.time()), model=self.model, data=data, usage=usage)


async def _job(
    state: ServerState, call: Call, body: PoolingBody, texts: Sequence[Any], params: PoolingParams
) -> tuple[PoolingRequest, str]:
    call.take_id(body.request_id)
    model = state.check_model(body.model, "pooling")
    timing = {"priority": body.priority, "timeout": body.timeout, "user": body.user}
    return await PoolingRequest.make(state, call, texts, params, **timing), model  # type: ignore[arg-type]


def _many(given: str | Sequence[Any]) -> list[Any]:
    """The inputs as a list: one text and one list of token ids are one input."""
    texts: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not texts:
        raise RequestError("input is empty: give at least one text.", "input")
    for place, text in enumerate(texts):
        if not len(text):
            raise RequestError(f"Text {place} is empty: leave it out, or give it at least one character.", "input")
    return texts


def written(vector: NDArray[np.float32], how: str | None) -> Any:
    """A vector in one of schema.pooling.ENCODINGS."""
    if how == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, np.float32).tobytes()).decode()
    if how in ("int8", "uint8"):
        scaled = np.clip(np.rint(vector * 127), -127, 127).astype(np.int64)
        return (scaled + (128 if how == "uint8" else 0)).tolist()
    if how in ("binary", "ubinary"):
        bits = np.packbits(vector > 0).astype(np.int64)
        return (bits - (128 if how == "binary" else 0)).tolist()
    return vector.tolist()
