"""LocalModel: a model in this process for `kvasir chat` and `kvasir complete`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from kvasir.config.args import EngineArgs, flags_of, with_flags
from kvasir.config.engine import all_settings
from kvasir.entrypoints.cli.chat_backend import AnswerUsage, Message, Piece
from kvasir.entrypoints.interrupts import delay_interrupts
from kvasir.entrypoints.llm_engine import LLMEngine
from kvasir.errors import ConfigError, RequestError
from kvasir.frontend.requests.input import default_sampling_params
from kvasir.frontend.requests.prompts import PromptType, TokensPrompt
from kvasir.outputs import RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams


class LocalModel:
    def __init__(self, args: EngineArgs, name: str | None = None) -> None:
        self.engine = LLMEngine.from_engine_args(args)
        if self.engine.config.model.poolers:
            self.engine.close()
            raise ConfigError(
                f"{args.model} does not generate text: it is a pooling model. Serve it with `kvasir serve`, or choose "
                f"another model."
            )
        self.name = name or Path(self.engine.config.model.model).name
        self._ids = count()

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Iterator[Piece]:
        return self._generate(self._prompt(messages), params)

    def complete(self, prompt: str, params: Mapping[str, Any]) -> Iterator[Piece]:
        return self._generate(prompt, params)

    def _generate(self, prompt: PromptType, params: Mapping[str, Any]) -> Iterator[Piece]:
        request_id = f"chat-{next(self._ids)}"
        try:
            self.engine.add_request(request_id, prompt, self._sampling(params))
        except RequestError as error:  # such as a prompt beyond max_model_len
            error.args = (with_flags(str(error), flags_of(all_settings())),)
            raise
        try:
            with delay_interrupts() as check:
                yield from self._run(check)
        finally:
            self.engine.abort_request(request_id)  # does nothing if it has ended

    def _run(self, check: Any) -> Iterator[Piece]:
        num_output = 0
        while self.engine.has_unfinished_requests():
            check()
            for output in self.engine.step():
                num_output += len(output.outputs[0].token_ids)
                yield output.outputs[0].text
                if output.finished:
                    yield _usage(output, num_output)

    def _prompt(self, messages: Sequence[Message]) -> TokensPrompt:
        tokenizer = self.engine.get_tokenizer()
        template = self.engine.config.model.chat_template
        text = tokenizer.render_chat(messages, chat_template=template, add_generation_prompt=True)
        return TokensPrompt(prompt_token_ids=tokenizer.encode(text, add_special_tokens=False), prompt=text)

    def _sampling(self, params: Mapping[str, Any]) -> SamplingParams:
        sampling = default_sampling_params(self.engine.config)
        sampling.max_tokens = None
        for name, value in params.items():
            setattr(sampling, name, value)
        sampling.output_kind = RequestOutputKind.DELTA
        try:
            sampling.__post_init__()  # checks the new values
        except TypeError as error:
            raise RequestError(str(error)) from error
        return sampling

    def describe(self) -> list[str]:
        found = {metric.name.partition(":")[2]: metric.value for metric in self.engine.get_metrics()}
        asked, hits = found["prefix_cache_queries"], found["prefix_cache_hits"]
        return [
            f"engine: {found['engine_steps']:.0f} steps, {found['iteration_tokens']:.0f} tokens computed",
            f"cache: {found['kv_cache_blocks_cached']:.0f} of {found['kv_cache_blocks']:.0f} blocks cached, "
            f"{100 * hits / asked if asked else 0:.0f} % of prompt tokens were cached",
        ]

    def close(self) -> None:
        self.engine.close()


def _usage(output: RequestOutput, num_output: int) -> AnswerUsage:
    reason = output.outputs[0].finish_reason
    return AnswerUsage(len(output.prompt_token_ids), output.num_cached_tokens or 0, num_output, reason)
