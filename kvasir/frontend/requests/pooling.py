"""Requests to a pooling model: texts and pairs of texts in, vectors out. API process.

PoolingParams are what callers ask for, with vLLM's names. PoolingProcessor checks them and makes EngineRequests, and
PooledState collects what steps return.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvasir.config.engine import ModelConfig
from kvasir.config.pooling import PoolerSpec
from kvasir.errors import RequestError
from kvasir.frontend.requests.prompts import PromptProcessor, PromptType, TokenizedPrompt, other_entries, text_of
from kvasir.frontend.requests.state import Ending, RequestState
from kvasir.messages import EngineRequest, Part, RowPooling, Terms
from kvasir.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from kvasir.sampling_params import RequestOutputKind, check_flag, check_token_ids, check_whole

Pair: TypeAlias = tuple[str, str]
# Names of tasks that callers use -> ours; "score" is what a cross-encoder's one class says.
_TASKS = {"score": "classify", "encode": "token_embed", "reward": "token_classify"}


@dataclass(kw_only=True)
class PoolingParams:
    """Parameters of a request to a pooling model: which vectors are made of its hidden states."""

    truncate_prompt_tokens: int | None = None  # keep so many tokens of a prompt; -1: as many as the model takes
    truncation_side: str | None = None  # where the others are removed: right (None) or left
    add_special_tokens: bool = True  # such as [CLS] and [SEP], to texts
    dimensions: int | None = None  # of an embedding, for models that allow shorter ones
    use_activation: bool | None = None  # normalise an embedding, make probabilities of classes; None: as the model says
    normalize: bool | None = None  # an older name of use_activation, for embeddings
    task: str | None = None  # embed, classify, token_embed, token_classify; None: the model's main one
    step_tag_id: int | None = None  # of step pooling: the token whose vectors are returned
    returned_token_ids: list[int] | None = None  # of step pooling: the entries of a vector that are returned
    skip_reading_prefix_cache: bool | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Raise RequestError for values that no model takes."""
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        self.add_special_tokens = check_flag("add_special_tokens", self.add_special_tokens)
        if self.truncation_side not in (None, "left", "right"):
            raise RequestError(
                f"truncation_side must be left or right, not {self.truncation_side!r}", "truncation_side"
            )
        if None not in (self.use_activation, self.normalize) and self.use_activation != self.normalize:
            raise RequestError("normalize is an older name of use_activation: give one of them", "normalize")
        if self.truncate_prompt_tokens is not None:
            check_whole("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        if self.dimensions is not None:
            check_whole("dimensions", self.dimensions, 1)
        if self.step_tag_id is not None:
            check_whole("step_tag_id", self.step_tag_id, 0)
        if self.returned_token_ids is not None:
            self.returned_token_ids = check_token_ids("returned_token_ids", self.returned_token_ids)
        if self.task is not None and not isinstance(self.task, str):
            raise RequestError(f"task must be a text, not {self.task!r}", "task")
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise RequestError("the output of a pooling request comes once, at its end", "output_kind")

    def clone(self) -> PoolingParams:
        return copy.copy(self)


class PoolingProcessor:
    """Makes requests for one pooling model."""

    def __init__(self, config: ModelConfig, prompts: PromptProcessor) -> None:
        self.config, self.prompts = config, prompts
        self.poolers = {pooler.task: pooler for pooler in config.poolers}

    def pooler_for(self, task: str | None) -> PoolerSpec:
        """The pooler of a task; None is the model's main one."""
        if not self.poolers:
            raise RequestError(
                "this model generates text: it does not embed, classify or score. Use an embedding model or a "
                "classifier, or start this one with runner=pooling.",
                "task",
            )
        if task is None:
            return self.config.poolers[0]
        found = self.poolers.get(_TASKS.get(task, task))
        if found is None:
            raise RequestError(f"this model does not do {task!r}; it does {', '.join(self.poolers)}", "task")
        return found

    def with_prompt(self, texts: Sequence[Any], name: str | None) -> list[Any]:
        """The texts, each after the model's prompt of this name, or after its default one."""
        prompts = self.config.prompts
        if name is not None and name not in prompts:
            known = f"it has {', '.join(prompts)}" if prompts else "it has none"
            raise RequestError(f"this model has no prompt called {name!r}; {known}", "prompt_name")
        prefix = prompts.get(name or self.config.default_prompt or "", "")
        return [_prefixed(prefix, text) for text in texts] if prefix else list(texts)

    @property
    def writes_pairs(self) -> bool:
        """Whether a template writes both texts of a pair into one prompt."""
        return "classify" in self.poolers and bool(self.config.chat_template)

    def scoring(
        self, first: Sequence[PromptType], second: Sequence[PromptType], chat_template: str | None = None
    ) -> Scoring:
        """Make the requests that score pairs of texts: each of `first` with the one of `second` in its place, or one
        with all. A template, here or among the settings, writes the prompt of a pair for a cross-encoder."""
        if not first or not second:
            raise RequestError("there is nothing to score: both sides need at least one text", "text_1")
        if len(first) == 1:
            first = list(first) * len(second)
        if len(first) != len(second):
            raise RequestError(
                f"there are {len(first)} first texts and {len(second)} second ones; give one and many, or as many of "
                f"both",
                "text_2",
            )
        if (pooler := self.poolers.get("classify")) is not None:
            if pooler.size != 1:
                raise RequestError(
                    f"this model has {pooler.size} classes, so it cannot score pairs: a cross-encoder has one. Use "
                    f"classify.",
                    "text_1",
                )
            texts = [*first, *second]
            if not all(isinstance(text, str) for text in texts):
                raise RequestError("a cross-encoder scores pairs of texts; token ids cannot be paired", "text_1")
            pairs: list[Any] = list(zip(first, second, strict=True))
            template = chat_template or self.config.chat_template
            if template is not None:
                pairs = [self._written(query, document, template) for query, document in pairs]
            return Scoring("classify", pairs, [])
        if chat_template is not None:
            raise RequestError("chat_template is for cross-encoders; this model embeds each text by itself", "prompt")
        task = "embed" if "embed" in self.poolers else self.pooler_for("token_embed").task
        texts, places = [], {}  # a text that is in many pairs is embedded once
        for text in [*first, *second]:
            shown = text if isinstance(text, str) else repr(text)
            if shown not in places:
                places[shown] = len(texts)
                texts.append(text)
        where = [places[text if isinstance(text, str) else repr(text)] for text in [*first, *second]]
        return Scoring(task, texts, list(zip(where[: len(first)], where[len(first) :], strict=True)))

    def _written(self, query: str, document: str, template: str) -> str:
        """Write the prompt of a pair, whose texts are messages of the roles query and document, as in vLLM."""
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return self.prompts.render(messages, chat_template=template, add_generation_prompt=False)

    def tokenize_texts(self, texts: Sequence[PromptType | Pair], params: PoolingParams) -> list[Any]:
        """Tokenize the texts among these prompts in one call, as `params` say. What `process` reads as quickly by
        itself, such as token ids, stays as it is and is not checked."""
        whole = params.truncate_prompt_tokens is None
        if whole and all(type(each) is list for each in texts):
            return list(texts)
        if whole and not any(_is_pair(each) for each in texts):
            return self.prompts.tokenize(cast(Sequence[PromptType], texts), params.add_special_tokens)
        return list(self.tokenize(texts, params))

    def tokenize(self, texts: Sequence[PromptType | Pair], params: PoolingParams) -> list[TokenizedPrompt]:
        """Tokenize texts, and pairs of texts for a model that reads two; token ids stay as they are. All are cut as
        `params` say."""
        truncate, side, special = params.truncate_prompt_tokens, params.truncation_side, params.add_special_tokens
        keep = None if truncate is None else self.prompts.num_kept(truncate)
        if keep is None and not any(_is_pair(each) for each in texts):
            return self.prompts.read_all(list(texts), special)  # type: ignore[arg-type]
        ready: dict[int, TokenizedPrompt] = {}
        cut = {i: text for i, each in enumerate(texts) if (text := _text_or_pair(each)) is not None}
        encoded = self._encode(list(cut.values()), keep, side or "right", special) if cut else []
        for i, (ids, kinds) in zip(cut, encoded, strict=True):
            given = texts[i]
            prompt: Any = {**given, "prompt_token_ids": ids} if isinstance(given, Mapping) else ids
            ready[i] = self._with_kinds(self.prompts.read(prompt), kinds, cut[i])
        for i, each in enumerate(texts):
            if i not in ready:
                ready[i] = self.prompts.read(each, truncate, side or "right")  # type: ignore[arg-type]
        return [ready[i] for i in range(len(texts))]

    def _encode(
        self, texts: list[str | Pair], keep: int | None, side: str, add_special_tokens: bool
    ) -> list[tuple[list[int], list[int]]]:
        for text in texts:
            for one in text if isinstance(text, tuple) else (text,):
                if not isinstance(one, str):
                    raise RequestError(f"a text must be a string, not {type(one).__name__}", "prompt")
        return self.prompts.tokenizer.encode_pairs(texts, keep, side, add_special_tokens)

    def _with_kinds(self, prompt: TokenizedPrompt, kinds: list[int], text: str | Pair) -> TokenizedPrompt:
        shown = text if isinstance(text, str) else text[1]
        if self.config.num_token_types < 2 or not any(kinds):
            return TokenizedPrompt(prompt.token_ids, prompt.array, shown, prompt.salt)
        shift = np.array(kinds, np.int32) * self.config.vocab_size  # see DecoderSpec.num_token_types
        return TokenizedPrompt(prompt.token_ids, prompt.array + shift, shown, prompt.salt)

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: PoolingParams,
        key: int,
        arrival_time: float,
        terms: Terms | None = None,
    ) -> tuple[EngineRequest, PooledState]:
        """The request for the core, and its state for OutputProcessor."""
        params.verify()
        pooler = self.pooler_for(params.task)
        if _is_pair(prompt) or text_of(prompt) is not None:
            (tokenized,) = self.tokenize([prompt], params)
        else:
            tokenized = self.prompts.read(prompt, params.truncate_prompt_tokens, params.truncation_side or "right")
        if not tokenized.token_ids:
            raise RequestError("The text is empty: it has no tokens. Send a text with at least one token.", "prompt")
        activate = params.use_activation if params.use_activation is not None else params.normalize
        self._check(params, pooler)
        request = EngineRequest(
            key,
            tokenized.array,
            0,
            stream=False,
            cache_salt=tokenized.salt,
            reads_cache=not (pooler.needs_all_tokens or params.skip_reading_prefix_cache),
            terms=terms or Terms(),
            pooling=RowPooling(pooler.task, len(tokenized.array), activate is not False),
        )
        state = PooledState(
            key,
            request_id,
            tokenized.text,
            tokenized.token_ids,
            RequestMetrics(arrival_time),
            kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            pooler=pooler,
            dimensions=params.dimensions,
            normalizes=activate is not False and (pooler.function == "normalize" or activate is True),
            step_tag_id=pooler.step_tag_id if params.step_tag_id is None else params.step_tag_id,
            returned_token_ids=tuple(params.returned_token_ids or pooler.returned_token_ids),
        )
        return request, state

    def _check(self, params: PoolingParams, pooler: PoolerSpec) -> None:
        if params.dimensions is not None:
            if not pooler.task.endswith("embed"):
                raise RequestError(f"dimensions is for embeddings, but the task is {pooler.task}", "dimensions")
            if not pooler.is_matryoshka:
                raise RequestError(
                    "this model's embeddings cannot be shortened: it was not trained for that (Matryoshka). Leave "
                    'dimensions out, or, if it was, start the engine with hf_overrides={"is_matryoshka": true}.',
                    "dimensions",
                )
            if params.dimensions > pooler.size:
                raise RequestError(
                    f"dimensions={params.dimensions} is more than the {pooler.size} that this model's embeddings have",
                    "dimensions",
                )
            allowed = self.config.hf.get("matryoshka_dimensions")
            if isinstance(allowed, list) and allowed and params.dimensions not in allowed:
                raise RequestError(
                    f"dimensions={params.dimensions} is not possible; the model was trained for "
                    f"{', '.join(map(str, allowed))}",
                    "dimensions",
                )
        if (params.step_tag_id is not None or params.returned_token_ids) and pooler.pooling != "step":
            raise RequestError("step_tag_id and returned_token_ids are for models with step pooling", "step_tag_id")
        if max(params.returned_token_ids or (), default=0) >= pooler.size:
            raise RequestError(
                f"returned_token_ids must be from 0 to {pooler.size - 1}, the entries of this model's vectors, but has "
                f"{max(params.returned_token_ids or ())}",
                "returned_token_ids",
            )


def num_tokens(prompt: PromptType) -> int:
    """Number of tokens of a prompt that may not be checked yet; 0 if it is not tokenized."""
    if type(prompt) is list:
        return len(prompt)
    if isinstance(prompt, TokenizedPrompt):
        return len(prompt.token_ids)
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    return len(ids) if isinstance(ids, Sized) and not isinstance(ids, str) else 0


def _prefixed(prefix: str, prompt: Any) -> Any:
    """Return the prompt with `prefix` before its text; token ids stay as they are."""
    text = text_of(prompt)
    if text is None:
        return prompt
    return {**prompt, "prompt": prefix + text} if isinstance(prompt, Mapping) else prefix + text


def _text_or_pair(prompt: PromptType | Pair) -> str | Pair | None:
    """Return the text or pair that must still be tokenized. A prompt with unknown entries has none: `read` refuses
    it."""
    if _is_pair(prompt):
        return cast(Pair, prompt)
    given = cast(PromptType, prompt)
    return None if other_entries(given) else text_of(given)


def _is_pair(prompt: PromptType | Pair) -> bool:
    return isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[0], str)


@dataclass(slots=True, eq=False)
class PooledState(RequestState):
    """A request to a pooling model and what steps have returned for it."""

    pooler: PoolerSpec | None = None
    dimensions: int | None = None
    normalizes: bool = False  # the vector has length 1
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    values: list[NDArray[np.float32]] = field(default_factory=list)
    positions: list[NDArray[np.int32]] = field(default_factory=list)  # of vectors of tokens
    ending: Ending | None = None

    def add_pooled(self, values: NDArray[np.float32], positions: NDArray[np.int32] | None) -> None:
        """Add [n, size] vectors: one of the prompt, or one for each of some tokens."""
        self.values.append(values)
        if positions is not None:
            self.positions.append(positions)

    def completion(self, index: int, ending: Ending | None) -> CompletionOutput:
        self.ending = ending
        return CompletionOutput(index, "", [])

    def output(self, completions: list[CompletionOutput], finished: bool) -> RequestOutput:
        reason, said = self.ending or (None, None)
        done = reason == "stop"
        return PoolingRequestOutput(  # type: ignore[return-value]
            self.request_id,
            PoolingOutput(self._data()) if done else None,
            self.prompt_token_ids,
            finished,
            self.num_cached,
            self.metrics,
            reason,
            said if isinstance(said, str) else None,
        )

    def _data(self) -> NDArray[np.float32]:
        assert self.pooler is not None, "the processor sets it"
        if not self.values:  # all its tokens are skipped
            return np.zeros((0, self.pooler.size), np.float32)
        found = np.concatenate(self.values)
        if self.positions:
            positions = np.concatenate(self.positions)
            _, first = np.unique(positions, return_index=True)  # after a preemption some come twice
            found, positions = found[first], positions[first]
            if self.step_tag_id is not None:
                tags = np.array(self.prompt_token_ids) == self.step_tag_id
                found = found[tags[positions]]
            if self.returned_token_ids:
                found = found[:, list(self.returned_token_ids)]
        if self.dimensions is not None:
            found = found[:, : self.dimensions]
        # The worker has normalised whole vectors, where the model says so.
        rescaled = self.dimensions is not None or self.pooler.function != "normalize"
        if self.normalizes and rescaled and self.pooler.task.endswith("embed"):
            found = found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), 1e-12)
        return found if self.pooler.is_per_token else found[0]


def by_key(part: Part) -> dict[int, tuple[NDArray[np.float32], NDArray[np.int32] | None]]:
    """Return the vectors of a step by their lines of the output, with the positions of single tokens."""
    values, positions = part.floats["values"], part.ints.get("positions")
    if positions is None:
        return {line: (values[i : i + 1], None) for i, line in enumerate(part.index.tolist())}
    order = np.argsort(part.index, kind="stable")
    lines, starts = np.unique(part.index[order], return_index=True)
    pieces = np.split(order, starts[1:])
    return {int(line): (values[own], positions[own]) for line, own in zip(lines, pieces, strict=True)}


# ---------------------------------------------------------------- scores of pairs


@dataclass(slots=True)
class Scoring:
    """The requests whose results score pairs of texts."""

    task: str
    prompts: list[Any]  # pairs, or texts that are embedded
    pairs: list[tuple[int, int]]  # of the texts that are embedded

    def scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        if self.task == "classify":
            return [ScoringRequestOutput.from_base(each) for each in outputs]
        return [self._compare(outputs[first], outputs[second]) for first, second in self.pairs]

    def _compare(self, first: PoolingRequestOutput, second: PoolingRequestOutput) -> ScoringRequestOutput:
        a, b = first.outputs.data, second.outputs.data
        if self.task == "embed":
            score = float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
        else:  # late interaction: for each token of the first text, the best token of the second
            score = float((a @ b.T).max(axis=1).sum())
        return ScoringRequestOutput(
            second.request_id,
            ScoringOutput(score),
            first.prompt_token_ids + second.prompt_token_ids,
            finished=True,
            num_cached_tokens=(first.num_cached_tokens or 0) + (second.num_cached_tokens or 0),
            metrics=second.metrics,
            finish_reason=second.finish_reason,
        )
