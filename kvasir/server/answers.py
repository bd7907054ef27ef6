"""How the answers of chat requests are read: the model's format, the grammar of its calls, the parser of its text.

One API process knows the formats of its templates (`AnswerFormats`). `ChatAnswer` is for one request: it sets what the
engine must keep to, and makes the parsers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.errors import RequestError
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.frontend.text.chat_template import choose_template, compile_template
from kvasir.frontend.text.grammar import JsonStyle, json_rule, quote
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.log import get_logger
from kvasir.parsers.base import (
    OutputParser,
    OutputPart,
    PartReader,
    Reasoning,
    ReasoningReader,
    ToolArguments,
    ToolCall,
)
from kvasir.parsers.formats import TOOL_FORMATS, AnswerFormat, ReasoningFormat, reasoning_format, tool_format
from kvasir.parsers.grammar import CallableTool, GrammarWriter, kept_tokens
from kvasir.parsers.scanner import CustomInput, make_parser
from kvasir.parsers.templates import detect, reads_tools, with_tools
from kvasir.sampling_params import ReasoningTokens, SamplingParams, StructuredOutputsParams
from kvasir.server.config import ServerConfig
from kvasir.server.schema.tools import NO_TOOLS, RequestTools, Tool

logger = get_logger(__name__)
AUTO, NONE = "auto", "none"
Special = Callable[[], Mapping[str, int]]
_OTHERWISE = "hermes"  # for models that have no format of their own


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
        """The template of a request; None if there is none."""
        if self._tokenizer is None:
            return None
        asked = self._template if chat_template is None else chat_template
        try:
            return choose_template(self._tokenizer.chat_template, asked, with_tools)
        except RequestError:
            return None

    def of(self, chat_template: str | None = None, with_tools: bool = False) -> AnswerFormat:
        """The format of a request's template."""
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
            tools = TOOL_FORMATS[_OTHERWISE]
        if self._reasoning != AUTO:
            reasoning = None if self._reasoning == NONE else reasoning_format(self._reasoning)
        return AnswerFormat(tools, reasoning)

    def log(self) -> None:
        """Say which formats were chosen, and why."""
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
        """The messages and tools to render. Where the template does not read tools, messages have them as text."""
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

    # ------------------------------------------------------------ what the engine must know

    def constrain(self, params: SamplingParams, tokenizer: Tokenizer | None, special: Special) -> None:
        """Set the parameters that this format needs. `special`: the tokens that grammars write by their ids, if a
        grammar is needed."""
        if self.is_plain:
            if params.thinking_token_budget is not None:
                params.verify()  # which says why it cannot be
            return
        if tokenizer is not None:
            kept = kept_tokens(self.form.texts(), tokenizer.skipped_tokens)
            params.keep_special_tokens = list(kept) or None
        if params.thinking_token_budget is not None and tokenizer is not None:
            params.reasoning_tokens = self._reasoning_tokens(tokenizer)
        asked = params.structured_outputs
        if self.tools.choice == "required":
            params.structured_outputs = self._gated(self._calls(special()))
        elif self.tools.is_active and asked is not None:
            params.structured_outputs = self._gated(self._calls_or(asked, special()))
        elif self.tools.is_active and self.tools.needs_grammar:
            params.structured_outputs = self._tags(special())
        elif asked is not None and self.form.reasoning is not None:
            params.structured_outputs = self._after_reasoning(asked, special())

    @property
    def is_plain(self) -> bool:
        return self.form.reasoning is None and not self.tools.is_active

    def _calls(self, special: Mapping[str, int]) -> StructuredOutputsParams:
        writer = self._writer(special)
        grammar = writer.whole(self._callable(), self.tools.parallel, self._optional_reasoning)
        return StructuredOutputsParams(grammar=grammar, source="tools")

    def _calls_or(self, asked: StructuredOutputsParams, special: Mapping[str, int]) -> StructuredOutputsParams:
        """Calls, or an answer of the form that the request asks for."""
        writer = self._writer(special)
        grammar = writer.whole(
            self._callable(), self.tools.parallel, self._optional_reasoning, _expression(asked, "tools")
        )
        return replace_grammar(asked, grammar)

    def _tags(self, special: Mapping[str, int]) -> StructuredOutputsParams:
        tags = self._writer(special).tags(self._callable(), self.tools.parallel)
        return self._gated(StructuredOutputsParams(tags=tags, source="tools"))

    def _after_reasoning(self, asked: StructuredOutputsParams, special: Mapping[str, int]) -> StructuredOutputsParams:
        """The form holds for the answer, which begins where the reasoning ends."""
        form = self.form.reasoning
        assert form is not None, "only formats with reasoning are asked"
        if self.in_reasoning or self._optional_reasoning is None or asked.tags or asked.structural_tag is not None:
            return self._gated(asked)
        writer = GrammarWriter(TOOL_FORMATS[_OTHERWISE], special, form)
        grammar = writer.answer(_expression(asked, asked.source), self._optional_reasoning, self.form.is_harmony)
        return replace_grammar(asked, grammar)

    def _gated(self, asked: StructuredOutputsParams) -> StructuredOutputsParams:
        form = self.form.reasoning
        return replace(asked, starts_after=form.close[0].strip()) if form is not None and self.in_reasoning else asked

    def _writer(self, special: Mapping[str, int]) -> GrammarWriter:
        assert self.form.tools is not None, "tools are active only with a format"
        return GrammarWriter(self.form.tools, special, self.form.reasoning)

    @property
    def _optional_reasoning(self) -> tuple[str, str] | None:
        """The markers of reasoning that the model may write first, or not."""
        form = self.form.reasoning
        if form is None or self.in_reasoning or self.is_reasoned:
            return None
        return form.open[0], form.close[0]

    def _callable(self) -> list[CallableTool]:
        required = self.tools.choice == "required"
        return [_callable(tool, required) for tool in self.tools.callable]

    def _reasoning_tokens(self, tokenizer: Tokenizer) -> ReasoningTokens | None:
        form = self.form.reasoning
        if form is None:
            return None
        opening = tokenizer.added_ids.get(form.open[0].strip(), -1)  # a prompt may have it in several tokens
        closing = tokenizer.added_ids.get(form.close[0].strip())
        if closing is None or (opening < 0 and not self.in_reasoning) or self.form.is_harmony:
            return None
        return ReasoningTokens(opening, closing, self.in_reasoning)

    # ------------------------------------------------------------ how its text is read

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


class AdaptedParser:
    """Gives custom tools their text in place of an object, and leaves out reasoning that is not asked for."""

    def __init__(self, parser: OutputParser, customs: frozenset[str], include_reasoning: bool) -> None:
        self._parser = parser
        self._customs = customs
        self._include_reasoning = include_reasoning
        self._inputs: dict[int, CustomInput] = {}

    def feed(self, text: str) -> Sequence[OutputPart]:
        return self._adapted(self._parser.feed(text))

    def finish(self) -> Sequence[OutputPart]:
        made = self._adapted(self._parser.finish())
        for index, reader in self._inputs.items():
            made += [ToolArguments(index, piece) for piece in reader.finish() if piece]
        return made

    def _adapted(self, parts: Sequence[OutputPart]) -> list[OutputPart]:
        made: list[OutputPart] = []
        for part in parts:
            if isinstance(part, Reasoning) and not self._include_reasoning:
                continue
            if isinstance(part, ToolCall) and part.name in self._customs:
                self._inputs[part.index] = CustomInput()
            if isinstance(part, ToolArguments) and part.index in self._inputs:
                made += [
                    ToolArguments(part.index, piece) for piece in self._inputs[part.index].feed(part.text) if piece
                ]
            else:
                made.append(part)
        return made


def replace_grammar(asked: StructuredOutputsParams, grammar: str) -> StructuredOutputsParams:
    """The grammar in place of what was asked, under the name of its field."""
    return StructuredOutputsParams(grammar=grammar, source=asked.source)


def _marks(form: ReasoningFormat, text: str, anywhere: bool) -> tuple[bool, bool]:
    """Whether a prompt has opened the reasoning, and whether it has closed it: at its end, or anywhere in a message
    that is continued."""
    opens, closes = (tuple(each.strip() for each in texts) for texts in (form.open, form.close))
    if not anywhere:
        return text.endswith(opens), text.endswith(closes)
    opened, closed = (max((text.rfind(mark) for mark in marks), default=-1) for marks in (opens, closes))
    return opened > closed, closed > opened


def _callable(tool: Tool, required: bool) -> CallableTool:
    # Calls that must be made are held to their schema, so that they are never malformed; others only if strict.
    schema = tool.parameters if tool.strict or required else None
    return CallableTool(tool.name, schema, tool.is_custom, tool.regex, tool.lark, lenient=not tool.strict)


def _expression(asked: StructuredOutputsParams, name: str) -> str:
    """A Lark expression of what an answer must look like."""
    pattern, lenient = asked.whitespace_pattern, bool(asked.lenient)
    whitespace = asked.whitespace or ("compact" if asked.disable_any_whitespace else "spaced")
    style = JsonStyle(whitespace, pattern, lenient, asked.disable_additional_properties)
    if asked.json is not None:
        return json_rule(asked.json, style)
    if asked.json_object:
        return json_rule({"type": "object"}, style)
    if asked.regex is not None:
        return "/" + asked.regex.replace("/", "\\/") + "/"
    if asked.choice is not None:
        return "(" + " | ".join(map(quote, dict.fromkeys(asked.choice))) + ")"
    if asked.grammar is not None:
        return f"%lark {{\n{asked.grammar}\n}}"
    kind = " and ".join(asked.constraints)
    raise RequestError(f"{asked.source} with {kind} cannot be combined with tools; set tool_choice to 'none'.", name)
