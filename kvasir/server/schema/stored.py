"""Bodies of what is stored: chat completions (/v1/chat/completions/{id}), /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kvasir.server.schema.base import Body, Reply, check_metadata, example, refused
from kvasir.server.schema.chat import ChatCompletion


class BatchRequest(Body):
    model_config = example(
        input_file_id="file-0123456789abcdef0123456789abcdef", endpoint="/v1/chat/completions", completion_window="24h"
    )

    input_file_id: str = Field(description="A file of requests, uploaded with the purpose batch.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank"] = Field(
        description="Where all its requests go."
    )
    completion_window: Literal["24h"] = Field(description="A batch that is not complete by then expires.")
    metadata: dict[str, str] | None = Field(default=None, description="Stored with the batch and returned with it.")
    output_expires_after: Any = refused("files stay until they are deleted.")

    @model_validator(mode="after")
    def _small(self) -> BatchRequest:
        check_metadata(self.metadata)
        return self


class FileReply(Reply, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(Reply, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchError(Reply, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Reply, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Reply, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchReply(Reply, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str  # validating, failed, in_progress, finalizing, completed, expired, cancelling, cancelled
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(Reply, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ---------------------------------------------------------------- stored chat completions


class CompletionUpdate(Body):
    metadata: dict[str, str] = Field(description="Replaces the metadata of a stored completion.")

    @model_validator(mode="after")
    def _small(self) -> CompletionUpdate:
        check_metadata(self.metadata)
        return self


class CompletionList(Reply, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessageList(Reply, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
