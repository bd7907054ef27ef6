"""The base of all bodies: types as vLLM takes them, bounded lists, errors for unknown fields and for fields that the
server cannot honour."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from kvasir.errors import did_you_mean
from kvasir.server.schema.field_docs import FIELD_DOCS

MAX_TOKEN_IDS = 1 << 20  # of all prompts of a request; decoding more holds up the event loop
MAX_ENTRIES = 1 << 16  # of a list or an object whose field sets no other limit
MAX_OBJECTS = 1 << 15  # of a list of objects or lists, such as messages; each takes far more work than a number
_MAX_NAME = 64  # characters of an unknown field's name that are repeated and compared with known ones


def _bounded(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(_bounded(each) for each in schema)
    if not isinstance(schema, dict):
        return schema
    skipped = ("metadata", "cls") if isinstance(schema.get("type"), str) else ()  # the rest are fields by name
    made = {key: value if key in skipped else _bounded(value) for key, value in schema.items()}
    if made.get("type") in ("list", "dict"):
        made["fail_fast"] = True
        is_plain = made["type"] == "dict" or _kind(made.get("items_schema")) in _PLAIN
        made.setdefault("max_length", MAX_ENTRIES if is_plain else MAX_OBJECTS)
    return made


_PLAIN = ("str", "int", "float", "bool")


def _kind(schema: Any) -> str | None:
    """Return the type of a list's entries, without what wraps it."""
    while isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        schema = schema["schema"]
    return schema.get("type") if isinstance(schema, dict) else None


class BoundedModel(BaseModel):
    """A model whose lists and objects have a maximum length and fail at their first wrong entry.

    pydantic would collect an error for every entry otherwise: gigabytes for a list of a million numbers where texts are
    expected. The limits are set on all lists and objects of the schema, so no field can be forgotten.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        bounded: CoreSchema = _bounded(handler(source))
        return bounded


class Refusal(NamedTuple):
    """Metadata of a field that is known but not available."""

    why: str
    harmless: tuple[object, ...]


def refused(why: str, *harmless: object) -> Any:
    """A field that clients know and this server cannot honour. Only null and `harmless` values are accepted."""
    accepted: Any = [None, *harmless]
    field: Any = Field(default=None, description=f"Not available: {why}", json_schema_extra={"enum": accepted})
    field.metadata.append(Refusal(why, harmless))
    return field


class Body(BoundedModel):
    """A request's body. An unknown field is an error that names similar ones: a misspelt parameter must not silently
    get its default. Routes remove unknown top-level fields before, unless --unknown-fields is refuse.

    Values are converted as in vLLM: 2.0 is an integer, "true" is true.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
    max_values: ClassVar[int] = 1 << 19  # numbers and other values in all its lists and objects

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
                    short = str(name)[:_MAX_NAME]
                    hint = did_you_mean(short, cls.model_fields)
                    raise invalid(short, f"Unrecognized request argument supplied: {short}.{hint}")
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


_MAX_METADATA = 16, 64, 512  # entries, characters of a name, characters of a value: OpenAI's limits


def check_metadata(metadata: dict[str, str] | None) -> None:
    entries, longest_name, longest_value = _MAX_METADATA
    if len(metadata or ()) > entries:
        raise invalid("metadata", f"metadata may have at most {entries} entries.")
    for name, value in (metadata or {}).items():
        if len(name) > longest_name or len(value) > longest_value:
            message = f"A name in metadata may have {longest_name} characters, a value {longest_value}."
            raise invalid("metadata", message)


class Reply(msgspec.Struct):
    """A reply's body, or a part of it. Fields of type UnsetType are left out unless they are set."""


encode = msgspec.json.Encoder().encode


# ---------------------------------------------------------------- replies that several routes share


class PromptTokensDetails(Reply, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(Reply, kw_only=True):
    reasoning_tokens: int


class Usage(Reply, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of models that reason


class ErrorDetail(Reply, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorReply(Reply, kw_only=True):
    error: ErrorDetail


class DeletedReply(Reply, kw_only=True):
    id: str
    object: str
    deleted: bool = True


class MessagesErrorDetail(Reply, kw_only=True):
    type: str
    message: str


class MessagesErrorReply(Reply, kw_only=True):
    """An error as Anthropic's clients read it."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None = None
