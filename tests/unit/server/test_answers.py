"""How the answer of a request is read: from the prompt, the model's format and its tokens to parameters and parsers."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvasir.errors import RequestError
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.frontend.text.grammar import JsonStyle
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.messages import Int32Array
from kvasir.outputs import CompletionOutput
from kvasir.parsers.base import Reasoning, ReasoningReader, content_of, reasoning_of
from kvasir.sampling_params import ReasoningTokens, SamplingParams, StructuredOutputsParams
from kvasir.server.answers import AnswerFormats, ChatAnswer, RequestTools
from kvasir.server.config import ServerConfig
from kvasir.server.constraints import constrain
from kvasir.server.tools import chat_tools

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <think> </think> #}"
)
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
STRICT = [{"type": "function", "function": {**FUNCTION, "strict": True}}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<eos>"]
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return Tokenizer(backend, {"eos_token": "<eos>"}, chat_template=TEMPLATE)


def answer(tokenizer: Tokenizer, tools: RequestTools, prompt: str = "<|assistant|>", **options: Any) -> ChatAnswer:
    settings = options.pop("settings", {})
    formats = AnswerFormats(ServerConfig(**settings), tokenizer, None)
    array: Int32Array = []  # type: ignore[assignment]
    return ChatAnswer.make(formats, tools, TokenizedPrompt([], array, prompt), **options)


def constrained(made: ChatAnswer, tokenizer: Tokenizer, **asked: Any) -> SamplingParams:
    params = SamplingParams()
    for name, value in asked.items():
        setattr(params, name, value)
    constrain(made, params, tokenizer, lambda: tokenizer.skipped_tokens)
    params.verify()
    return params


def test_markers_stay_in_the_text(tokenizer: Tokenizer) -> None:
    params = constrained(answer(tokenizer, chat_tools(TOOLS, None, None)), tokenizer)
    assert params.keep_special_tokens == ["</think>", "</tool_call>", "<think>", "<tool_call>"]
    assert params.structured_outputs is None, "nothing is held to a grammar that need not be"


def test_a_budget_has_the_tokens_of_the_format(tokenizer: Tokenizer) -> None:
    opened = answer(tokenizer, RequestTools(), "<|assistant|><think>\n")
    ids = tokenizer.added_ids
    params = constrained(opened, tokenizer, thinking_token_budget=5)
    assert params.reasoning_tokens == ReasoningTokens(ids["<think>"], ids["</think>"], True)
    params = constrained(answer(tokenizer, RequestTools()), tokenizer, thinking_token_budget=5)
    assert params.reasoning_tokens == ReasoningTokens(ids["<think>"], ids["</think>"], False)
    without = answer(tokenizer, RequestTools(), settings={"reasoning_parser": "none"})
    with pytest.raises(RequestError, match="no reasoning that one token ends"):
        constrained(without, tokenizer, thinking_token_budget=5)


def test_constraints_begin_after_the_reasoning(tokenizer: Tokenizer) -> None:
    schema = StructuredOutputsParams(json={"type": "object"}, source="response_format")
    opened = answer(tokenizer, RequestTools(), "<|assistant|><think>\n")
    found = constrained(opened, tokenizer, structured_outputs=schema).structured_outputs
    assert found is not None and found.starts_after == "</think>" and found.json == {"type": "object"}
    closed = answer(tokenizer, RequestTools(), "<|assistant|><think>\n\n</think>\n\n")
    assert constrained(closed, tokenizer, structured_outputs=schema).structured_outputs == schema
    maybe = answer(tokenizer, RequestTools())  # the model may open it itself
    found = constrained(maybe, tokenizer, structured_outputs=schema).structured_outputs
    assert found is not None and found.grammar is not None and found.source == "response_format"
    id_of = tokenizer.added_ids
    assert f"<[{id_of['<think>']}]>" in found.grammar and f"<[{id_of['</think>']}]>" in found.grammar


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ({"regex": r"a\/\d"}, "/a\\/[0-9]/"),
        ({"grammar": 'root ::= "yes" | "no"'}, 'start: "yes"\n     | "no"'),
        ({"json_object": True}, '"item_separator": ","'),
        ({"json_object": True, "whitespace": "flexible"}, '"whitespace_flexible": true'),
    ],
)
@pytest.mark.parametrize("with_tools", [False, True])
def test_a_constraint_is_the_same_beside_reasoning_and_calls(
    tokenizer: Tokenizer, asked: dict[str, Any], written: str, with_tools: bool
) -> None:
    made = answer(tokenizer, chat_tools(TOOLS, None, None) if with_tools else RequestTools())
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked))
    constrain(made, params, tokenizer, lambda: tokenizer.skipped_tokens, JsonStyle("compact"))
    found = params.structured_outputs
    assert found is not None and found.grammar is not None and written in found.grammar


def test_choices_become_constraints(tokenizer: Tokenizer) -> None:
    required = constrained(answer(tokenizer, chat_tools(TOOLS, "required", None)), tokenizer).structured_outputs
    assert required is not None and required.grammar is not None and required.source == "tools"
    strict = constrained(answer(tokenizer, chat_tools(STRICT, None, None)), tokenizer).structured_outputs
    assert strict is not None and [tag.trigger for tag in strict.tags] == ["<tool_call>"]
    gated = answer(tokenizer, chat_tools(STRICT, None, None), "<|assistant|><think>\n")
    found = constrained(gated, tokenizer).structured_outputs
    assert found is not None and found.starts_after == "</think>"


def test_auto_can_be_off(tokenizer: Tokenizer) -> None:
    settings = {"enable_auto_tool_choice": False}
    with pytest.raises(RequestError, match="--enable-auto-tool-choice"):
        answer(tokenizer, chat_tools(TOOLS, None, None), settings=settings)
    answer(tokenizer, chat_tools(TOOLS, "required", None), settings=settings)
    with pytest.raises(RequestError, match="reads no tool calls"):
        answer(tokenizer, chat_tools(TOOLS, None, None), settings={"tool_call_parser": "none"})


def test_a_continued_message_may_be_in_its_reasoning(tokenizer: Tokenizer) -> None:
    assert answer(tokenizer, RequestTools(), continued="<think>\nFirst").in_reasoning
    assert not answer(tokenizer, RequestTools(), continued="<think>\nFirst</think>\nYes").in_reasoning


def test_tokens_of_reasoning_are_counted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.added_ids
    made = answer(tokenizer, RequestTools())
    for cuts in ((5,), (1, 2, 3, 4, 5)):
        reader = made.reader(tokenizer)
        assert isinstance(reader, ReasoningReader)
        texts, tokens = ["<think>", "a", "</think>", "b", "c"], [ids["<think>"], 90, ids["</think>"], 91, 92]
        parts, at = [], 0
        for cut in cuts:
            new = CompletionOutput(
                0, "".join(texts[at:cut]), tokens[at:cut], finish_reason="stop" if cut == 5 else None
            )
            parts += reader.read(0, new)
            at = cut
        assert (reasoning_of(parts), content_of(parts), reader.num_reasoning_tokens) == ("a", "bc", 3)
    reader = made.reader(tokenizer)
    assert isinstance(reader, ReasoningReader)
    assert not any(
        isinstance(p, Reasoning) for p in reader.read(0, CompletionOutput(0, " hi", [90, 91], finish_reason="stop"))
    )
    assert reader.num_reasoning_tokens == 0
