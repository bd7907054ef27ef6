"""Makes a tokenizer from the metadata of a GGUF file. API process; needs neither torch nor transformers.

A GGUF file only names the pre-tokenizer of a byte-level vocabulary (tokenizer.ggml.pre); the patterns here are those of
the models' tokenizer.json. The merges of a SentencePiece vocabulary are derived from its scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from kvasir.errors import KvasirError, ModelError
from kvasir.frontend.text.tokenizer import Tokenizer, end_texts
from kvasir.quantization.gguf_file import GGUFFile

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
_ADVICE = "Set tokenizer=... to another tokenizer, or set skip_tokenizer_init=True and send token ids."

# ---------------------------------------------------------------- pre-tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA3 = rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|\p{{N}}|{_REST}"
TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
GPT4O = rf"{_LEAD}{_UPPER}*{_LOWER}+{_ENDINGS}|{_LEAD}{_UPPER}+{_LOWER}*{_ENDINGS}|\p{{N}}{{1,3}}|{_SLASHES}"
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^" "\r\n" r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[" "\r\n" r"]*|\s*[" "\r\n" r"]+|\s+(?!\S)|\s+",
)  # fmt: skip


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split into pieces, within which BPE merges."""

    patterns: tuple[str, ...] = ()  # empty uses GPT-2's
    digits: bool = False  # first split off every digit
    whole_words: bool = False  # a piece that is a token is not merged from parts (ignore_merges)
    compose: bool = False  # normalize to NFC
    bos: bool = False  # add the bos token unless the file says otherwise

    def build(self) -> Any:
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps)


PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jina-es", "jina-de"), PreTokenizer()),
    **dict.fromkeys(("olmo", "mpt"), PreTokenizer(compose=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), PreTokenizer(digits=True)),
    "command-r": PreTokenizer(digits=True, compose=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), PreTokenizer((LLAMA3,), whole_words=True, bos=True)
    ),
    "dbrx": PreTokenizer((LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer((QWEN2,), compose=True)),
    "stablelm2": PreTokenizer((QWEN2,)),
    "tekken": PreTokenizer((TEKKEN,), whole_words=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((GPT4O,))),
    "deepseek-v3": PreTokenizer(DEEPSEEK, bos=True),
}


# ---------------------------------------------------------------- the tokenizer


def load_gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    entries = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    if not entries.get("tokens"):
        raise ModelError(f"{file.path} has no tokenizer. {_ADVICE}")
    check_entries(file)
    try:
        return _load(file, entries)
    except KvasirError:
        raise
    except Exception as error:  # the library raises plain Exceptions
        why = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{file.path} is damaged: its tokens and merges do not make a tokenizer ({why}); download it again."
        ) from error


def _load(file: GGUFFile, entries: dict[str, Any]) -> Tokenizer:
    kind, tokens = entries.get("model"), entries["tokens"]
    if kind == "gpt2":
        backend, bos = _byte_level(file, entries)
    elif kind == "llama":
        backend, bos = _sentencepiece(entries), True
    else:
        raise ModelError(
            f"{file.path} has a tokenizer of type {kind!r:.80}; only gpt2 and llama are supported. {_ADVICE}"
        )
    _add_tokens(backend, tokens, entries.get("token_type") or [])
    named = _named_tokens(entries, tokens)
    _add_bos_and_eos(backend, named, entries.get("add_bos_token", bos), entries.get("add_eos_token", False))
    return Tokenizer(backend, named, chat_template=file.metadata.get("tokenizer.chat_template"))


def _byte_level(file: GGUFFile, entries: dict[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    pre = entries.get("pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(
            f"{file.path} needs the pre-tokenizer {pre!r:.80}, which is not supported; supported are {known}. {_ADVICE}"
        )
    pre_tokenizer = PRE_TOKENIZERS[pre]
    merges = [_pair(merge) for merge in entries.get("merges") or []]
    model = models.BPE(_vocabulary(entries["tokens"]), merges, ignore_merges=pre_tokenizer.whole_words)
    backend = tokenizers.Tokenizer(model)
    if pre_tokenizer.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre_tokenizer.bos


def _pair(merge: str) -> tuple[str, str]:
    """Split a merge at the space between its two tokens; the first token may itself begin with a space."""
    left, right = merge[:1] + merge[1:].split(" ", 1)[0], merge[1:].split(" ", 1)[1]
    return left, right


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _sentencepiece(entries: dict[str, Any]) -> tokenizers.Tokenizer:
    tokens, prefix = entries["tokens"], entries.get("add_space_prefix", True)
    unknown = tokens[entries.get("unknown_token_id", 0)]
    merges = _merges_from_scores(tokens, entries.get("scores") or [0.0] * len(tokens))
    model = models.BPE(_vocabulary(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return backend


def _merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to merge two tokens into a third, ordered by the score of the third."""
    numbers = _vocabulary(tokens)
    found = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in numbers and pair[1] in numbers]
        pairs.sort(key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
        found += [(score, pair) for pair in pairs]
    found.sort(key=lambda entry: (entry[0], len(entry[1][0]), len(entry[1][1])), reverse=True)
    return [pair for _, pair in found]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens become special tokens; user-defined ones are matched as a whole but stay visible in text.

    Tokens that end a text are control tokens, whatever the file says, as in llama.cpp.
    """
    ends = end_token_texts(tokens, kinds)
    typed = zip(tokens, [*kinds, *[NORMAL] * len(tokens)], strict=False)
    known = ((token, CONTROL if token in ends else kind) for token, kind in typed)
    marked = [(token, kind) for token, kind in known if kind in (CONTROL, USER_DEFINED)]
    backend.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in marked])


def end_token_ids(file: GGUFFile) -> set[int]:
    """The tokens that end a text, by the ids that the file names and by the texts of its tokens."""
    named = (file.metadata.get(_PREFIX + name) for name in _END_IDS)
    tokens, kinds = (file.metadata.get(_PREFIX + name) or [] for name in ("tokens", "token_type"))
    texts = end_token_texts(tokens, kinds)
    return {number for number in named if number is not None} | {i for i, text in enumerate(tokens) if text in texts}


def end_token_texts(tokens: list[str], kinds: list[int]) -> frozenset[str]:
    """The texts of tokens that end a text. `</s>` is also an HTML tag, so it must be a control token."""
    tags = {token for token, kind in zip(tokens, kinds, strict=False) if token == "</s>" and kind != CONTROL}
    return end_texts(tokens) - tags


def _named_tokens(entries: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    ids = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    found = {f"{name}_token": entries.get(key) for name, key in ids.items()}
    return {name: tokens[number] for name, number in found.items() if number is not None and number < len(tokens)}


def _add_bos_and_eos(backend: tokenizers.Tokenizer, named: dict[str, str], bos: bool, eos: bool) -> None:
    first = named.get("bos_token") if bos else None
    last = named.get("eos_token") if eos else None
    used = [token for token in (first, last) if token is not None]
    if used:
        single = " ".join([*([first] if first else []), "$A", *([last] if last else [])])
        numbers = [(token, backend.token_to_id(token)) for token in dict.fromkeys(used)]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=numbers)


# ---------------------------------------------------------------- checks of the metadata

_PREFIX = "tokenizer.ggml."
_LISTS = {"tokens": str, "merges": str, "scores": float, "token_type": int}
_SCALARS = {
    "tokenizer.chat_template": str,
    **{_PREFIX + name: str for name in ("model", "pre")},
    **{_PREFIX + name: bool for name in ("add_bos_token", "add_eos_token", "add_space_prefix")},
}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
_IDS = ("bos_token_id", "unknown_token_id", "padding_token_id", *_END_IDS)
_TYPE_NAMES = {str: "string", float: "number", int: "integer", bool: "boolean"}
_MAX_TOKEN_LENGTH = 1 << 14  # characters; deriving the merges of a longer token would take too long


def check_entries(file: GGUFFile) -> None:
    """Raise a ModelError unless every entry has the right type and all text is UTF-8."""
    for fault in _faults(file.metadata):
        raise ModelError(f"{file.path} is damaged: {fault}; download it again.")


def _faults(metadata: dict[str, Any]) -> Iterator[str]:
    for name, kind in _LISTS.items():
        values = metadata.get(_PREFIX + name)
        if values is None:
            continue
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            yield f"{_PREFIX}{name} is not a list of {_TYPE_NAMES[kind]}s"
        elif kind is str:
            yield from _text_faults(_PREFIX + name, values)
    for name, kind in _SCALARS.items():
        value = metadata.get(name)
        if value is not None and type(value) is not kind:
            yield f"{name} is not a {_TYPE_NAMES[kind]}"
        elif isinstance(value, str) and not _is_utf8(value):
            yield f"{name} is not UTF-8"
    for name in _IDS:
        value = metadata.get(_PREFIX + name)
        if value is not None and (type(value) is not int or value < 0):
            yield f"{_PREFIX}{name} is not a token id"


def _text_faults(name: str, values: list[str]) -> Iterator[str]:
    """Invalid UTF-8 was read with surrogate escapes, which cannot be encoded."""
    for number, value in enumerate(values):
        if len(value) > _MAX_TOKEN_LENGTH:
            yield f"entry {number} of {name} has {len(value)} characters"
        if not value.isascii() and not _is_utf8(value):
            yield f"entry {number} of {name} is not UTF-8"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
