"""What is wrong with a body, as a sentence: pydantic finds it, clients should not have to know pydantic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Error = dict[str, Any]  # as pydantic tells it

_KINDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_JSON_NAMES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_SHORT = 40  # digits or characters
_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "none"}  # pydantic's, of a union's members


class Complaint(NamedTuple):
    message: str
    param: str | None


def complaint(errors: Sequence[Error]) -> Complaint:
    first = errors[0]
    context = first.get("ctx") or {}
    if first["type"] == "invalid":  # one of ours, a whole sentence
        return Complaint(str(context["message"]), str(context["param"]))
    if first["type"] == "json_invalid":
        return Complaint(f"The body is not valid JSON: {context.get('error', first['msg'])}.", None)
    path = _path(first)
    if not path:
        return Complaint(_about_the_body(first.get("input")), None)
    same = [error for error in errors if _path(error) == path]
    return Complaint(f"{path} {_wrong(same)}", path.split(".")[0].split("[")[0])


def _path(error: Error) -> str:
    """messages[0].content: without the members of a union, which pydantic names too."""
    path = ""
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("body", "path", "query") and part.isidentifier() and part not in _TYPE_NAMES:
            path += f".{part}" if path else part
    return path


def _wrong(errors: Sequence[Error]) -> str:
    first = errors[0]
    kind, context = first["type"], first.get("ctx") or {}
    if kind == "missing":
        return "is missing."
    if all(error["type"] in _KINDS for error in errors):
        kinds = list(dict.fromkeys(_KINDS[error["type"]] for error in errors))
        return f"must be {' or '.join(kinds)}, not {_shown(first.get('input'))}."
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}, not {_shown(first.get('input'))}."
    if kind == "too_short":
        return f"must have at least {context['min_length']} {_entries(context['min_length'])}."
    if kind == "too_long":
        return f"must have at most {context['max_length']} {_entries(context['max_length'])}."
    if kind == "literal_error":
        return f"must be {context['expected']}, not {_shown(first.get('input'))}."
    return f"is not valid: {first['msg'][:1].lower()}{first['msg'][1:]}."


def _entries(count: int) -> str:
    return "entry" if count == 1 else "entries"


def _shown(value: object) -> str:
    """Short values as they are; of others only what they are."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | str) and (isinstance(value, float) or _is_short(value)):
        return repr(value)
    return _JSON_NAMES.get(type(value), "this")


def _is_short(value: int | str) -> bool:
    return len(value) <= _SHORT if isinstance(value, str) else abs(value) < 10**_SHORT


def _about_the_body(body: object) -> str:
    if body is None:
        return "The request has no body, or null; it must be a JSON object."
    if isinstance(body, bytes):
        return "Send the body with Content-Type: application/json."
    return f"The body must be a JSON object, not {_JSON_NAMES.get(type(body), 'this')}."
