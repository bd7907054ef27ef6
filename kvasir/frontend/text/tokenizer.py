"""Tokenizer: converts text to token ids and back with the `tokenizers` library. API process.

Its methods are those of a Hugging Face tokenizer that callers need, with the same results as transformers, except that
clean_up_tokenization_spaces is never applied: it is meant for WordPiece and would damage generated text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import tokenizers

from kvasir.errors import RequestError
from kvasir.frontend.text.chat_template import choose_template, compile_template

# Keywords of Hugging Face's apply_chat_template that are not template variables -> the only value supported here.
_NOT_VARIABLES: Mapping[str, object] = {
    "return_dict": False,
    "return_tensors": None,
    "return_assistant_tokens_mask": False,
    "padding": False,
    "truncation": False,
    "max_length": None,
    "tokenizer_kwargs": None,
    "sanitize_control_tokens": False,
}


class Tokenizer:
    """A model's tokenizer and chat template. Made by `tokenizer_files.load_tokenizer`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: Mapping[str, str],
        extra_special: Iterable[str] = (),
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens_map = dict(special)  # by name, such as "eos_token"
        self.all_special_tokens = list(dict.fromkeys([*special.values(), *extra_special]))
        self.chat_template = chat_template  # a dict if there are several, by name
        self._bytes: dict[bool, TokenBytes] = {}  # by skip_special_tokens
        self._texts: dict[int, str] = {}

    # ------------------------------------------------------------ text and ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode many texts at once; the library uses several CPU cores."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:  # not a string, or a string with lone surrogates
            raise RequestError(f"The text cannot be tokenized: {_why_not_text(texts)}.", "prompt") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.decode_batch([[ids] if isinstance(ids, int) else list(ids)], skip_special_tokens)[0]

    def decode_batch(self, batch: Sequence[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return self._backend.decode_batch(list(batch), skip_special_tokens=skip_special_tokens)

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        if isinstance(ids, int):
            return self._id_to_token(ids)
        return [self._id_to_token(int(token)) for token in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._token_to_id(tokens)
        return [self._token_to_id(token) for token in tokens]

    def _id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def _token_to_id(self, token: str) -> int | None:
        found = self._backend.token_to_id(token)
        unknown = self.special_tokens_map.get("unk_token")
        return self._backend.token_to_id(unknown) if found is None and unknown is not None else found

    # ------------------------------------------------------------ one token at a time

    def token_bytes(self, skip_special_tokens: bool) -> TokenBytes | None:
        """The bytes of each token for byte-level tokenizers; None for other tokenizers."""
        if type(self._backend.decoder).__name__ != "ByteLevel":
            return None
        if skip_special_tokens not in self._bytes:
            skipped = self._skipped_tokens if skip_special_tokens else frozenset()
            self._bytes[skip_special_tokens] = TokenBytes(self._backend, skipped)
        return self._bytes[skip_special_tokens]

    @cached_property
    def _skipped_tokens(self) -> frozenset[str]:
        """Tokens that skip_special_tokens removes from text."""
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def added_tokens(self, skip_special_tokens: bool) -> dict[int, str]:
        """Tokens added to the vocabulary that are visible in text, with their text."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token_id: token.content for token_id, token in added if not (skip_special_tokens and token.special)}

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a longer text: with its leading space, and special tokens visible."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._token_text(token_id)
        return found

    def _token_text(self, token_id: int) -> str:
        table = self.token_bytes(skip_special_tokens=False)
        if table is not None:
            return table[token_id].decode("utf-8", "replace")
        before = self.encode("a", add_special_tokens=False)[-1:]
        return self.decode([*before, token_id])[len(self.decode(before)) :]

    # ------------------------------------------------------------ chat

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """Render a conversation as token ids or text. Further keywords are variables of the template."""
        for name, value in _NOT_VARIABLES.items():
            if variables.pop(name, value) != value:
                raise RequestError(f"apply_chat_template does not support {name}; leave it at {value!r}.", name)
        text = self.render_chat(
            messages,
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """Render a conversation as text, which has its special tokens already. `options`: see ChatTemplate.render."""
        source = choose_template(self.chat_template, chat_template, tools is not None)
        return compile_template(source).render(messages, tools=tools, **{**self.special_tokens_map, **options})

    # ------------------------------------------------------------ the vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Without added tokens."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        """With added tokens."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self._token_to_id(self.bos_token)

    @cached_property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self._token_to_id(self.eos_token)

    @cached_property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self._token_to_id(self.pad_token)

    @cached_property
    def all_special_ids(self) -> list[int]:
        return [token for token in map(self._token_to_id, self.all_special_tokens) if token is not None]


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer, computed on first use; empty for unknown ids."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[str]) -> None:
        self._backend = backend
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._skipped:
            found = b""
        else:
            try:
                found = bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token, which is plain text
                found = token.encode()
        self[token_id] = found
        return found


def _byte_characters() -> dict[str, int]:
    """The character for each byte in byte-level vocabularies: its own if printable, otherwise one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _why_not_text(texts: Sequence[object]) -> str:
    for text in texts:
        if not isinstance(text, str):
            return f"it is not a string but {type(text).__name__}"
        broken = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
        if broken is not None:
            return f"{broken!r} is a lone surrogate, not a character"
    return "it is not valid text"
