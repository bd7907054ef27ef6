"""Prompts: the one place that renders conversations, tokenizes text, truncates and checks lengths. API process.

LLM, AsyncLLM and the server share it. It knows the model's tokenizer and limits, and nothing of sampling parameters.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar

import numpy as np

from kvasir.config.engine import ModelConfig
from kvasir.errors import PromptTooLongError, RequestError
from kvasir.frontend.text.chat_template import check_reads, choose_template
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.messages import Int32Array

T = TypeVar("T")
_LONG_TEXT = 1 << 14  # characters; tokenizing more would hold up the event loop for milliseconds
_TRUNCATE = "truncate_prompt_tokens"


class TextPrompt(TypedDict):
    """Text to be tokenized."""

    prompt: str
    cache_salt: NotRequired[str]  # requests share cached prefixes only with those of the same salt


class TokensPrompt(TypedDict):
    """Token ids, ready for the model. `prompt` is only repeated in the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(slots=True, frozen=True)
class TokenizedPrompt:
    """A prompt that is tokenized and checked. PromptProcessor makes these; they are not checked again."""

    token_ids: list[int]  # for outputs
    array: Int32Array  # the same ids, for the core
    text: str | None = None
    salt: bytes = b""


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | TokenizedPrompt


class PromptProcessor:
    """Turns what callers give as a prompt into token ids, for one model."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            message = "A text prompt needs a tokenizer, and skip_tokenizer_init=True loads none: send token ids."
            raise RequestError(message, "prompt")
        return self._tokenizer

    @property
    def max_tokens(self) -> int:
        """Longest prompt that leaves room for one token of output."""
        return self.config.max_model_len - 1

    # ------------------------------------------------------------ conversations

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,  # None: unless the final message is continued
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        may_ignore: Collection[str] = (),
        **variables: Any,
    ) -> str:
        """Apply the chat template. An argument that the template does not read is an error, unless `may_ignore` has it.

        `variables` are checked that way, too; `chat_template_kwargs` are passed on as they are.
        """
        template = self.config.chat_template if chat_template is None else chat_template
        source = choose_template(self.tokenizer.chat_template, template, tools is not None)
        given = {"tools": tools, "documents": documents, **variables}
        check_reads(source, messages, {name: value for name, value in given.items() if name not in may_ignore})
        options = {
            "chat_template": template,
            "continue_final_message": continue_final_message,
            "add_generation_prompt": not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            **given,
        }
        extra = chat_template_kwargs or {}
        for name in ("messages", "self", *options):
            if name in extra:
                raise RequestError(f"{name} cannot be a variable of a chat template.", "chat_template_kwargs")
        return self.tokenizer.render_chat(messages, **options, **extra)

    # ------------------------------------------------------------ text to token ids

    def tokenize(
        self, prompts: Sequence[PromptType], add_special_tokens: bool = True, truncate: int | None = None
    ) -> list[PromptType]:
        """Tokenize all texts in one call, which uses every core. Other prompts stay as they are; nothing is checked."""
        texts = {i: text for i, prompt in enumerate(prompts) if (text := _text_of(prompt)) is not None}
        # `read` refuses prompts with unknown entries, and texts that cannot fit
        texts = {i: t for i, t in texts.items() if not _other_entries(prompts[i]) and not self._cannot_fit(t, truncate)}
        if self._tokenizer is None or not texts:
            return list(prompts)
        ready = list(prompts)
        encoded = self._tokenizer.encode_batch(list(texts.values()), add_special_tokens)
        for (i, text), ids in zip(texts.items(), encoded, strict=True):
            done = TokensPrompt(prompt=text, prompt_token_ids=ids)
            given = prompts[i]
            if isinstance(given, dict) and "cache_salt" in given:
                done["cache_salt"] = given["cache_salt"]
            ready[i] = done
        return ready

    def read_all(
        self, prompts: Sequence[PromptType], add_special_tokens: bool = True, truncate: int | None = None
    ) -> list[TokenizedPrompt]:
        return [self.read(prompt, truncate) for prompt in self.tokenize(prompts, add_special_tokens, truncate)]

    def read(self, prompt: PromptType, truncate: int | None = None) -> TokenizedPrompt:
        """Tokenize and check one prompt. `truncate`: keep so many last tokens; -1: as many as the model takes."""
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        given: dict[str, Any]
        if isinstance(prompt, Mapping):
            given = {**prompt}
        else:
            given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        unknown = given.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            raise RequestError(f"A prompt takes prompt, prompt_token_ids and cache_salt, not {names}.", "prompt")
        text, salt = given.get("prompt"), _salt(given.get("cache_salt", ""))
        if not isinstance(text, str | None):
            raise RequestError(f"A prompt's text must be a string, not {reprlib.repr(text)}.", "prompt")
        ids = given["prompt_token_ids"] if "prompt_token_ids" in given else self._encode(text, truncate)
        plain = _plain_ints(ids)
        array = self._check_vocabulary(plain)
        kept = self._fit(plain, truncate)
        return TokenizedPrompt(kept, array[len(plain) - len(kept) :], text, salt)

    def _encode(self, text: str | None, truncate: int | None) -> list[int]:
        if text is None:
            raise RequestError("A prompt must have prompt (a text) or prompt_token_ids.", "prompt")
        if self._cannot_fit(text, truncate):
            raise self._too_long(f"{len(text)} characters")
        return self.tokenizer.encode(text)

    def _cannot_fit(self, text: str, truncate: int | None) -> bool:
        """Whether a text is too long whatever its tokens are: no token is longer than the vocabulary's longest."""
        if truncate is not None or len(text) < _LONG_TEXT or self._tokenizer is None:
            return False
        return len(text) > self.max_tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    # ------------------------------------------------------------ checks

    def _fit(self, ids: list[int], truncate: int | None) -> list[int]:
        if truncate is not None:
            if truncate > self.max_tokens:
                message = f"{_TRUNCATE}={truncate} is more than the {self.max_tokens} tokens that a prompt may have."
                raise RequestError(message, _TRUNCATE)
            keep = self.max_tokens if truncate == -1 else truncate
            if keep < 1:
                raise RequestError(f"{_TRUNCATE} must be -1, or at least 1.", _TRUNCATE)
            ids = ids[-keep:]
        if len(ids) > self.max_tokens:
            raise self._too_long(f"{len(ids)} tokens", len(ids))
        return ids

    def _too_long(self, size: str, num_tokens: int | None = None) -> PromptTooLongError:
        longest = self.config.max_model_len
        message = (
            f"The prompt has {size}, but max_model_len={longest} leaves room for {longest - 1} tokens and one to "
            f"generate: shorten the prompt or raise max_model_len."
        )
        return PromptTooLongError(message, "prompt", num_tokens)

    def _check_vocabulary(self, ids: list[int]) -> Int32Array:
        if not ids:
            return np.zeros(0, np.int32)
        try:
            array = np.array(ids, np.int32)
            ends = int(array.min()), int(array.max())
        except OverflowError:
            ends = min(ids), max(ids)
        outside = next((token for token in ends if not 0 <= token < self.config.vocab_size), None)
        if outside is not None:
            last = self.config.vocab_size - 1
            message = f"Token id {reprlib.repr(outside)} is not in the model's vocabulary, which goes from 0 to {last}."
            raise RequestError(message, "prompt_token_ids")
        return array


async def off_loop(num_characters: int, work: Callable[[], T]) -> T:
    """Do `work` on so much text: in a thread if that would hold up the event loop."""
    return work() if num_characters < _LONG_TEXT else await asyncio.to_thread(work)


def _plain_ints(ids: Any) -> list[int]:
    """A new list of Python's own ints."""
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        message = f"prompt_token_ids must be a list of integers, not {reprlib.repr(ids)}."
        raise RequestError(message, "prompt_token_ids")
    kinds = set(map(type, ids))
    for kind in kinds:
        if issubclass(kind, bool) or not issubclass(kind, Integral):
            message = f"prompt_token_ids must be integers, but there is a {kind.__name__} among them."
            raise RequestError(message, "prompt_token_ids")
    return list(ids) if kinds == {int} else list(map(int, ids))


def _other_entries(prompt: PromptType) -> bool:
    return isinstance(prompt, Mapping) and bool(prompt.keys() - {"prompt", "cache_salt"})


def _text_of(prompt: PromptType) -> str | None:
    """The text that has still to be tokenized."""
    if isinstance(prompt, Mapping):
        text = None if "prompt_token_ids" in prompt else prompt.get("prompt")
        return text if isinstance(text, str) else None
    return prompt if isinstance(prompt, str) else None


def _salt(given: object) -> bytes:
    try:
        return str.encode(given)  # type: ignore[arg-type]  # raises what is caught
    except (TypeError, UnicodeError):
        raise RequestError(f"cache_salt must be a string, not {reprlib.repr(given)}.", "cache_salt") from None
