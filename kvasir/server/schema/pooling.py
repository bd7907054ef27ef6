"""Bodies and replies of pooling models: embeddings, scores, rerankings and classes.

The bodies are OpenAI's, vLLM's, Cohere's, Jina's and, where documents are ranked, those of Text Embeddings Inference
(TEI). Those of other embedding routes are in routes/other_embeddings.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from kvasir.errors import RequestError
from kvasir.server.schema.base import MAX_TOKEN_IDS, Body, Reply, Usage, example, invalid, one_complaint, refused
from kvasir.server.schema.sampling import CacheSalt, PromptIds

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
    cache_salt: CacheSalt | None = Field(
        default=None, description="Share cached prefixes only with requests of the same salt."
    )
    padding: Any = refused("texts are computed without padding.", "do_not_pad")
    mm_processor_kwargs: Any = refused("the model takes text only.", {})

    @model_validator(mode="after")
    def _side_of_something(self) -> Self:
        if self.truncation_side is not None and not self.may_cut():
            raise invalid("truncation_side", "truncation_side needs truncate_prompt_tokens: set both or none.")
        return self

    def may_cut(self) -> bool:
        """Whether texts may lose tokens."""
        return self.truncate_prompt_tokens is not None


def refuse_several(body: PoolingBody, *names: str) -> None:
    """Refuse several fields that say the same, such as how long a text may be: only one of them could count."""
    given = [name for name in names if (value := getattr(body, name)) is not None and value is not False]
    if len(given) > 1:
        raise invalid(given[1], f"{' and '.join(given)} say the same thing: give one of them.")


class EncodedBody(PoolingBody):
    """A body of requests whose numbers may come as base64."""

    encoding_format: Any = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        default=None, description="Type of the numbers in base64: float32 (default), float16 or bfloat16."
    )
    endianness: Literal["native", "little", "big"] | None = Field(
        default=None, description="Order of their bytes: native (default; the server's), little or big."
    )

    @model_validator(mode="after")
    def _type_of_something(self) -> Self:
        for name, default in (("embed_dtype", "float32"), ("endianness", "native")):
            if getattr(self, name) not in (None, default) and self.encoding_format != "base64":
                raise invalid(name, f"{name} is for base64: set encoding_format to base64, or leave {name} out.")
        return self


class EmbeddingRequest(EncodedBody):
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


class PoolingBodyRequest(EncodedBody):
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


class ClassifyingBody(PoolingBody):
    """A body of requests whose results a classifier makes."""

    use_activation: bool | None = Field(
        default=None, description="Apply the model's last function, which makes probabilities (default)."
    )
    activation: bool | None = Field(default=None, description="Older name of use_activation.")
    softmax: bool | None = Field(default=None, description="Older name of use_activation.")

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        given = [name for name in ("use_activation", "activation", "softmax") if getattr(self, name) is not None]
        if len(given) > 1:
            raise invalid(given[1], f"{' and '.join(given)} say the same thing: give one of them.")
        return self

    @property
    def activates(self) -> bool | None:
        given = (self.use_activation, self.activation, self.softmax)
        return next((value for value in given if value is not None), None)


class ClassifyRequest(ClassifyingBody):
    model_config = example(input=["What a day!", "I am not amused."])

    input: Texts


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
# vLLM's names of both sides.
_SIDES = (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2"))
_Side = str | list[str] | None


class ScoreRequest(ClassifyingBody):
    model_config = example(text_1="What is a cat?", text_2=["A small animal.", "A kind of bread."])

    text_1: Annotated[_Side, one_complaint("text_1", f"text_1 {_SIDE}")] = None
    text_2: Annotated[_Side, one_complaint("text_2", f"text_2 {_SIDE}")] = None
    queries: Annotated[_Side, one_complaint("queries", f"queries {_SIDE}")] = Field(
        default=None, description="vLLM's newer name of text_1."
    )
    documents: Annotated[_Side, one_complaint("documents", f"documents {_SIDE}")] = Field(
        default=None, description="vLLM's newer name of text_2."
    )
    items: Annotated[_Side, one_complaint("items", f"items {_SIDE}")] = Field(
        default=None, description="vLLM's other newer name of text_2."
    )
    data_1: Annotated[_Side, one_complaint("data_1", f"data_1 {_SIDE}")] = Field(
        default=None, description="vLLM's other name of text_1."
    )
    data_2: Annotated[_Side, one_complaint("data_2", f"data_2 {_SIDE}")] = Field(
        default=None, description="vLLM's other name of text_2."
    )

    @model_validator(mode="after")
    def _two_sides(self) -> Self:
        for names in _SIDES:
            refuse_several(self, *names)
            if all(getattr(self, name) is None for name in names):
                raise invalid(names[0], f"{names[0]} is missing: give text_1 and text_2, or queries and documents.")
        return self

    def sides(self) -> tuple[list[str], list[str]]:
        first, second = (next(name for name in names if getattr(self, name) is not None) for names in _SIDES)
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


class RerankRequest(ClassifyingBody):
    """Cohere's and Jina's body; with `texts` in place of documents, TEI's, whose reply is a plain list."""

    model_config = example(query="What is a cat?", documents=["A small animal.", "A kind of bread."], top_n=1)

    query: str
    documents: Annotated[
        list[str | dict[str, Any]] | None, one_complaint("documents", "documents must be a list of texts.")
    ] = None
    top_n: int | None = Field(default=None, ge=0, description="How many of the best are returned. Unset or 0: all.")
    return_documents: bool | None = Field(
        default=None, description="Repeat the documents in the reply (default: yes, as in vLLM's and Jina's)."
    )
    max_tokens_per_doc: int | None = Field(
        default=None, ge=1, description="Cohere's name: query and document together keep so many tokens."
    )
    rank_fields: Any = refused("documents are texts.")
    texts: list[str] | None = Field(default=None, description="TEI's name of documents.")
    raw_scores: bool | None = Field(default=None, description="TEI: scores before the last function.")
    return_text: bool | None = Field(default=None, description="TEI: repeat the texts (default: no).")
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
        if self.raw_scores is not None and self.activates is not None:
            raise invalid("raw_scores", "raw_scores and use_activation say the same thing: give one of them.")
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


# ---------------------------------------------------------------- what they share


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
