"""A chat template as a program: the sandbox in which it runs, and what it reads, shows and takes. API process.

The sandbox is jinja2's immutable one, with what transformers offers to templates. The forms of messages that a template
supports are found by rendering probes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes

from kvasir.errors import RequestError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # a template may support others

_PROBE = "kvasir probe"
_ROLE_PROBE, _FIELD_PROBE, _OTHER_ROLE = "kvasir role", "kvasir field", "kvasir_other"


class CompiledTemplate:
    """A template in the sandbox, and what it reads, shows and takes."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._knows_developer = "developer" in source
        self._shown_roles: dict[str, bool] = {}
        try:
            self._template = sandbox().from_string(source)
        except jinja2.TemplateError as error:
            line = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise RequestError(f"The chat template does not compile{line}: {error}", "chat_template") from error

    # ------------------------------------------------------------ what it reads

    @cached_property
    def _words(self) -> frozenset[str]:
        """Every variable, attribute and string of the template's code; its text is not among them."""
        code = sandbox().parse(self._source)
        found = {node.attr for node in code.find_all(nodes.Getattr)}
        found |= {node.name for node in code.find_all(nodes.Name)}
        return frozenset(found | {node.value for node in code.find_all(nodes.Const) if isinstance(node.value, str)})

    def reads(self, name: str) -> bool:
        return name in self._words

    def reads_field(self, name: str) -> bool:
        """Whether it reads a message's field, by name or because it prints whole messages."""
        return name in self._words or (name != "tool_calls" and self._prints_messages)

    @cached_property
    def _prints_messages(self) -> bool:
        return _FIELD_PROBE in self._try({**_user(_PROBE), "kvasir_field": _FIELD_PROBE})

    def shows_role(self, role: str) -> bool:
        """Whether messages of a role are in the text. Where the template refuses the probes, this is not known: yes."""
        if role in ("user", "assistant"):
            return True
        if role not in ROLES and role not in self._words:
            role = _OTHER_ROLE  # one answer for all of them: clients can think up any number
        if role not in self._shown_roles:
            self._shown_roles[role] = self._probe_role(role)
        return self._shown_roles[role]

    def _probe_role(self, role: str) -> bool:
        role = "system" if role == "developer" and not self._knows_developer else role
        probe = {"role": role, "content": _ROLE_PROBE, "name": "f", "tool_call_id": "call00001"}
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        tried = (
            self._try(probe, _user(_PROBE)),
            self._try(_user(_PROBE), answer, probe),
            self._try(_user(_PROBE), probe),
        )
        rendered = [text for text in tried if _PROBE in text]
        return not rendered or any(_ROLE_PROBE in text for text in rendered)

    def write_calls(self, calls: object) -> str | None:
        """Tool calls as the model writes them; None if the template's text does not say how."""
        write = next((write for mark, write in _CALL_FORMATS.items() if mark in self._source), None)
        functions = (
            [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        )
        if write is None or not functions or not all(isinstance(function, dict) for function in functions):
            return None
        parsed = [parse_arguments({"function": function})["function"] for function in functions]
        return write([(str(function.get("name", "")), function.get("arguments") or {}) for function in parsed])

    # The forms that a template supports are found by rendering probes.

    @cached_property
    def _shows_strings(self) -> bool:
        return _PROBE in self._try(_user(_PROBE))

    @cached_property
    def _shows_parts(self) -> bool:
        text = self._try(_user([{"type": "text", "text": _PROBE}]))
        return (
            _PROBE in text and f"{_PROBE}'" not in text and f'{_PROBE}"' not in text
        )  # a quote means that the list itself was printed

    @cached_property
    def _takes_null(self) -> bool:
        """Whether the template accepts a message without content. Some fail on it, and some print None."""
        return self._shows_null({"role": "assistant"})

    @cached_property
    def _takes_null_with_calls(self) -> bool:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
        return self._shows_null({"role": "assistant", "tool_calls": [call]})

    @cached_property
    def _takes_reasoning_beside_text(self) -> bool:
        """Whether a message with tool calls may have both reasoning and content. gpt-oss's template refuses that."""
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
        message = {"role": "assistant", "content": "", "tool_calls": [call], "thinking": _PROBE}
        both = {**message, "content": _FIELD_PROBE}
        return self._try(_user(_PROBE), both) != "" or self._try(_user(_PROBE), message) == ""

    def _shows_null(self, message: Message) -> bool:
        empty, text = (self._try(_user(_PROBE), {**message, "content": content}) for content in ("", None))
        return text != "" and text.count("None") <= empty.count("None")

    def _try(self, *messages: Message) -> str:
        arguments = {"tools": None, "documents": None, "add_generation_prompt": False}
        special = {"bos_token": "", "eos_token": "", "unk_token": "", "pad_token": ""}
        try:
            return self._template.render(messages=list(messages), **arguments, **special)
        except Exception:  # a template may refuse a probe in any way
            return ""


# How models write tool calls whose templates do not read them, by a text that these templates have.
_CALL_FORMATS: dict[str, Callable[[list[tuple[str, Any]]], str]] = {
    "<|tool_call|>": lambda calls: "<|tool_call|>" + json.dumps([_named(*call) for call in calls]),  # Granite 3
    "<|tool_list_start|>": lambda calls: (  # LFM2
        f"<|tool_call_start|>[{', '.join(_as_python(*call) for call in calls)}]<|tool_call_end|>"
    ),
    "<tool_call>": lambda calls: "\n".join(  # Hermes' format, which SmolLM3 uses, too
        f"<tool_call>\n{json.dumps(_named(*call))}\n</tool_call>" for call in calls
    ),
}


def _named(name: str, arguments: Any) -> Message:
    return {"name": name, "arguments": arguments}


def _as_python(name: str, arguments: Any) -> str:
    values = arguments.items() if isinstance(arguments, dict) else ()
    shown = ", ".join(f"{key}={json.dumps(v) if isinstance(v, str) else repr(v)}" for key, v in values)
    return f"{name}({shown})"


def _user(content: object) -> Message:
    return {"role": "user", "content": content}


def with_function_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its calls of custom tools as calls of functions of `input`, as models see such tools."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(_is_custom(call) for call in calls):
        return message
    return {**message, "tool_calls": [_function_call(call) if _is_custom(call) else call for call in calls]}


def _is_custom(call: object) -> bool:
    return isinstance(call, Mapping) and call.get("type") == "custom"


def _function_call(call: Mapping[str, Any]) -> Message:
    said = call.get("custom")
    name, text = (said.get("name"), said.get("input")) if isinstance(said, Mapping) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        message = "A tool call of the type 'custom' needs custom, an object with name and input, both of them texts."
        raise RequestError(message, "messages")
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": {"name": name, "arguments": {"input": text}}}


def parse_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        values = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        message = f"The arguments of the tool call {function.get('name')!r} are not JSON."
        raise RequestError(message, "messages") from None
    return {**call, "function": {**function, "arguments": values}}


# ---------------------------------------------------------------- the sandbox


@lru_cache(maxsize=1)
def sandbox() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Lets templates append to lists and pop from them, as Kimi K2's does. They get copies, so nothing else changes."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks text of the assistant for training. Here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        text: str = caller()
        return text


class _Dict:
    """`dict(...)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` that refuses names with an underscore, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja2, so that a name may be `self`
        self, given = args[0], dict(*args[1:], **kwargs)
        jinja2.utils.Namespace.__init__(self)
        for name, value in given.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"A chat template may not set {name!r} on a namespace.")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like jinja2's filter, but without HTML escapes, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
