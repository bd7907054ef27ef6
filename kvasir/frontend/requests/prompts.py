"""Prompts: the one place that renders conversations, tokenizes text, truncates and checks lengths. API process.

LLM, AsyncLLM and the server share it. It knows the model's tokenizer and limits, and nothing of sampling parameters.
"""

from __future__ import annotations

import asyncio
import os
import reprlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Integral
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar

import numpy as np

from kvasir.config.engine import ModelConfig
from kvasir.errors import PromptTooLongError, RequestError
from kvasir.frontend.requests import embeddings
from kvasir.frontend.text.chat_template import check_reads, choose_template
from kvasir.frontend.text.tokenizer import WORD_BOUNDARY, Tokenizer
from kvasir.messages import FloatArray, Int32Array

T = TypeVar("T")
_LONG_TEXT = 1 << 14  # characters; tokenizing more would hold up the event loop for milliseconds
_BYTES_PER_CHARACTER = 400  # that tokenizing needs at most
_BATCH = 1 << 18  # characters that are tokenized in one call
_LEAST_CHARACTERS = 1 << 20  # of TextPool
_CHARACTERS_PER_TOKEN = 8  # in TextPool's default; texts have about 4
_ANY_LENGTH = 1 << 40
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


class EmbedsPrompt(TypedDict):
    """Embeddings in place of tokens: a tensor [tokens, hidden]. Needs enable_prompt_embeds."""

    prompt_embeds: Any  # of torch or numpy, or the bytes of a file that torch.save or safetensors wrote
    cache_salt: NotRequired[str]


@dataclass(slots=True, frozen=True)
class TokenizedPrompt:
    """A prompt that is tokenized and checked. PromptProcessor makes these; they are not checked again."""

    token_ids: list[int]  # for outputs
    array: Int32Array  # the same ids, for the core
    text: str | None = None
    salt: bytes = b""
    embeddings: FloatArray | None = None  # in place of those of the ids, which then mean nothing


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt | TokenizedPrompt


class PromptProcessor:
    """Turns what callers give as a prompt into token ids, for one model."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self._tokenizer = tokenizer

    def for_counting(self) -> PromptProcessor:
        """One that refuses no prompt for its length: its tokens are counted, and the model does not see them."""
        return PromptProcessor(replace(self.config, max_model_len=_ANY_LENGTH), self._tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            message = "A text prompt needs a tokenizer, and skip_tokenizer_init=True loads none: send token ids."
            raise RequestError(message, "prompt")
        return self._tokenizer

    @property
    def max_tokens(self) -> int:
        """Longest prompt; one that is completed leaves room for one token of output."""
        return self.config.max_model_len - (not self.config.poolers)

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
        must_read = {name: value for name, value in given.items() if name not in may_ignore}
        messages = check_reads(source, messages, must_read)
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
        try:
            return self.tokenizer.render_chat(messages, **options, **extra)
        except RecursionError:
            raise RequestError("The messages or the template's variables are nested too deeply.", "messages") from None

    # ------------------------------------------------------------ text to token ids

    def tokenize(
        self,
        prompts: Sequence[PromptType],
        add_special_tokens: bool = True,
        truncate: int | None = None,
        side: str = "left",
    ) -> list[PromptType]:
        """Tokenize all texts in one call, which uses every core. Other prompts stay as they are; nothing is checked."""
        texts = {i: text for i, prompt in enumerate(prompts) if (text := text_of(prompt)) is not None}
        # `read` refuses prompts with unknown entries, and texts that cannot fit
        texts = {i: t for i, t in texts.items() if not other_entries(prompts[i]) and not self.cannot_fit(t, truncate)}
        if self._tokenizer is None or not texts:
            return list(prompts)
        ready = list(prompts)
        shorter = {i: self.cut(text, truncate, side) for i, text in texts.items()}
        encoded = (ids for some in _batches(shorter.values()) for ids in self._encode_batch(some, add_special_tokens))
        for (i, text), ids in zip(texts.items(), encoded, strict=True):
            done = TokensPrompt(prompt=text, prompt_token_ids=ids)
            given = prompts[i]
            if isinstance(given, dict) and "cache_salt" in given:
                done["cache_salt"] = given["cache_salt"]
            ready[i] = done
        return ready

    def read_all(
        self,
        prompts: Sequence[PromptType],
        add_special_tokens: bool = True,
        truncate: int | None = None,
        side: str = "left",
    ) -> list[TokenizedPrompt]:
        ready = self.tokenize(prompts, add_special_tokens, truncate, side)
        return [self.read(prompt, truncate, side) for prompt in ready]

    def read(self, prompt: PromptType, truncate: int | None = None, side: str = "left") -> TokenizedPrompt:
        """Tokenize and check one prompt. `truncate`: keep so many tokens; -1: as many as the model takes. `side`: where
        the others are removed."""
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        given: dict[str, Any]
        if isinstance(prompt, Mapping):
            given = {**prompt}
        else:
            given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if "prompt_embeds" in given:
            rows, content = embeddings.read(given, truncate, self.config)
            ids = self._fit([0] * len(rows), None, "left")
            salt = content + salt_bytes(given.get("cache_salt", ""))
            return TokenizedPrompt(ids, np.zeros(len(ids), np.int32), None, salt, rows)
        unknown = given.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            raise RequestError(f"A prompt takes prompt, prompt_token_ids and cache_salt, not {names}.", "prompt")
        text, salt = given.get("prompt"), salt_bytes(given.get("cache_salt", ""))
        if not isinstance(text, str | None):
            raise RequestError(f"A prompt's text must be a string, not {reprlib.repr(text)}.", "prompt")
        ids = given["prompt_token_ids"] if "prompt_token_ids" in given else self._encode(text, truncate, side)
        plain = _plain_ints(ids)
        array = self._check_vocabulary(plain)
        kept = self._fit(plain, truncate, side)
        first = 0 if side == "right" else len(plain) - len(kept)
        return TokenizedPrompt(kept, array[first : first + len(kept)], text, salt)

    def _encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return self.tokenizer.encode_batch(texts, add_special_tokens)

    def _encode(self, text: str | None, truncate: int | None, side: str) -> list[int]:
        if text is None:
            raise RequestError("A prompt must have prompt (a text) or prompt_token_ids.", "prompt")
        if self.cannot_fit(text, truncate):
            raise self._too_long(f"more than {self.max_tokens} tokens ({len(text)} characters)")
        return self.tokenizer.encode(self.cut(text, truncate, side))

    def cannot_fit(self, text: str, truncate: int | None) -> bool:
        """Whether a text is too long whatever its tokens are."""
        if truncate is not None or len(text) < _LONG_TEXT or self._tokenizer is None:
            return False
        longest = self._tokenizer.characters_per_token
        return longest is not None and len(text) > self.max_tokens * longest

    def cut(self, text: str, truncate: int | None, side: str = "left") -> str:
        """Cut off the beginning of a text, most of which truncation would remove. The last tokens of the rest are those
        of the text.

        The text stays whole if its tokenizer has no place where it can be cut, or if it has no such place itself.
        """
        if truncate is None or side == "right" or len(text) < _LONG_TEXT or self._tokenizer is None:
            return text
        longest = self._tokenizer.characters_per_token
        keep = self.num_kept(truncate)
        if longest is None or not self._tokenizer.splits_at_words:
            return text
        end = len(text) - (keep + 1) * longest  # the characters from here on have at least keep + 1 tokens
        if end < _LONG_TEXT:
            return text
        # Two places: tokenizers may add a space at the beginning, which changes the first word's tokens.
        places = [found.start() for found in islice(WORD_BOUNDARY.finditer(text, end - _LONG_TEXT, end), 2)]
        return text[places[0] :] if len(places) > 1 else text

    # ------------------------------------------------------------ checks

    def _fit(self, ids: list[int], truncate: int | None, side: str) -> list[int]:
        if truncate is not None:
            keep = self.num_kept(truncate)
            ids = ids[:keep] if side == "right" else ids[-keep:]
        if len(ids) > self.max_tokens:
            raise self._too_long(f"{len(ids)} tokens", len(ids))
        return ids

    def num_kept(self, truncate: int) -> int:
        """Number of tokens that truncation leaves at most."""
        if truncate > self.max_tokens:
            message = f"{_TRUNCATE}={truncate} is more than the {self.max_tokens} tokens that a prompt may have."
            raise RequestError(message, _TRUNCATE)
        keep = self.max_tokens if truncate == -1 else truncate
        if keep < 1:
            raise RequestError(f"{_TRUNCATE} must be -1, or at least 1.", _TRUNCATE)
        return keep

    def _too_long(self, size: str, num_tokens: int | None = None) -> PromptTooLongError:
        if self.config.poolers:
            message = (
                f"This model's maximum context length is {self.config.max_model_len} tokens. However, your text has "
                f"{size}. Please shorten it, or set {_TRUNCATE} to cut it: -1 keeps as many tokens as fit."
            )
            return PromptTooLongError(message, "prompt", num_tokens)
        # Clients that shorten a conversation, or ask another model instead, know it by OpenAI's words.
        message = (
            f"This model's maximum context length is {self.config.max_model_len} tokens. However, your prompt resulted "
            f"in {size}, which leaves no room for an answer. Please reduce the length of the prompt."
        )
        return PromptTooLongError(message, "prompt", num_tokens)

    def _check_vocabulary(self, ids: list[int]) -> Int32Array:
        if not ids:
            return np.zeros(0, np.int32)
        try:
            array = np.array(ids, np.int32)
            is_inside = int(array.view(np.uint32).max()) < self.config.vocab_size  # unsigned, negative ids are large
        except OverflowError:
            is_inside = False
        if not is_inside:
            outside = next(token for token in (min(ids), max(ids)) if not 0 <= token < self.config.vocab_size)
            last = self.config.vocab_size - 1
            message = f"Token id {reprlib.repr(outside)} is not in the model's vocabulary, which goes from 0 to {last}."
            raise RequestError(message, "prompt_token_ids")
        return array


class TextPool:
    """Works on long texts in a few threads and on short ones at once: a long one would hold up the event loop.

    Tokenizing needs hundreds of bytes per character, so only `max_characters` are worked on at a time; further texts
    wait in order. Belongs to one event loop at a time.
    """

    def __init__(self, max_model_len: int, max_characters: int | None = None) -> None:
        default = max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * max_model_len)
        self.max_characters = default if max_characters is None else max_characters
        self.num_characters = 0  # that are being worked on
        self._most = 0  # of them since take_peak
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "text")

    async def run(self, num_characters: int, work: Callable[[], T]) -> T:
        """Run `work`, which handles `num_characters` of text, in a thread if they are many."""
        if num_characters < _LONG_TEXT:
            return work()
        size = min(num_characters, self.max_characters)
        await self._acquire(size)
        loop = asyncio.get_running_loop()

        def release(done: Future[T]) -> None:  # when the thread is done, also with work whose request was cancelled
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._release, size)

        running = self._threads.submit(work)
        running.add_done_callback(release)
        return await asyncio.wrap_future(running)

    async def _acquire(self, size: int) -> None:
        if not self._waiting and self.num_characters + size <= self.max_characters:
            self._take(size)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come
                self._release(size)
            raise

    def _release(self, size: int) -> None:
        self.num_characters -= size
        while self._waiting:
            needed, turn = self._waiting[0]
            if not turn.cancelled():
                if self.num_characters + needed > self.max_characters:
                    return
                self._take(needed)
                turn.set_result(None)
            self._waiting.popleft()

    def _take(self, size: int) -> None:
        self.num_characters += size
        self._most = max(self._most, self.num_characters)

    def take_peak(self) -> int:
        """Most bytes that were needed at once since the last call; 0 while any are in use."""
        if self.num_characters:
            return 0
        peak, self._most = self._most * _BYTES_PER_CHARACTER, 0
        return peak


def _batches(texts: Collection[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of at most _BATCH characters; a longer text is alone."""
    some: list[str] = []
    size = 0
    for text in texts:
        if some and size + len(text) > _BATCH:
            yield some
            some, size = [], 0
        some.append(text)
        size += len(text)
    if some:
        yield some


def _plain_ints(ids: Any) -> list[int]:
    """A new list of Python's own ints."""
    if type(ids) is list and set(map(type, ids)) == {int}:
        return ids.copy()
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


def other_entries(prompt: PromptType) -> bool:
    return isinstance(prompt, Mapping) and bool(prompt.keys() - {"prompt", "cache_salt"})


def text_of(prompt: PromptType) -> str | None:
    """The text that has still to be tokenized."""
    if isinstance(prompt, Mapping):
        text = None if "prompt_token_ids" in prompt else prompt.get("prompt")
        return text if isinstance(text, str) else None
    return prompt if isinstance(prompt, str) else None


def salt_bytes(given: object) -> bytes:
    try:
        return str.encode(given)  # type: ignore[arg-type]  # raises what is caught
    except (TypeError, UnicodeError):
        raise RequestError(f"cache_salt must be a string, not {reprlib.repr(given)}.", "cache_salt") from None
