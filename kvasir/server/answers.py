"""How the answers of chat requests are read: the tools that may be called, the model's format, the parser of its text.

One API process knows the formats of its templates (`AnswerFormats`). `ChatAnswer` is for one request and makes its
parsers; constraints.py has what the engine must keep to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.errors import RequestError
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.frontend.text.chat_template import choose_template, compile_template
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.log import get_logger
from kvasir.parsers.base import OutputParser, PartReader, ReasoningReader
from kvasir.parsers.formats import TOOL_FORMATS, AnswerFormat, ReasoningFormat, reasoning_format, tool_format
from kvasir.parsers.scanner import AdaptedParser, make_parser
from kvasir.parsers.templates import detect, reads_tools, with_tools
from kvasir.server.config import ServerConfig

Choice = Literal["none", "auto", "required"]


@dataclass(slots=True, frozen=True)
class Tool:
    """One tool. A custom tool takes a text instead of an object; the model sees it as a function of `input`."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None: any object
    strict: bool = False
    is_custom: bool = False
    regex: str | None = None  # of a custom tool's text
    lark: str | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Schema of the arguments, as the model sees it."""
        if not self.is_custom:
            return {"type": "object", "properties": {}} if self.parameters is None else dict(self.parameters)
        text: dict[str, Any] = {"type": "string"}
        if self.regex or self.lark:
            text["description"] = f"A text of this grammar: {self.regex or self.lark}"
        return {"type": "object", "properties": {"input": text}, "required": ["input"]}

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(slots=True, frozen=True)
class RequestTools:
    """Tools of a request, and which of them the model may or must call."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = "none"
    allowed: frozenset[str] | None = None  # names of the tools that may be called; None: all
    parallel: bool = True

    def shown(self) -> list[dict[str, Any]] | None:
        """All tools as chat templates read them: those that may not be called, too, so that prompts stay cached."""
        return [tool.shown() for tool in self.tools] or None

    @property
    def is_active(self) -> bool:
        return self.choice != "none"

    @property
    def callable(self) -> list[Tool]:
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]

    @property
    def needs_grammar(self) -> bool:
        """Whether calls that the model chooses to make are held to a grammar."""
        return self.allowed is not None or any(
            tool.strict or tool.regex is not None or tool.lark is not None for tool in self.tools
        )


NO_TOOLS = RequestTools()


logger = get_logger(__name__)
AUTO, NONE = "auto", "none"
OTHERWISE = "hermes"  # for models that have no format of their own


class AnswerFormats:
    """The formats of the chat templates that requests use: the model's own and, if allowed, their own."""

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer | None, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        self._tools, self._reasoning = config.tool_call_parser, config.reasoning_parser
        self.allows_auto = config.enable_auto_tool_choice
        self._found: dict[bool, AnswerFormat] = {}  # of the model's own templates, by whether there are tools
        for setting, find in ((self._tools, tool_format), (self._reasoning, reasoning_format)):
            if setting not in (AUTO, NONE):
                find(setting)  # a name that is not known is an error now

    def source(self, chat_template: str | None = None, with_tools: bool = False) -> str | None:
        """Return the template of a request; None if there is none."""
        if self._tokenizer is None:
            return None
        asked = self._template if chat_template is None else chat_template
        try:
            return choose_template(self._tokenizer.chat_template, asked, with_tools)
        except RequestError:
            return None

    def of(self, chat_template: str | None = None, with_tools: bool = False) -> AnswerFormat:
        """Return the format of a request's template."""
        if chat_template is not None:
            return self._find(chat_template, with_tools)
        if with_tools not in self._found:
            self._found[with_tools] = self._find(None, with_tools)
        return self._found[with_tools]

    def _find(self, chat_template: str | None, with_tools: bool) -> AnswerFormat:
        source = self.source(chat_template, with_tools)
        found = AnswerFormat() if source is None else detect(source).format
        tools, reasoning = found.tools, found.reasoning
        if self._tools != AUTO:
            tools = None if self._tools == NONE else tool_format(self._tools)
        elif tools is None:
            tools = TOOL_FORMATS[OTHERWISE]
        if self._reasoning != AUTO:
            reasoning = None if self._reasoning == NONE else reasoning_format(self._reasoning)
        return AnswerFormat(tools, reasoning)

    def log(self) -> None:
        """Log which formats were chosen, and why."""
        source, found = self.source(with_tools=True), self.of(with_tools=True)
        if source is None:
            return
        why = detect(source)
        tools = "tool_call_parser says so" if self._tools != AUTO else why.why_tools
        if self._tools == AUTO and not reads_tools(source):
            tools += "; tools are described in a system message"
        reasoning = "reasoning_parser says so" if self._reasoning != AUTO else why.why_reasoning
        logger.info("Tool calls are read as %s: %s", NONE if found.tools is None else found.tools.name, tools)
        logger.info("Reasoning is read as %s: %s", NONE if found.reasoning is None else found.reasoning.name, reasoning)

    def messages(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, chat_template: str | None
    ) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Return the messages and tools to render. Where the template does not read tools, the messages have them as
        text."""
        if not tools and not any(each.get("tool_calls") or each.get("role") == "tool" for each in messages):
            return messages, tools
        source = self.source(chat_template, tools is not None)
        form = self.of(chat_template, tools is not None).tools
        if source is None or form is None or reads_tools(source):
            return messages, tools
        template = compile_template(source)
        shows_calls = template.reads_field("tool_calls") and template.shows_role("tool")
        return with_tools(messages, tools or (), form, rewrites=not shows_calls), None


@dataclass(slots=True, frozen=True)
class ChatAnswer:
    """How the answer of one request is read."""

    form: AnswerFormat
    tools: RequestTools = NO_TOOLS
    in_reasoning: bool = False  # the prompt has opened the reasoning
    is_reasoned: bool = False  # the prompt has closed it
    include_reasoning: bool = True

    @classmethod
    def make(
        cls,
        formats: AnswerFormats,
        tools: RequestTools,
        prompt: TokenizedPrompt,
        *,
        chat_template: str | None = None,
        continued: str | None = None,  # the text of the message that is continued
        include_reasoning: bool = True,
    ) -> ChatAnswer:
        form = formats.of(chat_template, bool(tools.tools))
        if tools.is_active and form.tools is None:
            raise RequestError("This server reads no tool calls: it was started with tool_call_parser none.", "tools")
        if tools.choice == "auto" and not formats.allows_auto:
            message = (
                "tool_choice 'auto' needs a server with --enable-auto-tool-choice; use 'required', or name a tool."
            )
            raise RequestError(message, "tool_choice")
        opened = closed = False
        if form.reasoning is not None and not form.is_harmony:
            text = (prompt.text or "").rstrip() if continued is None else continued
            opened, closed = _marks(form.reasoning, text, continued is not None)
        return cls(form, tools, opened, closed, include_reasoning)

    @property
    def is_plain(self) -> bool:
        return self.form.reasoning is None and not self.tools.is_active

    def reader(self, tokenizer: Tokenizer | None) -> PartReader:
        if self.is_plain:
            return PartReader()
        form = self.form.reasoning
        closing = None
        if form is not None and tokenizer is not None:
            closing = tokenizer.added_ids.get(form.close[0].strip())
        return PartReader(self._parser) if closing is None else ReasoningReader(self._parser, closing)

    def _parser(self) -> OutputParser:
        tools = self.tools
        schemas = {tool.name: tool.schema for tool in tools.tools} if tools.is_active else None
        parser = make_parser(self.form, schemas, in_reasoning=self.in_reasoning, parallel=tools.parallel)
        customs = frozenset(tool.name for tool in tools.tools if tool.is_custom)
        if customs or not self.include_reasoning:
            return AdaptedParser(parser, customs, self.include_reasoning)
        return parser

    def is_custom(self, name: str) -> bool:
        return any(tool.name == name and tool.is_custom for tool in self.tools.tools)


PLAIN_ANSWER = ChatAnswer(AnswerFormat())


def _marks(form: ReasoningFormat, text: str, anywhere: bool) -> tuple[bool, bool]:
    """Return whether a prompt has opened the reasoning, and whether it has closed it: at its end, or anywhere in a
    message that is continued."""
    opens, closes = (tuple(each.strip() for each in texts) for texts in (form.open, form.close))
    if not anywhere:
        return text.endswith(opens), text.endswith(closes)
    opened, closed = (max((text.rfind(mark) for mark in marks), default=-1) for marks in (opens, closes))
    return opened > closed, closed > opened
