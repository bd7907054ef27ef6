"""Reads a tokenizer from a model directory. API process; no torch.

tokenizer.json says how to tokenize (also whether bos and eos are added: as in transformers 5, add_bos_token counts for
nothing beside it), tokenizer_config.json and special_tokens_map.json name the special tokens. Where tokenizer.json is
missing, transformers is imported and makes a tokenizer of whatever files there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from kvasir.config.engine import ModelConfig
from kvasir.errors import ConfigError, ModelError, RequestError
from kvasir.frontend.text.chat_template import compile_template
from kvasir.frontend.text.tokenizer import TokenBytes, Tokenizer
from kvasir.frontend.text.tokenizer_gguf import load_gguf_tokenizer
from kvasir.log import get_logger
from kvasir.quantization.gguf_file import read_gguf

logger = get_logger(__name__)

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INSTEAD = "Name another tokenizer with tokenizer=..., or set skip_tokenizer_init=True and send token ids."


def tokenizer_of(model: ModelConfig) -> Tokenizer | None:
    """A settled model's tokenizer, unless it wants none. A chat template that does not compile is found here, not by
    the first who chats: the operator's is an error, and a model without its own still completes texts."""
    if model.skip_tokenizer_init:
        return None
    tokenizer = load_tokenizer(model.tokenizer)
    if model.chat_template is not None:
        try:
            compile_template(model.chat_template)
        except RequestError as error:
            raise ConfigError(f"chat_template cannot be used. {error}") from error
        return tokenizer
    own = tokenizer.chat_template or {}
    for source in [own] if isinstance(own, str) else own.values():
        try:
            compile_template(source)
        except RequestError as error:
            logger.warning("the model cannot chat: %s. Set chat_template to another one.", str(error).rstrip("."))
    return tokenizer


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a local model directory or GGUF file, or a ModelError."""
    directory = Path(directory)
    if directory.is_file():
        return load_gguf_tokenizer(read_gguf(directory))
    file = directory / "tokenizer.json"
    if not file.is_file():
        return _through_transformers(directory)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more particular
        raise ModelError(f"{file} cannot be read as a tokenizer: {error}. {_INSTEAD}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    try:
        return _configured(backend, config, directory)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        message = f"{directory / 'tokenizer_config.json'} does not have the expected form"
        raise ModelError(f"{message} ({type(error).__name__}: {error}). {_INSTEAD}") from error


def _configured(backend: tokenizers.Tokenizer, config: Mapping[str, Any], directory: Path) -> Tokenizer:
    named, extra = _special_tokens(config, directory)
    _add_tokens(backend, config.get("added_tokens_decoder", {}), [*named.values(), *extra])
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    names = {name: token.content for name, token in named.items()}
    return Tokenizer(backend, names, [token.content for token in extra], _chat_template(directory, config))


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:  # both bad UTF-8 and bad JSON
        raise ModelError(f"{file} is not valid JSON: {error}. {_INSTEAD}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} should hold a JSON object, not a {type(value).__name__}. {_INSTEAD}")
    return value


def _special_tokens(config: Mapping[str, Any], directory: Path) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Special tokens that have a name, and further ones."""
    entries = dict(config)
    if "added_tokens_decoder" not in config:  # an older layout, in which this file has the last word
        entries |= _read_json(directory / "special_tokens_map.json")
    extra = entries.get("extra_special_tokens") or entries.get("additional_special_tokens") or []
    named = {name: _special(entries[name]) for name in _NAMES if entries.get(name) is not None}
    # Models add names of their own, such as image_token.
    named |= {key: _special(t) for key, t in entries.items() if key.endswith("_token") and isinstance(t, str)}
    if isinstance(extra, dict):
        return named | {name: _special(token) for name, token in extra.items()}, []
    return named, [_special(token) for token in extra]


def _special(token: str | Mapping[str, Any]) -> AddedToken:
    """A token is written as a string, or as a dict that also says how to match it."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    how = {key: value for key, value in token.items() if key not in ("__type", "content", "special")}
    return AddedToken(token["content"], special=True, **how)


def _add_tokens(backend: tokenizers.Tokenizer, configured: Mapping[str, Any], special: Sequence[AddedToken]) -> None:
    """Add what the vocabulary lacks; for tokens it has, the configured way of matching them counts."""
    by_id = sorted(configured.items(), key=lambda item: int(item[0]))
    backend.add_tokens([AddedToken(**token) for _, token in by_id])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in special if token.content not in known])


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """One template, or several by name."""
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
        message = f"{directory} has no tokenizer.json, and transformers, which might do without, is not installed."
        raise ModelError(f"{message} {_INSTEAD}") from error
    logger.info("%s has no tokenizer.json: loading its tokenizer through transformers.", directory)
    try:
        other = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # whatever its many classes raise
        message = f"{directory} has no tokenizer.json, and transformers cannot do without ({error})."
        raise ModelError(f"{message} {_INSTEAD}") from error
    named = other.special_tokens_map
    extra = [token for token in other.all_special_tokens if token not in named.values()]
    template = _chat_template(directory, {"chat_template": other.chat_template})
    if other.is_fast:
        return Tokenizer(other.backend_tokenizer, named, extra, template)
    return TransformersTokenizer(other, named, extra, template)


class TransformersTokenizer(Tokenizer):
    """A tokenizer written in Python by transformers, behind the same surface. Slow, and rare."""

    _backend: Any

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

    def token_bytes(self, skip_special_tokens: bool) -> TokenBytes | None:
        return None

    def get_vocab(self) -> dict[str, int]:
        return dict(self._backend.get_vocab())

    @property
    def vocab_size(self) -> int:
        return int(self._backend.vocab_size)

    def __len__(self) -> int:
        return len(self._backend)
