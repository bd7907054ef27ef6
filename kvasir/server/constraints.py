"""Constraints of a chat request's answer: the grammar of its calls, kept tokens, tokens of reasoning.

`constrain` sets these in the request's SamplingParams. A plain answer, without reasoning and tools, needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvasir.errors import RequestError
from kvasir.frontend.text.grammar import SPACED, JsonStyle, expression
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.parsers.formats import TOOL_FORMATS
from kvasir.parsers.grammar import GrammarWriter, kept_tokens
from kvasir.parsers.value_grammar import CallableTool
from kvasir.sampling_params import ReasoningTokens, SamplingParams, StructuredOutputsParams
from kvasir.server.answers import OTHERWISE, ChatAnswer, Tool

Special = Callable[[], Mapping[str, int]]


def constrain(
    answer: ChatAnswer,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    special: Special,
    style: JsonStyle = SPACED,
) -> None:
    """Set the parameters that this format needs. `special`: the tokens that grammars write by their ids, if a
    grammar is needed. `style`: how the engine writes JSON if the request does not say."""
    if answer.is_plain:
        _check_budget(params)
        return
    if tokenizer is not None:
        kept = kept_tokens(answer.form.texts(), tokenizer.skipped_tokens)
        params.keep_special_tokens = list(kept) or None
    if params.thinking_token_budget is not None and tokenizer is not None:
        params.reasoning_tokens = _reasoning_tokens(answer, tokenizer)
    _check_budget(params)
    asked = params.structured_outputs
    if answer.tools.choice == "required":
        params.structured_outputs = _gated(answer, AnswerGrammar(answer, special(), style).calls())
    elif answer.tools.is_active and asked is not None:
        params.structured_outputs = _gated(answer, AnswerGrammar(answer, special(), style).calls_or(asked))
    elif answer.tools.is_active and answer.tools.needs_grammar:
        params.structured_outputs = _gated(answer, AnswerGrammar(answer, special(), style).tags())
    elif asked is not None and answer.form.reasoning is not None:
        params.structured_outputs = AnswerGrammar(answer, special(), style).after_reasoning(asked)


def _check_budget(params: SamplingParams) -> None:
    if params.thinking_token_budget is not None and params.reasoning_tokens is None:
        message = (
            "thinking_token_budget is not possible: this model has no reasoning that one token ends. Leave it out; "
            "max_tokens limits the whole answer."
        )
        raise RequestError(message, "thinking_token_budget")


class AnswerGrammar:
    """The grammars of one answer. `special`: the tokens that are written by their ids."""

    def __init__(self, answer: ChatAnswer, special: Mapping[str, int], style: JsonStyle) -> None:
        self._answer = answer
        self._special = special
        self._style = style

    def calls(self) -> StructuredOutputsParams:
        writer = self._writer()
        grammar = writer.whole(self._callable(), self._answer.tools.parallel, self._optional_reasoning)
        return StructuredOutputsParams(grammar=grammar, source="tools", parts=self._parts())

    def calls_or(self, asked: StructuredOutputsParams) -> StructuredOutputsParams:
        """Constrain the answer to calls, or to the form that the request asks for."""
        writer = self._writer()
        grammar = writer.whole(
            self._callable(),
            self._answer.tools.parallel,
            self._optional_reasoning,
            _expression(asked, "tools", self._style),
        )
        return replace_grammar(asked, grammar, (("", asked), *self._parts()))

    def tags(self) -> StructuredOutputsParams:
        tags = self._writer().tags(self._callable(), self._answer.tools.parallel)
        return StructuredOutputsParams(tags=tags, source="tools", parts=self._parts())

    def after_reasoning(self, asked: StructuredOutputsParams) -> StructuredOutputsParams:
        """Constrain the answer to the form, beginning where the reasoning ends."""
        form = self._answer.form.reasoning
        assert form is not None, "only formats with reasoning are asked"
        if (
            self._answer.in_reasoning
            or self._optional_reasoning is None
            or asked.tags
            or asked.structural_tag is not None
        ):
            return _gated(self._answer, asked)
        writer = GrammarWriter(TOOL_FORMATS[OTHERWISE], self._special, form)
        grammar = writer.answer(
            _expression(asked, asked.source, self._style), self._optional_reasoning, self._answer.form.is_harmony
        )
        return replace_grammar(asked, grammar)

    def _writer(self) -> GrammarWriter:
        assert self._answer.form.tools is not None, "tools are active only with a format"
        return GrammarWriter(self._answer.form.tools, self._special, self._answer.form.reasoning)

    @property
    def _optional_reasoning(self) -> tuple[str, str] | None:
        """The markers of reasoning that the model may write first, or not."""
        form = self._answer.form.reasoning
        if form is None or self._answer.in_reasoning or self._answer.is_reasoned:
            return None
        return form.open[0], form.close[0]

    def _parts(self) -> tuple[tuple[str, StructuredOutputsParams], ...]:
        """Return the constraint of each tool, by its name."""
        return tuple((f"The tool {tool.name!r}", _alone(tool)) for tool in self._callable())

    def _callable(self) -> list[CallableTool]:
        required = self._answer.tools.choice == "required"
        return [_callable(tool, required) for tool in self._answer.tools.callable]


def _gated(answer: ChatAnswer, asked: StructuredOutputsParams) -> StructuredOutputsParams:
    form = answer.form.reasoning
    return replace(asked, starts_after=form.close[0].strip()) if form is not None and answer.in_reasoning else asked


def _reasoning_tokens(answer: ChatAnswer, tokenizer: Tokenizer) -> ReasoningTokens | None:
    form = answer.form.reasoning
    if form is None:
        return None
    opening = tokenizer.added_ids.get(form.open[0].strip(), -1)  # a prompt may have it in several tokens
    closing = tokenizer.added_ids.get(form.close[0].strip())
    if closing is None or (opening < 0 and not answer.in_reasoning) or answer.form.is_harmony:
        return None
    return ReasoningTokens(opening, closing, answer.in_reasoning)


def replace_grammar(
    asked: StructuredOutputsParams, grammar: str, parts: tuple[tuple[str, StructuredOutputsParams], ...] = ()
) -> StructuredOutputsParams:
    """Return the constraint with a grammar in place of what was asked, under the name of its field."""
    return StructuredOutputsParams(grammar=grammar, source=asked.source, parts=parts)


def _alone(tool: CallableTool) -> StructuredOutputsParams:
    """Return the constraint of a tool's arguments, without the format around them."""
    if tool.regex is not None:
        return StructuredOutputsParams(regex=tool.regex, source="tools")
    if tool.lark is not None:
        return StructuredOutputsParams(grammar=tool.lark, source="tools")
    schema = dict(tool.arguments)
    return StructuredOutputsParams(
        json=schema, lenient=tool.lenient, disable_additional_properties=True, source="tools"
    )


def _callable(tool: Tool, required: bool) -> CallableTool:
    # Calls that must be made are held to their schema, so that they are never malformed; others only if strict.
    schema = tool.parameters if tool.strict or required else None
    return CallableTool(tool.name, schema, tool.is_custom, tool.regex, tool.lark, lenient=not tool.strict)


def _expression(asked: StructuredOutputsParams, name: str, style: JsonStyle) -> str:
    """Return a Lark expression for the form of an answer."""
    found = expression(asked, style)
    if found is None:
        kind = " and ".join(asked.constraints)
        raise RequestError(
            f"{asked.source} with {kind} cannot be combined with tools; set tool_choice to 'none'.", name
        )
    return found
