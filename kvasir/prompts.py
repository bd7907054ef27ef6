"""What a prompt may be: text, token ids, or a dict of either. Types only; frontend/input.py does the checking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypeAlias, TypedDict


class TextPrompt(TypedDict):
    """Text to be tokenized."""

    prompt: str
    cache_salt: NotRequired[str]  # requests share cached prefixes only with those of the same salt


class TokensPrompt(TypedDict):
    """Token ids, ready for the model. `prompt` is only repeated in the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
