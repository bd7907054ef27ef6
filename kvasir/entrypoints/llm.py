"""LLM: completes, embeds or scores many prompts at once and returns outputs in order. The engine runs in the caller's
process.

from kvasir import LLM, SamplingParams

with LLM("path/to/model") as llm:
    for output in llm.generate(["Hello", "Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from kvasir.config.args import EngineArgs
from kvasir.entrypoints import MissingVllmMethods
from kvasir.entrypoints.interrupts import delay_full_collections, delay_interrupts
from kvasir.entrypoints.llm_engine import LLMEngine
from kvasir.errors import EngineError, OverloadedError, RequestError
from kvasir.frontend.requests.input import default_sampling_params
from kvasir.frontend.requests.metrics import Metric
from kvasir.frontend.requests.pooling import PoolingParams, num_tokens
from kvasir.frontend.requests.prompts import PromptType, TextPrompt
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.lora.host import LoRARequest
from kvasir.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from kvasir.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
ProgressBar: TypeAlias = bool | Callable[..., Any]  # False shows none; a callable replaces tqdm
Message: TypeAlias = Mapping[str, Any]


class LLM(MissingVllmMethods):
    """Every setting of docs/configuration.md is a keyword argument, under its vLLM name."""

    def __init__(self, model: str, **settings: Any) -> None:
        self._start(EngineArgs(model, **settings))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        if args.target_step_ms is None:  # whole batches are asked for, so nobody waits for single tokens
            vars(args)["target_step_ms"] = 0.0
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._ids = count()
        self._lock = threading.Lock()  # concurrent calls run one after another

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        timeout: float | Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many. Returns outputs in the order of the prompts.

        If any prompt or parameter is wrong, a RequestError names it, and none of them runs. `priority` (lower is
        scheduled first, with scheduling_policy=priority), `timeout` (in seconds, after which a request ends with
        finish_reason "timeout") and `lora_request` (an adapter) are one value for all prompts, or one for each.
        """
        batch = [cast(PromptType, prompts)] if _is_one_prompt(prompts) else list(cast(Sequence[PromptType], prompts))
        params = self._params_for(batch, sampling_params)
        priorities = _one_each("priority", priority, 0, len(batch))
        timeouts = _one_each("timeout", timeout, None, len(batch))
        adapters = _one_each("lora_request", lora_request, None, len(batch))
        terms = [
            {"priority": p, "timeout": t, "lora_request": a}
            for p, t, a in zip(priorities, timeouts, adapters, strict=True)
        ]
        with self._lock:
            return self._generate(batch, params, terms, use_tqdm)

    @delay_full_collections()
    def _generate(
        self, batch: list[PromptType], params: list[SamplingParams], terms: list[dict[str, Any]], use_tqdm: ProgressBar
    ) -> list[RequestOutput]:
        if self.llm_engine.has_unfinished_requests():
            raise RequestError("llm_engine has requests that were added by hand; step it until they end, or abort them")
        ids = [str(next(self._ids)) for _ in batch]
        try:
            batch = self.llm_engine.input_processor.prompts.tokenize(batch)
            for i, (request_id, prompt, each) in enumerate(zip(ids, batch, params, strict=True)):
                self._add(request_id, prompt, each, terms[i], f"prompt {i}: " if len(batch) > 1 else "")
            return self._run(ids, use_tqdm)
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: ProgressBar = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of {"role": ..., "content": ...}."""
        if not messages:
            raise RequestError("messages is empty; give at least one message", "messages")
        self.llm_engine.input_processor.check_generates()
        is_one = isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if is_one else messages)
        prompts: list[PromptType] = []
        processor, variables = self.llm_engine.input_processor.prompts, dict(chat_template_kwargs or {})
        documents = variables.pop("documents", None)
        for conversation in conversations:
            text = processor.render(
                conversation,
                chat_template=chat_template or None,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template_kwargs=variables,
            )
            prompts.append(TextPrompt(prompt=text))
        # the template has written the special tokens already
        tokenized = processor.tokenize(prompts, add_special_tokens=False)
        return self.generate(tokenized, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: ProgressBar = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest completions of one prompt or many. Returns outputs in the order of the prompts."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, not {type(params).__name__}.", "params")
        sampling = params.to_sampling_params()
        outputs = self.generate(prompts, sampling, use_tqdm=use_tqdm, lora_request=lora_request)
        return [BeamSearchOutput([self._sequence(each, text, params) for text in each.outputs]) for each in outputs]

    def _sequence(self, output: RequestOutput, text: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
        total, token_ids = text.cumulative_logprob, text.token_ids
        assert total is not None, "beam search always computes cumulative_logprob"
        score = total / len(token_ids) ** params.length_penalty
        if text.finish_reason == "stop" and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        tokens = output.prompt_token_ids + token_ids
        tokenizer = self.llm_engine.tokenizer
        decoded = "" if tokenizer is None else tokenizer.decode(tokens)
        return BeamSearchSequence(tokens, total, decoded, text.finish_reason, text.stop_reason, score)

    # ------------------------------------------------------------ pooling models

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Apply the model's pooler to one prompt or many. Returns a vector for each prompt, or for each token.

        `pooling_task` is the task of requests whose parameters name none. `tokenization_kwargs` say how texts are read:
        truncate_prompt_tokens, truncation_side (right or left) and add_special_tokens.

        If any prompt or parameter is wrong, a RequestError names it, and nothing is returned. Prompts are checked while
        those before them run.
        """
        _refuse(lora_request=lora_request)
        batch = [cast(PromptType, prompts)] if _is_one_prompt(prompts) else list(cast(Sequence[PromptType], prompts))
        reading = _reading(truncate_prompt_tokens, tokenization_kwargs)
        return self._pool(batch, pooling_params, reading, use_tqdm, pooling_task)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ProgressBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        prompt_name: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed one text or many. `prompt_name` is one of the model's prompts (config_sentence_transformers.json),
        which is put before each text; None is the model's default, if it has one."""
        _refuse(lora_request=lora_request)
        batch = [cast(PromptType, prompts)] if _is_one_prompt(prompts) else list(cast(Sequence[PromptType], prompts))
        batch = self.llm_engine.input_processor.pooling.with_prompt(batch, prompt_name)
        reading = _reading(truncate_prompt_tokens, tokenization_kwargs)
        outputs = self._pool(batch, pooling_params, reading, use_tqdm, "embed")
        return [EmbeddingRequestOutput.from_base(each) for each in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: ProgressBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Classify one text or many: the probability of each class."""
        _refuse(lora_request=lora_request)
        batch = [cast(PromptType, prompts)] if _is_one_prompt(prompts) else list(cast(Sequence[PromptType], prompts))
        reading = _reading(truncate_prompt_tokens, tokenization_kwargs)
        outputs = self._pool(batch, pooling_params, reading, use_tqdm, "classify")
        return [ClassificationRequestOutput.from_base(each) for each in outputs]

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ProgressBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return what a reward model says of each token of one prompt or many."""
        return self.encode(
            prompts,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="token_classify",
            tokenization_kwargs=tokenization_kwargs,
        )

    def score(
        self,
        data_1: PromptType | Sequence[PromptType],
        data_2: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ProgressBar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit: each of `data_1` to the one of `data_2` in the same place, or one to many. A
        cross-encoder reads both together, in a prompt that `chat_template` writes of messages of the roles query and
        document (None: the setting's, else both texts as its tokenizer joins them); the score of an embedding model is
        the cosine of two embeddings."""
        _refuse(lora_request=lora_request)
        first, second = ([each] if _is_one_prompt(each) else list(each) for each in (data_1, data_2))  # type: ignore[arg-type]
        pooling = self.llm_engine.input_processor.pooling
        scoring = pooling.scoring(cast(Any, first), cast(Any, second), chat_template)
        params = pooling_params or PoolingParams()
        reading = _reading(truncate_prompt_tokens, tokenization_kwargs)
        outputs = self._pool(scoring.prompts, params, reading, use_tqdm, scoring.task)
        return scoring.scores(outputs)

    def _pool(
        self,
        batch: list[Any],
        given: PoolingParams | Sequence[PoolingParams] | None,
        reading: Mapping[str, Any],
        use_tqdm: ProgressBar,
        task: str | None,
    ) -> list[PoolingRequestOutput]:
        is_one = given is None or isinstance(given, PoolingParams | Mapping)  # a mapping is refused below
        params = cast(Sequence[PoolingParams], [given or PoolingParams()] * len(batch) if is_one else given)
        if len(params) != len(batch):
            raise RequestError(
                f"there are {len(batch)} prompts but {len(params)} pooling_params; give one, or one for each",
                "pooling_params",
            )
        alike: dict[int, PoolingParams] = {}  # an object given for many prompts is settled once
        for each in params:
            if id(each) not in alike:
                alike[id(each)] = _with_task(each, task, reading)
        settled = [alike[id(each)] for each in params]
        with self._lock:
            if self.llm_engine.has_unfinished_requests():
                raise RequestError(
                    "llm_engine has requests that were added by hand; step it until they end, or abort them"
                )
            ids = [str(next(self._ids)) for _ in batch]
            pooling = self.llm_engine.input_processor.pooling
            pooling.pooler_for(task)  # a model that generates text is refused before anything is tokenized
            try:
                if settled and all(_reads_alike(each, settled[0]) for each in alike.values()):
                    batch = pooling.tokenize_texts(batch, settled[0])
                outputs = cast(list[Any], self._run(ids, use_tqdm, "Pooling", self._feed(ids, batch, settled)))
            except BaseException:
                self.llm_engine.abort_request(ids)
                raise
        for each in outputs:
            if each.outputs is None:
                raise EngineError(
                    f"request {each.request_id} ended without a result: {each.error or each.finish_reason}"
                )
        return outputs

    def _feed(self, ids: list[str], batch: list[Any], params: list[PoolingParams]) -> Iterator[None]:
        """Add prompts, as many at a time as a step takes: the device computes while the host checks and adds the
        next."""
        settings = self.llm_engine.config
        places: Sequence[int] = range(len(batch))
        sizes = [num_tokens(each) for each in batch]
        if not settings.scheduler.async_scheduling:
            # Nothing overlaps. The shortest first: a CPU's attention computes texts of one length together.
            places = sorted(places, key=sizes.__getitem__)
        taken = settings.scheduler.max_num_batched_tokens * settings.parallel.data_parallel_size
        waiting = 0
        for i in places:
            self._add(ids[i], batch[i], params[i], {}, f"prompt {i}: " if len(batch) > 1 else "")
            waiting += sizes[i]
            if waiting >= taken:
                yield
                waiting -= taken

    # ------------------------------------------------------------ control

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of `generate`: SamplingParams() with the values of the model's generation_config.json."""
        return default_sampling_params(self.llm_engine.config)

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.get_tokenizer()

    def reset_prefix_cache(self) -> bool:
        return self.llm_engine.reset_prefix_cache()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of workers of all copies of the model, or of one copy with include_dp=False."""
        parallel = self.llm_engine.config.parallel
        copy = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return copy * parallel.data_parallel_size if include_dp else copy

    def get_metrics(self) -> list[Metric]:
        return self.llm_engine.get_metrics()

    def close(self) -> None:
        """Free all device memory. The LLM cannot be used afterwards."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ internals

    def _params_for(self, prompts: list[PromptType], given: Params) -> list[SamplingParams]:
        """One set of parameters per prompt, with output only at the end, because a batch is not streamed."""
        if given is None:
            given = self.get_default_sampling_params()
        if not isinstance(given, (SamplingParams, list, tuple)):
            given = [cast(SamplingParams, given)]
        params = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        for wrong in (each for each in params if not isinstance(each, SamplingParams)):
            raise RequestError(f"sampling_params must be SamplingParams, not {type(wrong).__name__}", "sampling_params")
        if len(params) != len(prompts):
            raise RequestError(
                f"there are {len(prompts)} prompts but {len(params)} sampling_params; give one, or one for each",
                "sampling_params",
            )
        final: dict[int, SamplingParams] = {}  # an object given for many prompts is copied once
        for each in params:
            if id(each) not in final:
                final[id(each)] = each.clone()
                final[id(each)].output_kind = RequestOutputKind.FINAL_ONLY
        return [final[id(each)] for each in params]

    def _add(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        terms: dict[str, Any],
        where: str,
    ) -> None:
        try:
            self.llm_engine.add_request(request_id, prompt, params, **terms)
        except OverloadedError as error:
            raise OverloadedError(f"{where}{error}", error.retry_after) from error
        except RequestError as error:
            raise type(error)(f"{where}{error}", error.parameter) from error

    @delay_full_collections()
    def _run(
        self, ids: list[str], use_tqdm: ProgressBar, title: str = "Generating", feed: Iterator[None] | None = None
    ) -> list[RequestOutput]:
        """Step until all requests have ended. `feed` is advanced before each step: it adds those that were not yet."""
        outputs: dict[str, RequestOutput] = {}
        bar = _progress_bar(len(ids), use_tqdm, title)
        started, tokens_in, tokens_out = time.perf_counter(), 0, 0
        with delay_interrupts() as check, bar or nullcontext():
            while len(outputs) < len(ids):
                check()
                if feed is not None:
                    next(feed, None)
                for output in self.llm_engine.step():
                    outputs[output.request_id] = output
                    if bar is not None:
                        tokens_in += len(output.prompt_token_ids)
                        if isinstance(output, RequestOutput):
                            tokens_out += sum(len(each.token_ids) for each in output.outputs)
                        rates = (count / (time.perf_counter() - started) for count in (tokens_in, tokens_out))
                        bar.set_postfix_str("{:.0f} in, {:.0f} out tok/s".format(*rates), refresh=False)
                        bar.update(1)
        return [outputs[request_id] for request_id in ids]


def _refuse(**given: object) -> None:
    """Raise for a keyword argument of vLLM that has no meaning here."""
    for name in (name for name, value in given.items() if value is not None):
        raise RequestError(f"{name} is not supported for models that pool; leave it out", name)


def _one_each(name: str, given: Any, default: Any, num_prompts: int) -> list[Any]:
    """One value for each prompt."""
    if given is None or not isinstance(given, (list, tuple)):
        return [default if given is None else given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(
            f"there are {num_prompts} prompts but {len(given)} values of {name}; give one for all, or one for each",
            name,
        )
    return list(given)


def _is_one_prompt(prompts: object) -> bool:
    """Whether this is text, a dict or a flat list of token ids; everything else is a batch."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError(f"a prompt is text, token ids or a dict, not {type(prompts).__name__}", "prompts")
    return len(prompts) > 0 and isinstance(prompts[0], int)


_READING = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


def _reading(truncate: int | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how texts are read, as a call says: values for the fields of PoolingParams in _READING."""
    found = dict(given or {})
    if unknown := [name for name in found if name not in _READING]:
        message = f"tokenization_kwargs takes {', '.join(_READING)}, not {unknown[0]!r}"
        raise RequestError(message, "tokenization_kwargs")
    return found if truncate is None else {**found, "truncate_prompt_tokens": truncate}


def _reads_alike(one: PoolingParams, other: PoolingParams) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _READING)


def _with_task(params: PoolingParams, task: str | None, reading: Mapping[str, Any]) -> PoolingParams:
    """Return the parameters of one request, completed by those of the call."""
    if not isinstance(params, PoolingParams):
        raise RequestError(f"pooling_params must be PoolingParams, not {type(params).__name__}", "pooling_params")
    settled = params.clone()
    settled.task = params.task or task
    for name, value in reading.items():
        setattr(settled, name, value)
    settled.verify()
    return settled


def _progress_bar(total: int, use_tqdm: ProgressBar, title: str) -> Any:
    if use_tqdm is False:
        return None
    from tqdm import tqdm

    make_bar = tqdm if isinstance(use_tqdm, bool) else use_tqdm
    return make_bar(total=total, desc=title, unit="req", dynamic_ncols=True)
