"""Endpoints of pooling models: embeddings, scores, rerankings and classes.

The bodies are OpenAI's, vLLM's, Cohere's, Jina's and, where documents are ranked, those of Text Embeddings Inference
(TEI); embeddings as other servers give them are in other_embeddings.py. A request is an ApiRequest whose outputs are
vectors.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray
from pydantic import Field, model_validator
from starlette.responses import Response

from kvasir.errors import PromptTooLongError, RequestError
from kvasir.frontend.requests.pooling import PoolingParams, Scoring
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.outputs import PoolingRequestOutput, RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server.api_request import ApiRequest, check_length, within
from kvasir.server.errors import ApiError, answers, timed_out, too_large
from kvasir.server.http import Call, StrictRoute, TheCall, reply, unless_gone
from kvasir.server.large_bodies import check_copies
from kvasir.server.schema.base import MAX_TOKEN_IDS, Body, Reply, Usage, example, invalid, one_complaint, refused
from kvasir.server.schema.sampling import PromptIds
from kvasir.server.state import ServerState, State

ENCODINGS = ("float", "base64", "int8", "uint8", "binary", "ubinary")
INPUT_KINDS = "must be a text, a list of texts, a list of token ids or a list of such lists."
Texts = Annotated[str | list[str] | PromptIds | list[PromptIds], one_complaint("input", f"input {INPUT_KINDS}")]
_Encoding = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]
_TRUNCATE = Field(
    default=None, ge=-1, description="Keep so many tokens of each text; -1: as many as the model takes. Unset: refuse."
)


TeiSide = Literal["left", "Left", "right", "Right"]


def side_of(direction: TeiSide) -> Literal["left", "right"]:
    return "left" if direction in ("left", "Left") else "right"


class PoolingBody(Body):
    """What all bodies share."""

    max_values = MAX_TOKEN_IDS

    model: str | None = None
    truncate_prompt_tokens: int | None = _TRUNCATE
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="Where truncate_prompt_tokens removes tokens: right (default) or left."
    )
    add_special_tokens: bool = Field(default=True, description="Add special tokens, such as [CLS] and [SEP], to texts.")
    user: str | None = Field(default=None, description="Shown in the server's log.")
    priority: int | None = None
    timeout: float | None = Field(default=None, gt=0)
    request_id: str | None = None

    @model_validator(mode="after")
    def _side_of_something(self) -> Self:
        if self.truncation_side is not None and not self.may_cut():
            raise invalid("truncation_side", "truncation_side needs truncate_prompt_tokens: set both or none.")
        return self

    def may_cut(self) -> bool:
        """Whether texts may lose tokens."""
        return self.truncate_prompt_tokens is not None

    def params(self, task: str | None, **others: Any) -> PoolingParams:
        """Return the parameters of each text. `others`: further fields of PoolingParams."""
        return PoolingParams(
            task=task,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            add_special_tokens=self.add_special_tokens,
            **others,
        )


def refuse_several(body: PoolingBody, *names: str) -> None:
    """Refuse several fields that say the same, such as how long a text may be: only one of them could count."""
    given = [name for name in names if (value := getattr(body, name)) is not None and value is not False]
    if len(given) > 1:
        raise invalid(given[1], f"{' and '.join(given)} say the same thing: give one of them.")


class EmbeddingRequest(PoolingBody):
    model_config = example(input=["The cat sat on the mat.", "A dog barks."])

    input: Texts = Field(description="Texts or token ids to embed; one or many.")
    encoding_format: _Encoding | None = Field(
        default=None,
        description="How numbers are written: float (default), base64 (of float32), or shorter ones: int8 and uint8 "
        "(-127 to 127 for -1 to 1; uint8 adds 128), binary and ubinary (a bit per number, as signed or plain bytes).",
    )
    dimensions: int | None = Field(
        default=None, ge=1, description="Numbers of an embedding, for models that allow fewer than all (Matryoshka)."
    )
    normalize: bool | None = Field(
        default=None, description="Make the length of embeddings 1. Unset: as the model says."
    )
    use_activation: bool | None = Field(default=None, description="vLLM's name of normalize.")
    prompt_name: str | None = Field(default=None, description="A prompt of the model, which is put before each text.")
    messages: Any = refused("embeddings are made of texts: send input.")


class EmbeddingItem(Reply, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str  # numbers are whole ones in some encodings


class EmbeddingReply(Reply, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: Usage


class PoolingBodyRequest(PoolingBody):
    """Whatever a pooler makes: vectors of texts, or of their tokens."""

    model_config = example(input="The cat sat on the mat.", task="token_embed")

    input: Texts
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = Field(
        default=None, description="What to compute. Unset: the model's main task."
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool | None = None
    use_activation: bool | None = Field(
        default=None, description="Apply the pooler's last function: normalise, or make probabilities."
    )
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


class PoolingItem(Reply, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[Any] | str  # numbers, or a list of them for each token


class PoolingReply(Reply, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingItem]
    usage: Usage


class ClassifyRequest(PoolingBody):
    model_config = example(input=["What a day!", "I am not amused."])

    input: Texts
    use_activation: bool | None = Field(default=None, description="Probabilities (default), or the raw numbers.")


class ClassItem(Reply, kw_only=True):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyReply(Reply, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassItem]
    usage: Usage


_SIDE = "must be a text or a list of texts."
_NEWER_NAMES = {"text_1": "queries", "text_2": "documents"}


class ScoreRequest(PoolingBody):
    model_config = example(text_1="What is a cat?", text_2=["A small animal.", "A kind of bread."])

    text_1: Annotated[str | list[str] | None, one_complaint("text_1", f"text_1 {_SIDE}")] = None
    text_2: Annotated[str | list[str] | None, one_complaint("text_2", f"text_2 {_SIDE}")] = None
    queries: Annotated[str | list[str] | None, one_complaint("queries", f"queries {_SIDE}")] = Field(
        default=None, description="vLLM's newer name of text_1."
    )
    documents: Annotated[str | list[str] | None, one_complaint("documents", f"documents {_SIDE}")] = Field(
        default=None, description="vLLM's newer name of text_2."
    )
    use_activation: bool | None = Field(default=None, description="Apply the cross-encoder's last function (default).")

    @model_validator(mode="after")
    def _two_sides(self) -> Self:
        for name, newer in _NEWER_NAMES.items():
            refuse_several(self, name, newer)
            if getattr(self, name) is None and getattr(self, newer) is None:
                raise invalid(name, f"{name} is missing: give text_1 and text_2, or queries and documents.")
        return self

    def sides(self) -> tuple[list[str], list[str]]:
        first, second = (newer if getattr(self, name) is None else name for name, newer in _NEWER_NAMES.items())
        return inputs_of(getattr(self, first), first), inputs_of(getattr(self, second), second)


class PairScore(Reply, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreReply(Reply, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: Usage


class RerankRequest(PoolingBody):
    """Cohere's and Jina's body; with `texts` in place of documents, TEI's, whose reply is a plain list."""

    model_config = example(query="What is a cat?", documents=["A small animal.", "A kind of bread."], top_n=1)

    query: str
    documents: Annotated[
        list[str | dict[str, Any]] | None, one_complaint("documents", "documents must be a list of texts.")
    ] = None
    top_n: int | None = Field(default=None, ge=1, description="How many of the best are returned. Unset: all.")
    return_documents: bool | None = Field(default=None, description="Repeat the documents in the reply.")
    max_tokens_per_doc: int | None = Field(
        default=None, ge=1, description="Cohere's name: query and document together keep so many tokens."
    )
    rank_fields: Any = refused("documents are texts.")
    texts: list[str] | None = Field(default=None, description="TEI's name of documents.")
    raw_scores: bool | None = Field(default=None, description="TEI: scores before the last function.")
    return_text: bool | None = Field(default=None, description="TEI's name of return_documents.")
    truncate: bool | None = Field(default=None, description="TEI: cut what is too long.")
    truncation_direction: TeiSide | None = Field(default=None, description="TEI: where it is cut; right (default).")

    @model_validator(mode="after")
    def _one_list(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise invalid("documents", "Give documents (Cohere, Jina) or texts (TEI).")
        if not (self.documents or self.texts):
            raise invalid("documents", "documents is empty: give at least one.")
        for each in self.documents or ():
            if isinstance(each, dict) and not isinstance(each.get("text"), str):
                raise invalid("documents", "A document is a text, or an object with a text.")
        refuse_several(self, "max_tokens_per_doc", "truncate_prompt_tokens", "truncate")
        return self

    def may_cut(self) -> bool:
        return super().may_cut() or self.max_tokens_per_doc is not None or bool(self.truncate)


class RerankDocument(Reply, kw_only=True):
    text: str


class RerankItem(Reply, kw_only=True):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankReply(Reply, kw_only=True):
    id: str
    model: str
    results: list[RerankItem]
    usage: Usage
    meta: dict[str, Any]


class TeiRank(Reply, kw_only=True):
    index: int
    score: float
    text: str | UnsetType = UNSET


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
    ) -> PoolingRequest:
        async with within(state, call, timeout):
            prompts = await read_texts(state, texts, pooling)
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
    params = body.params(
        body.task,
        dimensions=body.dimensions,
        normalize=body.normalize,
        use_activation=body.use_activation,
        step_tag_id=body.step_tag_id,
        returned_token_ids=body.returned_token_ids,
    )
    job, model = await make_job(state, call, body, inputs_of(body.input), params)
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
    params = body.params("classify", use_activation=body.use_activation)
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
        return cls(*await _scoring(state, call, body, first, second, body.use_activation))

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
        activate = None if body.raw_scores is None else not body.raw_scores
        query, texts = inputs_of(body.query, "query"), inputs_of(texts, "documents" if body.texts is None else "texts")
        return cls(body, texts, ScoreJob(*await _scoring(state, call, body, query, texts, activate)))

    async def whole(self) -> RerankReply | list[TeiRank]:
        scores = await self.pairs.scores()
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.body.top_n]
        shows_texts = self.body.return_documents or self.body.return_text
        if self.body.texts is not None:
            ranks = [TeiRank(index=i, score=scores[i]) for i in order]
            for rank in ranks if shows_texts else ():
                rank.text = self.texts[rank.index]
            return ranks
        results = [RerankItem(index=i, relevance_score=scores[i]) for i in order]
        for item in results if shows_texts else ():
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
    params = body.params(scoring.task)
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
        params = body.params("embed", dimensions=body.dimensions, **flags)
        state.check_model(body.model, "pooling")
        texts = state.engine.input_processor.pooling.with_prompt(inputs_of(body.input), body.prompt_name)
        return cls(body, *await make_job(state, call, body, texts, params))

    async def whole(self) -> EmbeddingReply:
        outputs = await self.request.vectors()
        how = self.body.encoding_format
        data = [EmbeddingItem(index=i, embedding=written(each.outputs.data, how)) for i, each in enumerate(outputs)]
        name = f"embd-{self.request.call.id}"
        usage = self.request.usage()
        return EmbeddingReply(id=name, created=int(time.time()), model=self.model, data=data, usage=usage)


async def make_job(
    state: ServerState, call: Call, body: PoolingBody, texts: Sequence[Any], params: PoolingParams
) -> tuple[PoolingRequest, str]:
    call.take_id(body.request_id)
    model = state.check_model(body.model, "pooling")
    timing = {"priority": body.priority, "timeout": body.timeout, "user": body.user}
    return await PoolingRequest.make(state, call, texts, params, **timing), model  # type: ignore[arg-type]


def inputs_of(given: str | Sequence[Any], field: str = "input") -> list[Any]:
    """The inputs as a list: one text and one list of token ids are one input. `field`: where the body has them."""
    texts: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not texts:
        raise RequestError(f"{field} is empty: give at least one text.", field)
    for place, text in enumerate(texts):
        if not len(text):
            what = field if isinstance(given, str) else f"{field}[{place}]"
            raise RequestError(f"{what} is empty: give it at least one character.", field)
    return texts


def at_most(state: ServerState, num_tokens: int) -> int:
    """Return truncate_prompt_tokens for clients whose limit may be more than the model takes."""
    return min(num_tokens, state.engine.input_processor.pooling.prompts.num_kept(-1))


def written(vector: NDArray[np.float32], how: str | None) -> Any:
    """Encode a vector in one of ENCODINGS."""
    if how == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, np.float32).tobytes()).decode()
    if how in ("int8", "uint8"):
        scaled = np.clip(np.rint(vector * 127), -127, 127).astype(np.int64)
        return (scaled + (128 if how == "uint8" else 0)).tolist()
    if how in ("binary", "ubinary"):
        bits = np.packbits(vector > 0).astype(np.int64)
        return (bits - (128 if how == "binary" else 0)).tolist()
    return vector.tolist()
