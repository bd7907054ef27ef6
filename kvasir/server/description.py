"""The API's description (/openapi.json): what FastAPI writes, made exact.

Bodies take more than their types say: pydantic converts values ("true" is true, 2.0 is 2), as clients of vLLM expect,
and unknown top-level fields are removed unless --unknown-fields is refuse. The description says so, so that whatever
does not fit it is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from kvasir.server.schema.base import Reply

_REFERENCE = "#/components/schemas/{name}"
_SPACE = r"[\s\u0085]*"
BOOLEAN_TEXT = (
    "^(0|1|[tT]|[fF]|[yY]|[nN]|[oO][nN]|[nN][oO]|[oO][fF][fF]|[yY][eE][sS]|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE])$"
)
# pydantic drops leading zeros with what follows them: "0_1" and even "0-1" are integers
INTEGER_TEXT = rf"^{_SPACE}[+-]?(0[0_]*-?_?)?[0-9]+(_[0-9]+)*(\.0+)?{_SPACE}$"
_POINT = r"[0-9](_?[0-9])*(_?\.(_?[0-9])*)?|\.(_?[0-9])+"
NUMBER_TEXT = rf"^{_SPACE}([+-]_?)?({_POINT})(_?[eE](_?[+-])?(_?[0-9])+)?{_SPACE}$"
IS_CONVERSION = "x-conversion"  # /docs leaves these out of a field's type
_CONVERSIONS: dict[str, dict[str, Any]] = {
    "boolean": {
        "title": "ConvertedBoolean",
        "description": "0 or 1, or true, false, yes, no, on, off, t, f, y, n, 0 or 1 as a string.",
        "anyOf": [{"enum": [0, 1]}, {"type": "string", "pattern": BOOLEAN_TEXT}],
    },
    "integer": {
        "title": "ConvertedInteger",
        "description": "An integer as a string, or a boolean, which is 0 or 1.",
        "anyOf": [{"type": "string", "pattern": INTEGER_TEXT}, {"type": "boolean"}],
    },
    "number": {
        "title": "ConvertedNumber",
        "description": "A number as a string, or a boolean, which is 0 or 1.",
        "anyOf": [{"type": "string", "pattern": NUMBER_TEXT}, {"type": "boolean"}],
    },
}
_VALUES = ("default", "examples", "enum")  # keys of a schema whose content is no schema
_BESIDE = ("title", "description", "default", "examples")  # what stays beside a field's alternatives


def describe(app: FastAPI, unknown_fields: str) -> None:
    """Complete the application's description when it is first asked for."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            spec = plain()
            _describe_bodies(spec, unknown_fields)
            _describe_replies(spec)
            _drop_default_errors(spec)
            app.openapi_schema = spec
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_bodies(spec: dict[str, Any], unknown_fields: str) -> None:
    schemas = spec.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in schemas.items():  # of pydantic's models: replies are none
        schemas[name] = with_conversions(schema)
    schemas.update({each["title"]: {**each, IS_CONVERSION: True} for each in _CONVERSIONS.values()})
    if unknown_fields == "refuse":
        return
    for path in spec["paths"].values():
        for operation in path.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            if name:
                schemas[name]["additionalProperties"] = True


def with_conversions(schema: Any) -> Any:
    """The schema with what is converted to its booleans and numbers, at every depth."""
    if isinstance(schema, list):
        return [with_conversions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: each if key in _VALUES else with_conversions(each) for key, each in schema.items()}
    if isinstance(fields := schema.get("properties"), dict):
        made["properties"] = {name: with_conversions(field) for name, field in fields.items()}
    conversion = _CONVERSIONS.get(schema["type"]) if isinstance(schema.get("type"), str) else None
    if conversion is None:
        return made
    strict = {key: each for key, each in made.items() if key not in _BESIDE}
    alternatives = [strict, {"$ref": _REFERENCE.format(name=conversion["title"])}]
    return {"anyOf": alternatives, **{key: made[key] for key in _BESIDE if key in made}}


def _describe_replies(spec: dict[str, Any]) -> None:
    """FastAPI knows pydantic's models only, and replies are structs."""
    _, replies = msgspec.json.schema_components(_all_replies(), ref_template=_REFERENCE)
    for name, reply in replies.items():
        spec["components"]["schemas"].setdefault(name, reply)


def _all_replies() -> list[type[Reply]]:
    found, todo = [], [Reply]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        found += [] if kind is Reply else [kind]
    return found


def _drop_default_errors(spec: dict[str, Any]) -> None:
    """Remove FastAPI's 422: this server never sends it."""
    for path in spec.get("paths", {}).values():
        for operation in path.values():
            operation.get("responses", {}).pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        spec["components"]["schemas"].pop(name, None)
