"""The base of all bodies: strict types, errors for unknown fields and for fields that the server cannot honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from kvasir.config.engine import did_you_mean
from kvasir.server.schema.field_docs import FIELD_DOCS


class Refusal(NamedTuple):
    """Metadata of a field that is known but not available."""

    why: str
    harmless: tuple[object, ...]


def refused(why: str, *harmless: object) -> Any:
    """A field that clients know and this server cannot honour. Only null and `harmless` values are accepted."""
    field: Any = Field(default=None, description=f"Not available: {why}")
    field.metadata.append(Refusal(why, harmless))
    return field


class Body(BaseModel):
    """A request's body. An unknown field is an error that names similar ones: a misspelt parameter must not silently
    get its default."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    hints: ClassVar[Mapping[str, str]] = {}  # for fields of other interfaces: the field to use instead

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add descriptions to fields that have none of their own."""
        schema = handler(core_schema)
        for name, field in handler.resolve_ref_schema(schema).get("properties", {}).items():
            if name in FIELD_DOCS:
                field.setdefault("description", FIELD_DOCS[name])
        return schema

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_fields(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name in given:
                if name not in cls.model_fields:
                    hint = cls.hints.get(str(name)) or did_you_mean(name, cls.model_fields).strip()
                    raise invalid(str(name), f"Unrecognized request argument supplied: {name}. {hint}".strip())
        return given

    @model_validator(mode="after")
    def _no_refused_fields(self) -> Any:
        for name in self.model_fields_set:
            for note in type(self).model_fields[name].metadata:
                if isinstance(note, Refusal) and not _asks_nothing(getattr(self, name), note.harmless):
                    raise invalid(name, f"{name} is not available: {note.why}")
        return self


def example(**body: Any) -> ConfigDict:
    """A `model_config` with an example of the body for /docs."""
    return ConfigDict(json_schema_extra={"examples": [body]})


def _asks_nothing(value: object, harmless: tuple[object, ...]) -> bool:
    # compares types too, because True == 1 in Python
    return value is None or any(type(value) is type(ok) and value == ok for ok in harmless)


def invalid(name: str, message: str) -> PydanticCustomError:
    """An error about the field `name`, wherever in the body it is raised."""
    return PydanticCustomError("invalid", "{message}", {"message": message, "param": name})


def one_complaint(name: str, message: str) -> WrapValidator:
    """For a field of several types: one error instead of pydantic's error for each type."""

    def validated(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise invalid(name, message) from None

    return WrapValidator(validated)


class Reply(msgspec.Struct):
    """A reply's body, or a part of it. Fields of type UnsetType are left out unless they are set."""


encode = msgspec.json.Encoder().encode


# ---------------------------------------------------------------- replies that several routes share


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
