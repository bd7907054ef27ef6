"""Token ids to text, token by token or all at once: both give the same text. API process.

Half a character is never given out: its bytes wait for the rest, and become U+FFFD only if the request ends there.
For most tokenizers a text's bytes are its tokens' bytes, and UTF-8 does the rest. For others (SentencePiece, WordPiece)
a token's text depends on the one before it, so they decode with a few tokens of context, the prompt's last at first.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvasir.frontend.text.tokenizer import TokenBytes, Tokenizer

_REPLACEMENT = "\ufffd"
_MOST_CONTEXT = 16  # prompt tokens
_MOST_PENDING = 16  # tokens without a whole character; more than any character takes, so they will never make one


class Detokenizer(Protocol):
    """The text of one request, incrementally."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""

    def flush(self) -> str:
        """What is left when the request ends."""


def incremental(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool, spaces_between: bool = True
) -> Detokenizer:
    table = tokenizer.token_bytes(skip_special_tokens)
    if table is not None:
        return BytesDetokenizer(table)
    context = _context(tokenizer, prompt_ids, skip_special_tokens)
    steps = TextDetokenizer(tokenizer, context, skip_special_tokens)
    return steps if spaces_between else UnspacedDetokenizer(steps, tokenizer.added_tokens(skip_special_tokens))


def whole(
    tokenizer: Tokenizer,
    requests: Sequence[tuple[Sequence[int], list[int]]],
    skip_special_tokens: bool,
    spaces_between: bool = True,
) -> list[str]:
    """The texts of requests that have ended: each is a prompt's ids and the output's."""
    table = tokenizer.token_bytes(skip_special_tokens)
    if table is not None:
        return [b"".join([table[token] for token in ids]).decode("utf-8", "replace") for _, ids in requests]
    if not spaces_between:
        return [_in_steps(incremental(tokenizer, prompt, skip_special_tokens, False), ids) for prompt, ids in requests]
    contexts = [_context(tokenizer, prompt_ids, skip_special_tokens) for prompt_ids, _ in requests]
    before = tokenizer.decode_batch(contexts, skip_special_tokens)
    with_context = [context + ids for context, (_, ids) in zip(contexts, requests, strict=True)]
    texts = tokenizer.decode_batch(with_context, skip_special_tokens)
    for i, text in enumerate(texts):
        if _REPLACEMENT not in text:
            texts[i] = text[len(before[i]) :]
        else:  # bytes that are no UTF-8: what they look like depends on where they are cut, so cut as in streaming
            texts[i] = _in_steps(TextDetokenizer(tokenizer, contexts[i], skip_special_tokens), requests[i][1])
    return texts


def _in_steps(steps: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([*map(steps.push, ids), steps.flush()])


class BytesDetokenizer:
    """For byte-level tokenizers."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._decoder = _UTF8("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._table[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


_UTF8 = codecs.getincrementaldecoder("utf-8")


class TextDetokenizer:
    """For tokenizers whose tokens' text depends on what stands before."""

    __slots__ = ("_before", "_ids", "_num_context", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, context: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(context)  # context, then tokens whose text has not been given out
        self._num_context = len(context)
        self._before = tokenizer.decode(context, skip_special_tokens)  # the context's text

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids, self._skip)
        many = len(self._ids) - self._num_context >= _MOST_PENDING
        if text == self._before:
            if many:  # tokens without text, such as skipped ones: the context must not be made of them
                del self._ids[self._num_context :]
            return ""
        if text.endswith(_REPLACEMENT) and not many:
            return ""
        new = text[len(self._before) :]
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._before = self._tokenizer.decode(self._ids, self._skip)
        return new

    def flush(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip)[len(self._before) :]


class UnspacedDetokenizer:
    """Writes added tokens that follow each other as they are, without the space the tokenizer would put between."""

    __slots__ = ("_added", "_after_added", "_steps")

    def __init__(self, steps: TextDetokenizer, added: Mapping[int, str]) -> None:
        self._steps = steps
        self._added = added
        self._after_added = False

    def push(self, token_id: int) -> str:
        text = self._steps.push(token_id)
        is_added = token_id in self._added
        if is_added and self._after_added:
            text = self._added[token_id]
        self._after_added = is_added
        return text

    def flush(self) -> str:
        return self._steps.flush()


def _context(tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """The shortest end of the prompt that has a text of its own, so that a first token keeps its leading space."""
    for length in range(1, min(len(prompt_ids), _MOST_CONTEXT) + 1):
        context = [int(token) for token in prompt_ids[-length:]]
        text = tokenizer.decode(context, skip_special_tokens)
        if text and _REPLACEMENT not in text:
            return context
    return []
