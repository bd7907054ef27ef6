"""Converts token ids to text, incrementally or at the end of a request, with the same result. API process.

Incomplete characters are kept back until their last byte arrives; at the end of a request they become U+FFFD. With
byte-level tokenizers the text is the concatenated bytes of the tokens. With others (SentencePiece, WordPiece) a token's
text depends on the one before it, so a few tokens of context are decoded again, at first the last ones of the prompt.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvasir.frontend.text.tokenizer import TokenBytes, Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CONTEXT = 16  # prompt tokens
_MAX_PENDING = 16  # tokens without a complete character; more than any character needs, so none will come


class Detokenizer(Protocol):
    """Decodes the output of one request incrementally."""

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; it may be empty."""

    def flush(self) -> str:
        """Returns the remaining text when the request ends."""


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    skip_special_tokens: bool,
    spaces_between: bool = True,
    keep: frozenset[str] = frozenset(),
) -> Detokenizer:
    """`keep`: special tokens that stay in the text although the others are skipped."""
    table = tokenizer.token_bytes(skip_special_tokens, keep)
    if table is not None:
        return BytesDetokenizer(table)
    if skip_special_tokens and keep:
        shown = make_detokenizer(tokenizer, prompt_ids, False, spaces_between)
        return HidingDetokenizer(
            shown, frozenset(id for text, id in tokenizer.skipped_tokens.items() if text not in keep)
        )
    context = _context(tokenizer, prompt_ids, skip_special_tokens)
    detokenizer = TextDetokenizer(tokenizer, context, skip_special_tokens)
    return (
        detokenizer if spaces_between else UnspacedDetokenizer(detokenizer, tokenizer.added_tokens(skip_special_tokens))
    )


def decode_finished(
    tokenizer: Tokenizer,
    requests: Sequence[tuple[Sequence[int], list[int]]],
    skip_special_tokens: bool,
    spaces_between: bool = True,
    keep: frozenset[str] = frozenset(),
) -> list[str]:
    """The texts of finished requests, given as (prompt ids, output ids)."""
    table = tokenizer.token_bytes(skip_special_tokens, keep)
    if table is not None:
        return [b"".join([table[token] for token in ids]).decode("utf-8", "replace") for _, ids in requests]
    if not spaces_between or keep:
        return [
            _decode_incrementally(make_detokenizer(tokenizer, prompt, skip_special_tokens, spaces_between, keep), ids)
            for prompt, ids in requests
        ]
    contexts = [_context(tokenizer, prompt_ids, skip_special_tokens) for prompt_ids, _ in requests]
    before = tokenizer.decode_batch(contexts, skip_special_tokens)
    with_context = [context + ids for context, (_, ids) in zip(contexts, requests, strict=True)]
    texts = tokenizer.decode_batch(with_context, skip_special_tokens)
    for i, text in enumerate(texts):
        if _REPLACEMENT not in text:
            texts[i] = text[len(before[i]) :]
        else:  # invalid UTF-8: U+FFFD depends on where the bytes are split, so split them as in streaming
            texts[i] = _decode_incrementally(
                TextDetokenizer(tokenizer, contexts[i], skip_special_tokens), requests[i][1]
            )
    return texts


def _decode_incrementally(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


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
    """For tokenizers with which a token's text depends on the tokens before it."""

    __slots__ = ("_before", "_ids", "_num_context", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, context: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(context)  # context, then tokens whose text was not returned yet
        self._num_context = len(context)
        self._before = tokenizer.decode(context, skip_special_tokens)  # the context's text

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids, self._skip)
        many = len(self._ids) - self._num_context >= _MAX_PENDING
        if text == self._before:
            if many:  # tokens without text, such as skipped ones, are useless as context
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
    """Leaves out the space that the tokenizer writes between two added tokens."""

    __slots__ = ("_added", "_after_added", "_inner")

    def __init__(self, inner: TextDetokenizer, added: Mapping[int, str]) -> None:
        self._inner = inner
        self._added = added
        self._after_added = False

    def push(self, token_id: int) -> str:
        text = self._inner.push(token_id)
        is_added = token_id in self._added
        if is_added and self._after_added:
            text = self._added[token_id]
        self._after_added = is_added
        return text

    def flush(self) -> str:
        return self._inner.flush()


class HidingDetokenizer:
    """Leaves out some tokens."""

    __slots__ = ("_hidden", "_inner")

    def __init__(self, inner: Detokenizer, hidden: frozenset[int]) -> None:
        self._inner = inner
        self._hidden = hidden

    def push(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._inner.push(token_id)

    def flush(self) -> str:
        return self._inner.flush()


def _context(tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """The shortest end of the prompt that decodes to text, so that the first output token keeps its leading space."""
    for length in range(1, min(len(prompt_ids), _MAX_CONTEXT) + 1):
        context = [int(token) for token in prompt_ids[-length:]]
        text = tokenizer.decode(context, skip_special_tokens)
        if text and _REPLACEMENT not in text:
            return context
    return []
