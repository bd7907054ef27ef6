"""What a JSON schema says about a value, for notations in which values are not JSON. API process.

The scanner and the grammar ask here, so that what a grammar lets a model write is read back as it was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvasir.frontend.text.grammar import FORMATS

Schema = Mapping[str, Any]
_JSON_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"))
_MAX_HOPS = 16  # from reference to reference
_DATE, _TIME = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_ZONED = rf"{_TIME}(\.[0-9]{{1,9}})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_NUMBER = "[0-9]{1,9}"
_DAYS = rf"({_NUMBER}Y({_NUMBER}M({_NUMBER}D)?)?|{_NUMBER}M({_NUMBER}D)?|{_NUMBER}D)"
_HOURS = rf"({_NUMBER}H({_NUMBER}M({_NUMBER}S)?)?|{_NUMBER}M({_NUMBER}S)?|{_NUMBER}S)"


def _ipv6() -> Iterator[str]:
    """All eight groups, or `::` in place of one or more of them."""
    group = "[0-9a-fA-F]{1,4}"
    yield f"({group}:){{7}}{group}"
    yield f"::({group}(:{group}){{0,6}})?"
    for before in range(1, 8):
        rest = 7 - before
        after = f"({group}(:{group}){{0,{rest - 1}}})?" if rest else ""
        yield f"{group}(:{group}){{{before - 1}}}::{after}"


# Formats of strings as regular expressions.
_FORMATS = {
    "date": _DATE,
    "time": _ZONED,
    "date-time": f"{_DATE}T{_ZONED}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "|".join(_ipv6()),
    "duration": rf"P({_NUMBER}W|{_DAYS}(T{_HOURS})?|T{_HOURS})",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,8}}",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL}){{0,8}}",
}


def resolved(schema: object, root: Schema) -> Schema:
    """Return a schema with its reference and its parts (`allOf`) merged into it. A reference that is not found limits
    nothing."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" in schema:
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            schema = {**_find(schema["$ref"], root), **rest}
        elif isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
            rest = {name: value for name, value in schema.items() if name != "allOf"}
            schema = {**(parts[0] if isinstance(parts[0], Mapping) else {}), **rest}
        else:
            return schema
    return {}


def _find(reference: object, root: Schema) -> Schema:
    found: object = root
    for name in str(reference).removeprefix("#").split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def branches(schema: Schema) -> list[Schema]:
    """Return the alternatives of a schema, each with what holds for all of them; only the schema itself if it has
    none."""
    for name in ("anyOf", "oneOf"):
        found = schema.get(name)
        if isinstance(found, list) and found:
            rest = {key: value for key, value in schema.items() if key != name and key not in _NOTES}
            return [{**rest, **each} if isinstance(each, Mapping) else rest for each in found]
    kinds = schema.get("type")
    if isinstance(kinds, list) and kinds and "enum" not in schema and "const" not in schema:
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def kinds_of(schema: object, root: Schema) -> set[str]:
    """Return the JSON types that a schema allows; none if it does not limit them."""
    return _kinds(schema, root, {}) or set()


def _kinds(schema: object, root: Schema, known: dict[str, set[str] | None]) -> set[str] | None:
    """Return the types, or None inside a reference that is being followed. `known`: the types of each reference."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(reference, str):
        if reference in known:
            return known[reference]
        known[reference] = None
    found = resolved(schema, root)
    kinds, parts, values = found.get("type"), branches(found), values_of(found)
    made: set[str] = set()
    if values is not None:
        made = {kind_of(value) for value in values}
    elif isinstance(kinds, str | list):
        made = {each for each in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(each, str)}
    elif parts[0] is not found:
        each = [own for part in parts if (own := _kinds(part, root, known)) is not None]
        made = set().union(*each) if all(each) else set()
    if isinstance(reference, str):
        known[reference] = made
    return made


def kind_of(value: object) -> str:
    """The JSON type of a value."""
    return "null" if value is None else _JSON_KINDS.get(type(value), "object")


def says_nothing(schema: Schema) -> bool:
    """Whether a schema allows every value."""
    return schema.keys() <= _NOTES


def values_of(schema: Schema) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None


def is_any_text_or_null(schema: Schema, root: Schema) -> bool:
    """Whether every string fits a schema, and null, and nothing else."""
    parts = [resolved(part, root) for part in branches(schema)]
    free = all(part.keys() <= _NOTES | {"type"} for part in parts)
    return free and [part.get("type") for part in parts] in (["string", "null"], ["null", "string"])


def text_rules(schema: Schema) -> list[str] | None:
    """Regular expressions which a string of this schema matches as a whole; None if its format has none."""
    rules = []
    least, most = schema.get("minLength"), schema.get("maxLength")
    if type(least) is int or type(most) is int:
        rules.append(f"(?s:.){{{least or 0},{'' if most is None else most}}}")
    if isinstance(schema.get("pattern"), str):
        rules.append(anchored(schema["pattern"]))
    if isinstance(name := schema.get("format"), str) and name in FORMATS:
        if name not in _FORMATS:
            return None
        rules.append(_FORMATS[name])
    return rules


def anchored(pattern: str) -> str:
    """A schema's pattern, which may match anywhere, as one for the whole text."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    return before + "(?:" + pattern.removeprefix("^").removesuffix("$" if not after else "") + ")" + after
