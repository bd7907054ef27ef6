"""The clients that people use run a tool loop and get a structured answer, from the starter model over HTTP."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server_process import LiveServer

pytestmark = pytest.mark.slow

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
QUESTION = "What will the weather be in Paris for 3 days?"
NAME = "weather"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@pytest.fixture(scope="module")
def model(real_server: LiveServer) -> str:
    return _openai(real_server).models.list().data[0].id


def _openai(real_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0)


def test_openai(real_server: LiveServer, model: str) -> None:
    client = _openai(real_server)
    tool: Any = {"type": "function", "function": {"name": NAME, "description": "Weather", "parameters": PARAMETERS}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {
        "model": model,
        "tools": [tool],
        "temperature": 1.0,
        "max_tokens": 200,
        "seed": 7,
    }
    first = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0]
    assert first.finish_reason == "tool_calls"
    for call in first.message.tool_calls or []:
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
        messages += [first.message.model_dump(exclude_none=True)] if len(messages) == 1 else []
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = client.chat.completions.create(messages=messages, tool_choice="none", **asked).choices[0]
    assert second.message.content
    parsed = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "Who is Ann?"}], response_format=Person, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    flat: Any = {"type": "function", "name": NAME, "parameters": PARAMETERS, "strict": True}
    made = client.responses.create(model=model, input=QUESTION, tools=[flat], tool_choice="required")
    jsonschema.validate(json.loads(made.output[-1].arguments), PARAMETERS)  # type: ignore[union-attr]


def test_anthropic(real_server: LiveServer, model: str) -> None:
    client = anthropic.Anthropic(base_url=real_server.url, api_key="none", max_retries=0)
    tool: Any = {"name": NAME, "description": "Weather", "input_schema": PARAMETERS}
    asked: dict[str, Any] = {"model": model, "max_tokens": 200, "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    made = client.messages.create(messages=messages, tool_choice={"type": "any"}, **asked)
    call = made.content[0]
    assert made.stop_reason == "tool_use" and call.type == "tool_use"
    jsonschema.validate(call.input, PARAMETERS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    after = client.messages.create(messages=messages, tool_choice={"type": "none"}, **asked)
    assert after.content[0].type == "text"
    form: Any = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    text = client.messages.create(model=model, max_tokens=200, messages=messages[:1], output_config=form).content[0]
    assert text.type == "text"
    jsonschema.validate(json.loads(text.text), PARAMETERS)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(real_server: LiveServer, model: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(_openai(real_server), mode=instructor.Mode[mode])
    messages = [{"role": "user", "content": "Ann is 31 years old."}]
    person = client.chat.completions.create(
        model=model, messages=messages, response_model=Person, max_tokens=200, max_retries=1
    )
    assert isinstance(person, Person)


def test_langchain(real_server: LiveServer, model: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        return f"sunny in {city} for {days} days"

    chat = langchain.ChatOpenAI(
        base_url=f"{real_server.url}/v1", api_key="none", model=model, max_tokens=200, max_retries=0
    )
    messages: list[Any] = [HumanMessage(QUESTION)]
    answer = chat.bind_tools([weather], tool_choice="required").invoke(messages)
    assert answer.tool_calls and answer.tool_calls[0]["name"] == "weather"
    messages.append(answer)
    for call in answer.tool_calls:
        messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    assert chat.invoke(messages).content
    assert isinstance(chat.with_structured_output(Person).invoke("Ann is 31 years old."), Person)


def test_pydantic_ai(real_server: LiveServer, model: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    made = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{real_server.url}/v1", api_key="none"))
    settings = {"max_tokens": 200, "temperature": 1.0, "seed": 7}
    called: list[tuple[str, int]] = []

    agent = pydantic_ai.Agent(made, output_type=Person, model_settings=settings)

    @agent.tool_plain
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        called.append((city, days))
        return "sunny"

    # The agent's answer is a tool call, too, and the model must make some call in every turn.
    result = agent.run_sync("Ann is 31 years old.", usage_limits=pydantic_ai.UsageLimits(request_limit=20))
    assert isinstance(result.output, Person)
    native = pydantic_ai.Agent(made, output_type=pydantic_ai.NativeOutput(Person), model_settings=settings)
    assert isinstance(native.run_sync("Ann is 31 years old.").output, Person)
