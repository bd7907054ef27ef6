"""Loads the tokenizer of a model directory. API process; needs no torch.

tokenizer.json defines tokenization, including bos and eos (as in transformers 5, add_bos_token is ignored), except for
what the classes of some models bring, which is in tokenizer_classes.py;
tokenizer_config.json and special_tokens_map.json name the special tokens. Without a tokenizer.json, transformers makes
a tokenizer from the files that exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers

from kvasir.config.engine import ModelConfig
from kvasir.errors import ConfigError, ModelError, RequestError
from kvasir.frontend.text.chat_template import compile_template
from kvasir.frontend.text.tokenizer import TokenBytes, Tokenizer
from kvasir.frontend.text.tokenizer_classes import follow_class
from kvasir.frontend.text.tokenizer_gguf import load_gguf_tokenizer
from kvasir.log import get_logger
from kvasir.quantization.gguf_file import read_gguf

logger = get_logger(__name__)

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A tokenizer without a vocabulary has at most this many tokens that are not special: T5's has the space alone.
_FEW_TOKENS = 1
_FAR_SMALLER = 10  # times fewer tokens than the model's vocabulary: a part of the vocabulary at best
_VOCABULARIES = ("*vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "*.bpe")  # files that may hold one
_ADVICE = "Set tokenizer=... to another tokenizer, or set skip_tokenizer_init=True and send token ids."


def tokenizer_of(model: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a model with resolved settings; None if skip_tokenizer_init is set.

    Chat templates are compiled here. A broken chat_template setting is an error; a broken template of the model is only
    a warning, because the model can still complete prompts.
    """
    if model.skip_tokenizer_init:
        return None
    tokenizer = load_tokenizer(model.tokenizer)
    if model.chat_template is not None:
        try:
            compile_template(model.chat_template)
        except RequestError as error:
            raise ConfigError(f"The chat_template setting is wrong. {error}") from error
        return tokenizer
    own = tokenizer.chat_template or {}
    for source in [own] if isinstance(own, str) else own.values():
        try:
            compile_template(source)
        except RequestError as error:
            logger.warning(
                "The model cannot be used for chat: %s. Set chat_template to another template.", str(error).rstrip(".")
            )
    return tokenizer


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer of a local model directory or GGUF file, or raise a ModelError."""
    directory = Path(directory)
    if directory.is_file():
        return load_gguf_tokenizer(read_gguf(directory))
    file = directory / "tokenizer.json"
    if not file.is_file():
        return _through_transformers(directory)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise ModelError(f"{file} cannot be read as a tokenizer: {error}. {_ADVICE}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    try:
        return _configured(backend, config, directory)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        message = f"{directory / 'tokenizer_config.json'} does not have the expected form"
        raise ModelError(f"{message} ({type(error).__name__}: {error}). {_ADVICE}") from error


def _configured(backend: tokenizers.Tokenizer, config: Mapping[str, Any], directory: Path) -> Tokenizer:
    follow_class(backend, config, _read_json(directory / "config.json"))
    if _read_json(directory / "sentence_bert_config.json").get("do_lower_case") is True:  # sentence-transformers
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    named, extra = _special_tokens(config, directory)
    _add_tokens(backend, config.get("added_tokens_decoder", {}), [*named.values(), *extra])
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    names = {name: token.content for name, token in named.items()}
    made = Tokenizer(backend, names, [token.content for token in extra], _chat_template(directory, config))
    num_added = len(made.all_special_tokens) + len(backend.get_added_tokens_decoder())
    # As transformers saves a tokenizer that it made without a vocabulary. Counting a large vocabulary would take long.
    if made.vocab_size <= num_added and not made.num_ordinary_tokens:
        raise ModelError(
            f"{directory / 'tokenizer.json'} has no token that stands for text, only special ones. Get the original "
            f"file from the model's source. {_ADVICE}"
        )
    return made


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:  # also raised for invalid UTF-8
        raise ModelError(f"{file} is not valid JSON: {error}. {_ADVICE}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, not a {type(value).__name__}. {_ADVICE}")
    return value


def _special_tokens(config: Mapping[str, Any], directory: Path) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Special tokens with a name, and further ones."""
    entries = dict(config)
    if "added_tokens_decoder" not in config:  # an older layout, in which this file takes precedence
        entries |= _read_json(directory / "special_tokens_map.json")
    extra = entries.get("extra_special_tokens") or entries.get("additional_special_tokens") or []
    named = {name: _special(entries[name]) for name in _NAMES if entries.get(name) is not None}
    # Models may define further names, such as image_token.
    named |= {key: _special(t) for key, t in entries.items() if key.endswith("_token") and isinstance(t, str)}
    if isinstance(extra, dict):
        return named | {name: _special(token) for name, token in extra.items()}, []
    return named, [_special(token) for token in extra]


def _special(token: str | Mapping[str, Any]) -> AddedToken:
    """Read a token that is a string, or a dict that also defines how it is matched."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    how = {key: value for key, value in token.items() if key not in ("__type", "content", "special")}
    return AddedToken(token["content"], special=True, **how)


def _add_tokens(backend: tokenizers.Tokenizer, configured: Mapping[str, Any], special: Sequence[AddedToken]) -> None:
    """Add tokens that the vocabulary lacks, and apply the configured matching options to those that it has."""
    by_id = sorted(configured.items(), key=lambda item: int(item[0]))
    backend.add_tokens([AddedToken(**token) for _, token in by_id])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in special if token.content not in known])


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by name; None if the model has none."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    found: Any = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    if not found:
        found = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, list):
        found = {template["name"]: template["template"] for template in found}
    templates = {str(name): str(template) for name, template in found.items()}
    return templates["default"] if list(templates) == ["default"] else templates


# ---------------------------------------------------------------- without tokenizer.json


def _through_transformers(directory: Path) -> Tokenizer:
    # Imported here because it takes seconds and few models need it.
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        message = f"{directory} has no tokenizer.json, and transformers, which may load it without, is not installed."
        raise ModelError(f"{message} {_ADVICE}") from error
    logger.info("%s has no tokenizer.json; loading its tokenizer with transformers.", directory)
    try:
        other = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its classes raise all kinds of errors
        if said := _absent_files(directory):
            raise ModelError(said) from error
        why = " ".join(str(error).split()).rstrip(".")  # of several lines
        message = f"{directory} has no tokenizer.json, and transformers cannot load its tokenizer without ({why})."
        raise ModelError(f"{message} {_ADVICE}") from error
    named = other.special_tokens_map
    extra = [token for token in other.all_special_tokens if token not in named.values()]
    template = _chat_template(directory, {"chat_template": other.chat_template})
    kind, backend = (Tokenizer, other.backend_tokenizer) if other.is_fast else (TransformersTokenizer, other)
    made = kind(backend, named, extra, template)
    _check_vocabulary(made, directory, other.vocab_files_names)
    return made


def _check_vocabulary(made: Tokenizer, directory: Path, known: Mapping[str, str]) -> None:
    """Raise if transformers has made a tokenizer without its vocabulary, which it does silently for many classes: all
    texts would become the same few tokens. `known`: the files of its class."""
    if not known:
        return  # bytes or code points are its tokens
    found = made.num_ordinary_tokens
    hf = _read_json(directory / "config.json")
    inner = hf.get("text_config")
    size = (inner if isinstance(inner, dict) else hf).get("vocab_size")
    least = size // _FAR_SMALLER if isinstance(size, int) else 0
    if found > max(_FEW_TOKENS, least):
        return
    own = [name for key, name in known.items() if key.endswith(("vocab_file", "merges_file"))]
    missing = [name for name in own if not (directory / name).is_file()]
    if not own or missing:
        raise ModelError(_without_vocabulary(directory, missing))
    of = f", and the model's vocabulary has {size}" if isinstance(size, int) else ""
    raise ModelError(
        f"{' and '.join(own)} in {directory} give the tokenizer only {found} tokens that stand for text{of}. Is the "
        f"download complete? Get these files again, or tokenizer.json. {_ADVICE}"
    )


def _absent_files(directory: Path) -> str:
    """A message about files that no tokenizer can be made without; empty if transformers' own says more."""
    pair = ("vocab.json", "merges.txt")
    absent = [name for name in pair if not (directory / name).is_file()]
    if len(absent) == 1 and not any(directory.glob("*.model")):
        return _without_vocabulary(directory, absent)
    if any(True for pattern in _VOCABULARIES for _ in directory.glob(pattern)):
        return ""
    return _without_vocabulary(directory, [])


def _without_vocabulary(directory: Path, missing: Sequence[str]) -> str:
    """`missing`: files that can stand in for tokenizer.json."""
    instead = f" (or {' and '.join(missing)}, from which it can be made)" if missing else ""
    beside = (
        "" if (directory / "tokenizer_config.json").is_file() else " So is tokenizer_config.json, which may matter."
    )
    return (
        f"{directory} holds no complete vocabulary for its tokenizer: tokenizer.json{instead} is missing.{beside} Is "
        f"the download complete? Get the missing files from the model's source. {_ADVICE}"
    )


class TransformersTokenizer(Tokenizer):
    """A slow tokenizer that transformers implements in Python. Few models need it."""

    _backend: Any
    can_serialize = False

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self._backend.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode_batch(self, batch: Sequence[list[int]], skip_special_tokens: bool = False) -> list[str]:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return [self._backend.decode(ids, **options) for ids in batch]

    def _id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._backend.convert_ids_to_tokens(token_id)
        return token

    def _token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.convert_tokens_to_ids(token)
        return token_id

    def token_bytes(self, skip_special_tokens: bool, keep: frozenset[str] = frozenset()) -> TokenBytes | None:
        return None

    @cached_property
    def skipped_tokens(self) -> dict[str, int]:
        return dict(zip(self._backend.all_special_tokens, self._backend.all_special_ids, strict=True))

    def get_vocab(self) -> dict[str, int]:
        return dict(self._backend.get_vocab())

    @property
    def vocab_size(self) -> int:
        return int(self._backend.vocab_size)

    @property
    def num_ordinary_tokens(self) -> int:
        return len(self.get_vocab().keys() - self._backend.get_added_vocab().keys() - set(self.all_special_tokens))

    def __len__(self) -> int:
        return len(self._backend)
