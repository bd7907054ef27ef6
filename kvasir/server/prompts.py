"""From what clients send to token ids: chat templates, tokenizing, limits on length.

A long text is tokenized in a thread, and one that is certainly too long not at all, so that nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvasir.errors import RequestError
from kvasir.frontend.requests.input import TokensPrompt
from kvasir.frontend.text.chat_template import check_reads, choose_template
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.server.errors import ApiError, too_large
from kvasir.server.schema.chat import ChatTemplateFields
from kvasir.server.state import ServerState

T = TypeVar("T")
_LONG = 20_000  # characters: a few milliseconds of tokenizing


class PromptMaker:
    """Made for one request."""

    def __init__(self, state: ServerState, truncate: int | None = None, salt: str | None = None) -> None:
        self.state = state
        self.engine = state.engine
        self.truncate = truncate
        self.salt = salt

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            message = "This server has no tokenizer (--skip-tokenizer-init): send token ids to /v1/completions."
            raise RequestError(message, "prompt")
        return self.engine.tokenizer

    # ------------------------------------------------------------ chat

    async def chat(self, body: ChatTemplateFields, **variables: Any) -> TokensPrompt:
        """The conversation as a prompt."""
        text = await self.render(body, **variables)
        (prompt,) = await self.texts([text], bool(body.add_special_tokens))
        return prompt

    async def render(self, body: ChatTemplateFields, **variables: Any) -> str:
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        size = sum(len(str(message.get("content"))) for message in messages)
        continues, template = bool(body.continue_final_message), self._template(body)
        source = choose_template(self.tokenizer.chat_template, template, body.tools is not None)
        check_reads(source, messages, {"documents": body.documents, **variables})
        options = {
            "chat_template": template,
            "tools": body.tools,
            "documents": body.documents,
            "continue_final_message": continues,
            "add_generation_prompt": not continues
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            **variables,
        }
        extra = body.chat_template_kwargs or {}
        for name in ("messages", "self", *options):
            if name in extra:
                raise RequestError(f"{name} cannot be a variable of a chat template.", "chat_template_kwargs")
        return await _maybe_in_thread(size, lambda: self.tokenizer.render_chat(messages, **options, **extra))

    def _template(self, body: ChatTemplateFields) -> str | None:
        if body.chat_template is None:
            return self.engine.config.model.chat_template
        if not self.state.config.trust_request_chat_template:
            message = "Requests may not bring a chat template here; the operator allows it with "
            raise RequestError(f"{message}--trust-request-chat-template.", "chat_template")
        return body.chat_template

    # ------------------------------------------------------------ text and ids

    async def texts(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokensPrompt]:
        for text in texts:
            self._check_size(text)
        size = sum(map(len, texts))
        ids = await _maybe_in_thread(size, lambda: self.tokenizer.encode_batch(texts, add_special_tokens))
        return [self._prompt(some, text) for some, text in zip(ids, texts, strict=True)]

    def ids(self, ids: list[int]) -> TokensPrompt:
        size = self.engine.config.model.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            wrong = next(token for token in ids if not 0 <= token < size)
            message = (
                f"Token id {reprlib.repr(wrong)} is not in the model's vocabulary, which goes from 0 to {size - 1}."
            )
            raise RequestError(message, "prompt")
        return self._prompt(ids, None)

    def _prompt(self, ids: list[int], text: str | None) -> TokensPrompt:
        prompt = TokensPrompt(prompt_token_ids=self._fitting(ids))
        if text is not None:
            prompt["prompt"] = text
        if self.salt is not None:
            prompt["cache_salt"] = self.salt
        return prompt

    def _fitting(self, ids: list[int]) -> list[int]:
        most = self.engine.config.model.max_model_len - 1
        if self.truncate is not None:
            if self.truncate > most:
                message = f"truncate_prompt_tokens={self.truncate} is more than the {most} that a prompt may have."
                raise RequestError(message, "truncate_prompt_tokens")
            keep = most if self.truncate == -1 else self.truncate
            if keep == 0:
                raise RequestError("truncate_prompt_tokens must be -1, or at least 1.", "truncate_prompt_tokens")
            ids = ids[-keep:]
        allowed = self.state.config.max_prompt_tokens
        if allowed is not None and len(ids) > allowed:
            raise too_large(f"The prompt has {len(ids)} tokens; this server takes {allowed} (--max-prompt-tokens).")
        if len(ids) > most:
            raise _too_long(f"{len(ids)} tokens", most)
        return ids

    def _check_size(self, text: str) -> None:
        """Refuse what cannot fit without tokenizing it: no token is longer than the vocabulary's longest."""
        most = self.engine.config.model.max_model_len - 1
        if self.truncate is None and len(text) > _LONG and len(text) > most * longest_token(self.tokenizer):
            raise _too_long(f"{len(text)} characters", most)


def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token."""
    found = _longest.get(id(tokenizer))
    if found is None:
        _longest.clear()
        found = _longest[id(tokenizer)] = max(map(len, tokenizer.get_vocab()))
    return found


_longest: dict[int, int] = {}  # there is one tokenizer


def _too_long(what: str, most: int) -> ApiError:
    message = f"The prompt has {what}, and this model's context leaves room for {most} tokens and an answer of one."
    return ApiError(400, message, "invalid_request", "prompt", "context_length_exceeded")


async def _maybe_in_thread(size: int, work: Callable[[], T]) -> T:
    return work() if size < _LONG else await asyncio.to_thread(work)
