"""Endpoints of pooling models: embeddings, scores, rerankings and classes.

Their bodies are in schema/pooling.py; embeddings as other servers give them are in other_embeddings.py. A request is an
ApiRequest whose outputs are vectors.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from kvasir.errors import PromptTooLongError
from kvasir.frontend.requests.pooling import PoolingParams, Scoring
from kvasir.frontend.requests.prompts import TokenizedPrompt, salt_bytes
from kvasir.outputs import PoolingRequestOutput, RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server.api_request import ApiRequest, check_length, within
from kvasir.server.errors import ApiError, answers, timed_out, too_large
from kvasir.server.http import Call, StrictRoute, TheCall, reply, unless_gone
from kvasir.server.large_bodies import check_copies
from kvasir.server.schema.pooling import (
    ClassifyReply,
    ClassifyRequest,
    ClassItem,
    EmbeddingItem,
    EmbeddingReply,
    EmbeddingRequest,
    EncodedBody,
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
    TeiRank,
    inputs_of,
    side_of,
)
from kvasir.server.state import ServerState, State

_NOTHING = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)  # no token is sampled


@dataclass(slots=True, eq=False)
class PoolingRequest(ApiRequest):
    pooling: PoolingParams = field(default_factory=PoolingParams)

    @classmethod
    async def make(
        cls,
        state: ServerState,
        call: Call,
        texts: Sequence[Any],  # texts, pairs of texts, or token ids
        pooling: PoolingParams,
        *,
        priority: int | None = None,
        timeout: float | None = None,
        user: str | None = None,
        salt: str | None = None,
    ) -> PoolingRequest:
        async with within(state, call, timeout):
            prompts = await read_texts(state, texts, pooling)
        if salt:
            prompts = [replace(prompt, salt=salt_bytes(salt)) for prompt in prompts]
        return cls(state, call, prompts, _NOTHING, priority or 0, timeout, user, pooling=pooling)

    @property
    def asked(self) -> PoolingParams:
        return self.pooling

    async def vectors(self) -> list[PoolingRequestOutput]:
        """Run to the end; return every prompt's result, or raise why there is none."""
        return cast(list[PoolingRequestOutput], await self.whole())

    def check(self, output: RequestOutput) -> None:
        reason = cast(Any, output).finish_reason
        if reason == "error":
            raise ApiError(500, cast(Any, output).error or "The request failed.", "engine", code="request_failed")
        if reason == "timeout":
            raise timed_out(self.timeout, cast(Any, output).error or "")
        if reason == "abort" and not self.cancelled:
            raise ApiError(503, "The server was shut down before the answer was complete.", "draining")

    def take(self, output: RequestOutput) -> None:
        if output.num_cached_tokens:
            self.tokens.cached[output.request_id] = output.num_cached_tokens
        metrics, reason = self.state.metrics, cast(Any, output).finish_reason
        metrics.pooled(output.metrics, len(output.prompt_token_ids), output.num_cached_tokens or 0)
        self.reasons.append(reason)
        metrics.finished(reason)

    def num_charged(self, left_early: bool) -> int:
        return 0


async def read_texts(state: ServerState, texts: Sequence[Any], params: PoolingParams) -> list[TokenizedPrompt]:
    """Tokenize and check texts, pairs of texts and token ids, within the server's limits."""
    engine = state.engine
    processor, pool = engine.input_processor.pooling, engine.text_pool
    processor.pooler_for(params.task)
    sizes = [sum(map(len, each)) if isinstance(each, tuple) else len(each) for each in texts]
    if max(sizes, default=0) > pool.max_characters:
        message = f"A text has {max(sizes)} characters that must be tokenized at once"
        raise too_large(f"{message}; this server takes {pool.max_characters} (--max-tokenizing-characters).", "input")
    try:
        found = await pool.run(sum(sizes), lambda: processor.tokenize(texts, params))
    except PromptTooLongError as error:
        error.parameter = "input"
        check_length(state, error.num_tokens or 0)
        raise
    for each in found:
        check_length(state, len(each.token_ids))
    return found


router = APIRouter(route_class=StrictRoute, tags=["embeddings, scores and classes"])


@router.post("/v1/embeddings", responses=answers(EmbeddingReply))
async def create_embeddings(body: EmbeddingRequest, request: Request, state: State, call: TheCall) -> Response:
    """Embed texts."""
    job = await unless_gone(request, EmbeddingJob.make(state, call, body))
    return reply(await unless_gone(request, job.whole()))


@router.post("/pooling", responses=answers(PoolingReply))
async def pool(body: PoolingBodyRequest, request: Request, state: State, call: TheCall) -> Response:
    """What a pooler makes of texts: vectors of each, or of each token."""
    params = params_of(
        body,
        body.task,
        dimensions=body.dimensions,
        normalize=body.normalize,
        use_activation=body.use_activation,
        step_tag_id=body.step_tag_id,
        returned_token_ids=body.returned_token_ids,
    )
    job, model = await make_job(state, call, body, inputs_of(body.input), params)
    outputs = await unless_gone(request, job.vectors())
    data = [PoolingItem(index=i, data=_encoded(each.outputs.data, body)) for i, each in enumerate(outputs)]
    return reply(
        PoolingReply(id=f"pool-{call.id}", created=int(time.time()), model=model, data=data, usage=job.usage())
    )


@router.post("/classify", responses=answers(ClassifyReply))
async def classify(body: ClassifyRequest, request: Request, state: State, call: TheCall) -> Response:
    """Classify texts."""
    params = params_of(body, "classify", use_activation=body.activates)
    job, model = await make_job(state, call, body, inputs_of(body.input), params)
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
    job = await unless_gone(request, ScoreJob.make(state, call, body))
    return reply(await unless_gone(request, job.whole()))


@router.post("/v2/rerank", responses=answers(RerankReply))
@router.post("/v1/rerank", responses=answers(RerankReply))
@router.post("/rerank", responses=answers(RerankReply))
async def rerank(body: RerankRequest, request: Request, state: State, call: TheCall) -> Response:
    """Order documents by how well they fit a query."""
    job = await unless_gone(request, RerankJob.make(state, call, body))
    return reply(await unless_gone(request, job.whole()))


@dataclass(slots=True)
class ScoreJob:
    """Pairs of texts to score, ready to run; batches make it too."""

    request: PoolingRequest
    scoring: Scoring
    model: str

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: ScoreRequest) -> ScoreJob:
        first, second = body.sides()
        return cls(*await _scoring(state, call, body, first, second, body.activates))

    async def scores(self) -> list[float]:
        return [each.outputs.score for each in self.scoring.scores(await self.request.vectors())]

    async def whole(self) -> ScoreReply:
        data = [PairScore(index=i, score=score) for i, score in enumerate(await self.scores())]
        name, usage = f"score-{self.request.call.id}", self.request.usage()
        return ScoreReply(id=name, created=int(time.time()), model=self.model, data=data, usage=usage)


@dataclass(slots=True)
class RerankJob:
    """Documents to order, ready to run; batches make it too."""

    body: RerankRequest
    texts: list[str]
    pairs: ScoreJob

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: RerankRequest) -> RerankJob:
        texts = body.texts or [each if isinstance(each, str) else each["text"] for each in body.documents or ()]
        if body.max_tokens_per_doc is not None:
            body.truncate_prompt_tokens = at_most(state, body.max_tokens_per_doc)
        elif body.truncate:
            body.truncate_prompt_tokens = -1
        if body.truncation_direction is not None:
            body.truncation_side = side_of(body.truncation_direction)
        activate = body.activates if body.raw_scores is None else not body.raw_scores
        query, texts = inputs_of(body.query, "query"), inputs_of(texts, "documents" if body.texts is None else "texts")
        return cls(body, texts, ScoreJob(*await _scoring(state, call, body, query, texts, activate)))

    async def whole(self) -> RerankReply | list[TeiRank]:
        scores = await self.pairs.scores()
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.body.top_n or None]
        if self.body.texts is not None:
            ranks = [TeiRank(index=i, score=scores[i]) for i in order]
            for rank in ranks if self.body.return_text or self.body.return_documents else ():
                rank.text = self.texts[rank.index]
            return ranks
        results = [RerankItem(index=i, relevance_score=scores[i]) for i in order]
        for item in results if self.body.return_documents is not False else ():
            item.document = RerankDocument(text=self.texts[item.index])
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        name, usage = f"rerank-{self.pairs.request.call.id}", self.pairs.request.usage()
        return RerankReply(id=name, model=self.pairs.model, results=results, usage=usage, meta=meta)


async def _scoring(
    state: ServerState, call: Call, body: PoolingBody, first: list[str], second: list[str], activate: bool | None
) -> tuple[PoolingRequest, Scoring, str]:
    state.check_model(body.model, "pooling")
    pooling = state.engine.input_processor.pooling
    if len(first) == 1 and pooling.writes_pairs:
        check_copies("query", len(second), num_characters=len(first[0]))
    scoring = await state.engine.text_pool.run(
        sum(map(len, first)) + sum(map(len, second)), lambda: pooling.scoring(first, second)
    )
    params = params_of(body, scoring.task)
    if scoring.task == "classify":
        params.use_activation = activate
    job, model = await make_job(state, call, body, scoring.prompts, params)
    return job, scoring, model


# ---------------------------------------------------------------- what they share


@dataclass(slots=True)
class EmbeddingJob:
    """An embedding request, ready to run; batches make it too."""

    body: EmbeddingRequest
    request: PoolingRequest
    model: str

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: EmbeddingRequest) -> EmbeddingJob:
        flags = {"normalize": body.normalize, "use_activation": body.use_activation}
        params = params_of(body, "embed", dimensions=body.dimensions, **flags)
        state.check_model(body.model, "pooling")
        texts = state.engine.input_processor.pooling.with_prompt(inputs_of(body.input), body.prompt_name)
        return cls(body, *await make_job(state, call, body, texts, params))

    async def whole(self) -> EmbeddingReply:
        outputs = await self.request.vectors()
        data = [
            EmbeddingItem(index=i, embedding=_encoded(each.outputs.data, self.body)) for i, each in enumerate(outputs)
        ]
        name = f"embd-{self.request.call.id}"
        usage = self.request.usage()
        return EmbeddingReply(id=name, created=int(time.time()), model=self.model, data=data, usage=usage)


async def make_job(
    state: ServerState, call: Call, body: PoolingBody, texts: Sequence[Any], params: PoolingParams
) -> tuple[PoolingRequest, str]:
    call.take_id(body.request_id)
    model = state.check_model(body.model, "pooling")
    timing = {"priority": body.priority, "timeout": body.timeout, "user": body.user, "salt": body.cache_salt}
    return await PoolingRequest.make(state, call, texts, params, **timing), model  # type: ignore[arg-type]


def params_of(body: PoolingBody, task: str | None, **others: Any) -> PoolingParams:
    """Return the parameters of each text. `others`: further fields of PoolingParams."""
    return PoolingParams(
        task=task,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        add_special_tokens=body.add_special_tokens,
        **others,
    )


def at_most(state: ServerState, num_tokens: int) -> int:
    """Return truncate_prompt_tokens for clients whose limit may be more than the model takes."""
    return min(num_tokens, state.engine.input_processor.pooling.prompts.num_kept(-1))


def _encoded(vector: NDArray[np.float32], body: EncodedBody) -> Any:
    return written(vector, body.encoding_format, body.embed_dtype or "float32", body.endianness or "native")


def written(vector: NDArray[np.float32], how: str | None, kind: str = "float32", endianness: str = "native") -> Any:
    """Encode a vector in one of ENCODINGS; in base64, as numbers of this kind and order of bytes."""
    if how == "base64":
        numbers = _bfloat16(vector) if kind == "bfloat16" else vector.astype(kind)
        order = {"native": "=", "little": "<", "big": ">"}[endianness]
        return base64.b64encode(numbers.astype(numbers.dtype.newbyteorder(order)).tobytes()).decode()  # type: ignore[arg-type]
    if how in ("int8", "uint8"):
        scaled = np.clip(np.rint(vector * 127), -127, 127).astype(np.int64)
        return (scaled + (128 if how == "uint8" else 0)).tolist()
    if how in ("binary", "ubinary"):
        bits = np.packbits(vector > 0).astype(np.int64)
        return (bits - (128 if how == "binary" else 0)).tolist()
    return vector.tolist()


def _bfloat16(vector: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest numbers in bfloat16, which numpy does not have: the upper halves of rounded float32."""
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
