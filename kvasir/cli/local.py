"""Answers piece by piece from a model that this process loads; client.py gives the same of a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from kvasir import interrupts
from kvasir.args import EngineArgs
from kvasir.cli.client import Message, Options, Piece, Usage
from kvasir.cli.quiet import hush
from kvasir.prompts import PromptType, TokensPrompt
from kvasir.sampling_params import RequestOutputKind


class LocalModel:
    def __init__(self, args: EngineArgs) -> None:
        from kvasir.llm import LLM

        self._unhush = hush()  # the answer is what one wants to see
        try:
            self.llm = LLM.from_engine_args(args)
        except BaseException:
            self._unhush()
            raise
        self._ids = count()

    def complete(self, prompt: str, options: Options) -> Iterator[Piece]:
        return self._answer(prompt, options)

    def chat(self, messages: Sequence[Message], options: Options) -> Iterator[Piece]:
        tokenizer = self.llm.get_tokenizer()
        template = self.llm.llm_engine.config.model.chat_template
        text = tokenizer.render_chat(messages, chat_template=template, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template has written them already
        return self._answer(TokensPrompt(prompt_token_ids=ids, prompt=text), options)

    def _answer(self, prompt: PromptType, options: Options) -> Iterator[Piece]:
        engine, params = self.llm.llm_engine, self.llm.get_default_sampling_params()
        for name, value in options.items():
            setattr(params, name, value)
        params.output_kind = RequestOutputKind.DELTA
        name = f"answer-{next(self._ids)}"
        engine.add_request(name, prompt, params.clone())
        generated = 0
        try:
            with interrupts.held_back() as check:
                while engine.has_unfinished_requests():
                    check()
                    for output in engine.step():
                        generated += len(output.outputs[0].token_ids)
                        usage = Usage(len(output.prompt_token_ids), generated) if output.finished else None
                        yield Piece(output.outputs[0].text, usage)
        finally:
            engine.abort_request(name)

    def close(self) -> None:
        self.llm.close()
        self._unhush()
