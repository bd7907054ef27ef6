"""Formats are found by the chat template alone, for every template at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvasir.errors import RequestError
from kvasir.parsers.base import calls_of
from kvasir.parsers.formats import TOOL_FORMATS, AnswerFormat
from kvasir.parsers.scanner import make_parser
from kvasir.parsers.templates import describe_tools, detect, reads_tools, with_tools, write_calls

TEMPLATES = Path(os.environ.get("KVASIR_TEST_DATA", "/nowhere")) / "chat_templates"
# File -> tool calls, reasoning.
EXPECTED = {
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere_command3", "cohere_command3"),
    "GLM-4.6": ("glm45", "think"),
    "HuggingFaceTB-SmolLM3-3B": (None, "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "think"),
    "google-gemma-2-2b-it": (None, None),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "think_response"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral_v1", None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
}


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="needs KVASIR_TEST_DATA")
def test_every_template_is_detected() -> None:
    files = {file.stem: file.read_text(encoding="utf-8") for file in TEMPLATES.glob("*.jinja")}
    assert files.keys() == EXPECTED.keys()
    for name, source in files.items():
        found = detect(source)
        form = found.format
        tools, reasoning = (None if row is None else row.name for row in (form.tools, form.reasoning))
        assert (tools, reasoning) == EXPECTED[name], (name, found)
        assert found.why_tools and found.why_reasoning


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_template_that_shows_calls_is_asked(name: str) -> None:
    """Whatever a template shows for a call of an earlier turn, the format that reads it is found."""
    form = TOOL_FORMATS[name]
    written = write_calls(form, [("NAME", {"kvasir_key": "kvasir value"})])
    shown = written.replace("NAME", "' ~ call.function.name ~ '").replace("\n", "\\n")
    source = (
        "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{% for call in m.tool_calls %}{{ '"
        + shown
        + "' }}{% endfor %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    found = detect(source).format.tools
    assert found is not None
    same = {"pythonic": {"llama4_pythonic"}, "llama4_pythonic": {"pythonic"}}.get(name, set())
    assert found.name in {name} | same


def test_templates_without_tools() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert detect(source).format == AnswerFormat() and not reads_tools(source)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_written_calls_are_read_back(name: str) -> None:
    form = TOOL_FORMATS[name]
    parser = make_parser(AnswerFormat(form), {"f": {"properties": {"a": {"type": "string"}}}})
    calls = calls_of([*parser.feed(write_calls(form, [("f", {"a": "é\n", "n": [1]})])), *parser.finish()])
    assert [call.name for call in calls] == ["f"]


def test_tools_as_messages() -> None:
    form = TOOL_FORMATS["hermes"]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = with_tools(messages, tools, form)
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user"]
    assert made[0]["content"] == f"Be brief.\n\n{describe_tools(form, tools)}"
    assert made[2]["content"] == write_calls(form, [("f", {"a": 1})])
    assert made[3]["content"].count("<tool_response>") == 2
    assert with_tools(messages[1:2], tools, form)[0]["role"] == "system"
    kept = with_tools(messages, tools, form, rewrites=False)
    assert kept[2]["tool_calls"] == [call] and kept[3]["role"] == "tool"


def test_nothing_of_earlier_turns_is_dropped_where_they_become_text() -> None:
    form = TOOL_FORMATS["hermes"]

    def written(message: dict[str, Any]) -> str:
        return str(with_tools([{"role": "assistant", "content": "", **message}], [], form)[0]["content"])

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1, 2]"}}
    assert "[1, 2]" in written({"tool_calls": [call]})
    assert "two" in written({"role": "tool", "content": [{"type": "text", "text": "two"}]})
    image = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    with pytest.raises(RequestError, match="parts of type 'image_url' are not supported"):
        written({"role": "tool", "content": [image]})
    for broken in ({"id": "1"}, {"id": "1", "function": {"arguments": "{}"}}):
        with pytest.raises(RequestError, match="needs function, an object with its name"):
            written({"tool_calls": [broken]})
