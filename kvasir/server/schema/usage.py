"""Replies' counts of tokens, and the error body of OpenAI's interface."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from kvasir.server.schema.base import Reply


class PromptTokensDetails(Reply, kw_only=True):
    cached_tokens: int


class Usage(Reply, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class ErrorDetail(Reply, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorReply(Reply, kw_only=True):
    error: ErrorDetail
