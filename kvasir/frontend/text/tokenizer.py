"""Tokenizer: converts text to token ids and back with the `tokenizers` library. API process.

Its methods are those of a Hugging Face tokenizer that callers need, with the same results as transformers, except that
clean_up_tokenization_spaces is never applied: it is meant for WordPiece and would damage generated text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import tokenizers

from kvasir.errors import RequestError
from kvasir.frontend.text.chat_template import choose_template, compile_template

# Normalizers that keep the number of characters, or add one; NFC composes up to _MOST_COMPOSED characters to one.
_HARMLESS = re.compile(r'Prepend\(prepend="."\)|Replace\(pattern=String\(" "\), content="▁"\)|normalizers=|[\[\](), ]')
_NAME = re.compile(r"Sequence|NFC")
_MOST_COMPOSED = 4
_MOST_LENGTHS = 8  # lengths to cut texts to for which a copy of the tokenizer is kept
_ACROSS_WORDS = re.compile(r"[0-9A-Za-z][ Ġ▁]|(?:\n|Ċ|<0x0A>)[A-Za-z]")
WORD_BOUNDARY = re.compile(r"(?<=[0-9A-Za-z]) |(?<=\n)(?=[A-Za-z])")  # for Tokenizer.splits_at_words

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

# Texts of tokens that end a generated text, as in llama.cpp: models produce them even if their files name another eos.
END_TEXTS = frozenset(
    (
        *("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "</s>", "<eos>"),
        *("<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<\uff5cend▁of▁sentence\uff5c>", "[e~["),
        # Code models: what follows is padding, another repository or another file.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    )
)
# A text that does not end the output of a model that has all of the others: there it only separates parts of a reply.
_SEPARATORS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)


def end_texts(texts: Iterable[str]) -> frozenset[str]:
    """Return the texts of a vocabulary that end a generated text."""
    found = END_TEXTS.intersection(texts)
    return found - {text for text, others in _SEPARATORS if others <= found}


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
        self.additional_special_tokens = [token for token in self.all_special_tokens if token not in special.values()]
        self.chat_template = chat_template  # a dict if there are several, by name
        self._bytes: dict[tuple[bool, frozenset[str]], TokenBytes] = {}  # by skip_special_tokens, and what stays
        self._texts: dict[int, str] = {}
        self._cutting: dict[tuple[int, str], tokenizers.Tokenizer] = {}  # by the length that texts are cut to, and side

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

    def encode_pairs(
        self,
        texts: Sequence[str | tuple[str, str]],
        max_length: int | None,
        side: str = "right",
        add_special_tokens: bool = True,
    ) -> list[tuple[list[int], list[int]]]:
        """Ids and kinds (0 for a first text, 1 for a second) of texts and of pairs of texts, cut to `max_length`
        tokens at the `side`: the longer text of a pair is cut first, and special tokens stay."""
        backend = self._cutting_backend(max_length, side)
        try:
            encodings = backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError, ValueError) as error:
            said = _why_not_text([text for each in texts for text in (each if isinstance(each, tuple) else (each,))])
            raise RequestError(f"The text cannot be tokenized: {said}.", "prompt") from error
        return [(encoding.ids, encoding.type_ids) for encoding in encodings]

    def _cutting_backend(self, max_length: int | None, side: str) -> tokenizers.Tokenizer:
        """Return a copy of the tokenizer that cuts texts to this length. Few copies are kept, the newest ones."""
        if max_length is None:
            return self._backend
        key = max_length, side
        if key not in self._cutting:
            copied = tokenizers.Tokenizer.from_str(self._backend.to_str())
            copied.enable_truncation(max_length, direction=side)
            while len(self._cutting) >= _MOST_LENGTHS:
                self._cutting.pop(next(iter(self._cutting)), None)
            self._cutting[key] = copied
        return self._cutting[key]

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

    def token_bytes(self, skip_special_tokens: bool, keep: frozenset[str] = frozenset()) -> TokenBytes | None:
        """The bytes of each token for byte-level tokenizers; None for other tokenizers. `keep`: special tokens that are
        not skipped."""
        if type(self._backend.decoder).__name__ != "ByteLevel":
            return None
        key = skip_special_tokens, keep
        if key not in self._bytes:
            skipped = frozenset(self.skipped_tokens if skip_special_tokens else ()) - keep
            self._bytes[key] = TokenBytes(self._backend, skipped)
        return self._bytes[key]

    @cached_property
    def skipped_tokens(self) -> dict[str, int]:
        """Tokens that skip_special_tokens removes from text, with their ids."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """The eos token, and hidden tokens that are known to end a text: if they did not, users would not see why it
        goes on."""
        ends = {self.skipped_tokens[text] for text in end_texts(self.skipped_tokens)}
        return frozenset(ends if self.eos_token_id is None else ends | {self.eos_token_id})

    def added_tokens(self, skip_special_tokens: bool) -> dict[int, str]:
        """Tokens added to the vocabulary that are visible in text, with their text."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token_id: token.content for token_id, token in added if not (skip_special_tokens and token.special)}

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """Tokens added to the vocabulary, special or not, by their text."""
        return {text: token_id for token_id, text in self.added_tokens(skip_special_tokens=False).items()}

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

    can_serialize = True

    def serialized(self) -> str:
        """The tokenizer in the format of tokenizer.json."""
        return self._backend.to_str()

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Without added tokens."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    @property
    def num_ordinary_tokens(self) -> int:
        """How many tokens stand for text: neither special nor added."""
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        own = self._backend.get_vocab(with_added_tokens=False).keys()
        return len(own - added - set(self.all_special_tokens))

    def __len__(self) -> int:
        """With added tokens."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def prepare_limits(self) -> None:
        """Compute `characters_per_token` and `splits_at_words` before they are needed: they look at the whole
        vocabulary."""
        _ = self.characters_per_token, self.splits_at_words

    @cached_property
    def characters_per_token(self) -> int | None:
        """The most characters of a text that become one token; None if the tokenizer sets no limit: it may drop
        characters, or write one token for many that it does not know."""
        model = self._backend.model
        knows_all = type(self._backend.decoder).__name__ == "ByteLevel" or getattr(model, "byte_fallback", False)
        normalizer = "" if self._backend.normalizer is None else _HARMLESS.sub("", repr(self._backend.normalizer))
        strips = any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())
        if not knows_all or _NAME.sub("", normalizer) or strips:
            return None
        longest = max(map(len, self.get_vocab()))
        return longest * _MOST_COMPOSED if normalizer else longest

    @cached_property
    def splits_at_words(self) -> bool:
        """Whether no token goes on beyond an ASCII word into the space after it, or beyond a line break into a word.

        Then a text's tokens after such a place do not depend on the text before it: merges make only tokens of the
        vocabulary, and all pre-tokenizers split there, too.
        """
        return not any(_ACROSS_WORDS.search(token) for token in self.get_vocab())

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
