"""Bodies of the endpoints of pooling models: embeddings, scores, rerankings, classes. OpenAI's, vLLM's, Cohere's,
Jina's, Ollama's and Text Embeddings Inference's (TEI)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from kvasir.server.schema.base import MAX_TOKEN_IDS, Body, Reply, Usage, example, invalid, one_complaint, refused
from kvasir.server.schema.sampling import PromptIds

ENCODINGS = ("float", "base64", "int8", "uint8", "binary", "ubinary")
_INPUT = "must be a text, a list of texts, a list of token ids or a list of such lists."
Texts = Annotated[str | list[str] | PromptIds | list[PromptIds], one_complaint("input", f"input {_INPUT}")]
_Encoding = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]
_TRUNCATE = Field(
    default=None, ge=-1, description="Keep so many tokens of each text; -1: as many as the model takes. Unset: refuse."
)


class PoolingBody(Body):
    """What all bodies share."""

    max_values = MAX_TOKEN_IDS

    model: str | None = None
    truncate_prompt_tokens: int | None = _TRUNCATE
    user: str | None = Field(default=None, description="Shown in the server's log.")
    priority: int | None = None
    timeout: float | None = Field(default=None, gt=0)
    request_id: str | None = None


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


class ScoreRequest(PoolingBody):
    model_config = example(text_1="What is a cat?", text_2=["A small animal.", "A kind of bread."])

    text_1: Annotated[str | list[str], one_complaint("text_1", f"text_1 {_SIDE}")]
    text_2: Annotated[str | list[str], one_complaint("text_2", f"text_2 {_SIDE}")]
    use_activation: bool | None = Field(default=None, description="Apply the cross-encoder's last function (default).")


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

    @model_validator(mode="after")
    def _one_list(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise invalid("documents", "Give documents (Cohere, Jina) or texts (TEI).")
        if not (self.documents or self.texts):
            raise invalid("documents", "documents is empty: give at least one.")
        for each in self.documents or ():
            if isinstance(each, dict) and not isinstance(each.get("text"), str):
                raise invalid("documents", "A document is a text, or an object with a text.")
        return self


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


class TeiEmbedRequest(Body):
    """TEI's body."""

    max_values = MAX_TOKEN_IDS
    model_config = example(inputs=["The cat sat on the mat."])

    inputs: Annotated[str | list[str] | PromptIds | list[PromptIds], one_complaint("inputs", f"inputs {_INPUT}")]
    normalize: bool | None = None
    truncate: bool | None = Field(default=None, description="Cut texts that are too long; otherwise they are refused.")
    truncation_direction: Literal["right", "Right"] | None = None
    prompt_name: str | None = None
    dimensions: int | None = Field(default=None, ge=1)


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
