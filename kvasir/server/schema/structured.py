"""What bodies say about the form of the output, in the words of each interface, as StructuredOutputsParams.

OpenAI's chat and completions have `response_format`, its responses `text.format`, Anthropic's messages
`output_config.format`; vLLM has `structured_outputs`, and its older versions `guided_*`. A body uses one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvasir.errors import RequestError, did_you_mean
from kvasir.sampling_params import StructuredOutputsParams
from kvasir.server.body_limits import exceeded_by_texts

_MAX_NAME = 64  # characters of a schema's name: OpenAI's limit
_OLDER = {  # vLLM's older fields -> the constraint's name now
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
}
# All fields of bodies that are read here.
FIELDS = frozenset(
    {
        *(*_OLDER, "guided_decoding_backend", "guided_whitespace_pattern", "structured_outputs"),
        *("response_format", "text", "output_config", "output_format"),
    }
)
_JSON_TEXTS = ("json", "structural_tag")  # which may be objects or texts
_NOT_JSON = ("regex", "choice", "grammar")  # constraints that no option about JSON concerns
_SCHEMA_WORDS = frozenset({"type", "properties", "anyOf", "enum", "$ref", "$defs"})  # of a schema in the wrong place
_INTERNAL = ("tags", "starts_after", "source", "parts")  # fields that no body sets
BACKENDS = ("auto", "guidance", "llguidance")  # values of guided_decoding_backend that ask for nothing else


def structured_outputs(body: Any) -> StructuredOutputsParams | None:
    """Return the form that a body asks for; None if it asks for none. Bodies need not have all of the fields."""
    found = [*_from_vllm(body), *_from_older(body), *_from_formats(body)]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(f"{names} both say what the output must look like; give one of them.", found[1][0])
    if not found:
        return None
    ((name, given),) = found
    texts = (value for part, value in given.items() if part in _JSON_TEXTS and isinstance(value, str))
    if problem := exceeded_by_texts(texts):
        raise RequestError(f"{name}: its JSON {problem}", name)
    try:
        return StructuredOutputsParams(**given, source=name)
    except RequestError as error:
        raise RequestError(str(error), name) from error


Found = list[tuple[str, dict[str, Any]]]  # the field, and what it says


def _from_vllm(body: Any) -> Found:
    given = getattr(body, "structured_outputs", None)
    if given is None:
        return []
    known = [field.name for field in fields(StructuredOutputsParams) if field.name not in _INTERNAL]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise RequestError(f"structured_outputs has no {str(name)[:_MAX_NAME]!r}.{hint}", "structured_outputs")
    said = {name: value for name, value in given.items() if value is not None}
    return [("structured_outputs", said)] if said else []


def _from_older(body: Any) -> Found:
    backend = getattr(body, "guided_decoding_backend", None)
    if backend not in (None, *BACKENDS):
        message = f"guided_decoding_backend={backend!r:.80} is not available; leave it out, or use guidance."
        raise RequestError(message, "guided_decoding_backend")
    pattern = getattr(body, "guided_whitespace_pattern", None)
    found: Found = []
    for name, newer in _OLDER.items():
        value = getattr(body, name, None)
        if value is not None and value is not False:  # guided_json_object: false asks for nothing
            found.append((name, {newer: value} if pattern is None else {newer: value, "whitespace_pattern": pattern}))
    if pattern is not None and not found:
        message = "guided_whitespace_pattern needs guided_json; give both or leave it out."
        raise RequestError(message, "guided_whitespace_pattern")
    other = next((name for name, _ in found if _OLDER[name] in _NOT_JSON), None)
    if pattern is not None and other is not None:
        message = f"guided_whitespace_pattern is for guided_json, but the output is held to {other}; leave it out."
        raise RequestError(message, "guided_whitespace_pattern")
    return found


def _from_formats(body: Any) -> Found:
    found: Found = []
    if (given := getattr(body, "response_format", None)) is not None:
        found += _format("response_format", given, "json_schema")
    if (given := getattr(getattr(body, "text", None), "format", None)) is not None:
        found += _format("text", given, None)
    config = getattr(body, "output_config", None)
    for name in config or ():
        if name not in ("format", "effort"):  # the effort is for the chat template
            message = f"output_config.{str(name)[:_MAX_NAME]} is not available; leave it out."
            raise RequestError(message, "output_config")
    for name, given in (
        ("output_config", None if config is None else config.get("format")),
        ("output_format", getattr(body, "output_format", None)),
    ):
        if given is not None:
            found += _format(name, given, None)
    return found


def _format(name: str, given: Any, nested: str | None) -> Found:
    """A format by its type. `nested`: the entry that holds the schema and its options; None: they stand beside it."""
    if not isinstance(given, Mapping):
        raise RequestError(f"{name} must be an object with a type.", name)
    kind = given.get("type")
    if kind == "text":
        _only(name, given, ("type",))
        return []
    if kind == "json_object":
        _only(name, given, ("type",), " A schema needs the type json_schema." if given.get("schema") else "")
        return [(name, {"json_object": True})]
    if kind == "json_schema":
        return [(name, _json_schema(name, given, nested))]
    if kind == "structural_tag":
        return [(name, {"structural_tag": dict(given)})]
    known = "text, json_object, json_schema, structural_tag"
    raise RequestError(f"{name} has the type {kind!r:.80}; known are {known}.", name)


def _only(name: str, given: Mapping[str, Any], known: tuple[str, ...], advice: str = "") -> None:
    """Refuse entries that would be ignored. Null is no value: clients write all fields of a type that they know."""
    for entry, value in given.items():
        if entry not in known and value is not None:
            hint = advice or did_you_mean(entry, known)
            message = f"{name} of type {given.get('type', 'json_schema')} has no {str(entry)[:_MAX_NAME]!r}.{hint}"
            raise RequestError(message, name)


def _json_schema(name: str, given: Mapping[str, Any], nested: str | None) -> dict[str, Any]:
    described = given if nested is None else given.get(nested)
    if not isinstance(described, Mapping):
        raise RequestError(f"{name} of type json_schema needs {nested}, an object with name and schema.", name)
    if nested is not None and "schema" not in described and not _SCHEMA_WORDS.isdisjoint(described):
        message = f'{name}.{nested} is a schema itself; put it under "schema": {{"name": "answer", "schema": ...}}.'
        raise RequestError(message, name)
    schema, title, strict = described.get("schema"), described.get("name"), described.get("strict")
    _only(name, described, ("schema", "name", "strict", "description", *(("type",) if nested is None else ())))
    if nested is not None:
        _only(name, given, ("type", nested))
    if schema is False:
        raise RequestError(f"{name} has the schema false, which no value fits.", name)
    if not isinstance(schema, Mapping | bool):
        raise RequestError(f"{name} needs a schema, which must be a JSON schema.", name)
    if title is not None and not (isinstance(title, str) and 0 < len(title) <= _MAX_NAME):
        raise RequestError(f"{name} has a name that is not a string of 1 to {_MAX_NAME} characters.", name)
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{name} has a value of strict that is neither true nor false.", name)
    said: dict[str, Any] = {"json": dict(schema) if isinstance(schema, Mapping) else schema}
    return said if strict is None else {**said, "lenient": not strict}
