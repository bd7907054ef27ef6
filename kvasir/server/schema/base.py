"""What all bodies have in common: strict types, no unknown fields, and fields that are known but refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvasir.config import did_you_mean

_REFUSED = "x-refused"


def refused(why: str, *harmless: object) -> Any:
    """A field that clients know and this server cannot honour: only null and values that ask for nothing are taken."""
    note = f"Not available: {why}"
    return Field(default=None, description=note, json_schema_extra={_REFUSED: [why, list(harmless)]})


class Body(BaseModel):
    """A request's body. A field that is not there is an error, with the nearest that are: a misspelt parameter must not
    be a silent default."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    hints: ClassVar[Mapping[str, str]] = {}  # for fields of other interfaces: what to do instead

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
            extra = type(self).model_fields[name].json_schema_extra
            if isinstance(extra, dict) and _REFUSED in extra:
                why, harmless = extra[_REFUSED]  # type: ignore[misc]
                value = getattr(self, name)
                if value is not None and not any(type(value) is type(ok) and value == ok for ok in harmless):  # type: ignore[union-attr]
                    raise invalid(name, f"{name} is not available: {why}")
        return self


def invalid(name: str, message: str) -> PydanticCustomError:
    """An error of the field `name`, wherever in the body it is raised."""
    return PydanticCustomError("invalid", "{message}", {"message": message, "param": name})  # type: ignore[arg-type]


class Reply(msgspec.Struct):
    """A reply's body, or a part of it. Fields of type UnsetType are left out unless they are set."""


encode = msgspec.json.Encoder().encode
