"""Tool calls and reasoning over HTTP, with a device that says what the prompt tells it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests import web
from tests.server_process import LiveServer

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
CLOCK = {"name": "clock", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
FLAT: list[Any] = [{"type": "function", **WEATHER}, {"type": "function", **CLOCK}]
BLOCKS: list[Any] = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
    for each in (WEATHER, CLOCK)
]
ARGUMENTS = {"city": "Rome", "days": 3}
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ARGUMENTS})}\n</tool_call>"
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nWhich one?\n</think>\n\n"


@pytest.fixture(scope="module")
def server(starter_model: Path) -> Iterator[LiveServer]:
    settings = {"reasoning_parser": "qwen3"}
    executor = {"make": "tests.saying_executor:saying"}
    with LiveServer.fake(starter_model, server=settings, executor=executor) as live:
        yield live.wait_until_ready()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def told(*texts: str) -> list[Any]:
    """A conversation whose answers are these texts, one after each result of a tool."""
    return [{"role": "user", "content": "".join(f"«{text}»" for text in texts)}]


def ask(server: LiveServer, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 200, **fields}
    answer = web.post(f"{server.url}/v1/chat/completions", json=body)
    found: dict[str, Any] = answer.json()
    return found if answer.status_code != 200 else found["choices"][0]


# ---------------------------------------------------------------- chat


def test_the_log_says_which_formats_and_why(server: LiveServer) -> None:
    assert "Tool calls are read as hermes: the chat template reads no tools" in server.log
    assert "Reasoning is read as think: reasoning_parser says so" in server.log


def test_chat_calls_tools(server: LiveServer) -> None:
    choice = ask(server, told(f"{THOUGHT}I look.\n{CALL}\n{SECOND}"), tools=TOOLS)
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("Which one?", "Which one?")
    assert message["content"] == "I look.\n" and choice["finish_reason"] == "tool_calls"
    first, second = message["tool_calls"]
    assert first["type"] == "function" and json.loads(first["function"]["arguments"]) == ARGUMENTS
    assert second["function"] == {"name": "clock", "arguments": "{}"} and first["id"] != second["id"]


def test_an_answer_without_calls_has_no_new_fields(server: LiveServer) -> None:
    choice = ask(server, told("Hello."), tools=TOOLS)
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_the_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    messages = told(f"{THOUGHT}I look.\n{CALL}\n{SECOND}")
    chunks = list(client.chat.completions.create(model=_model(client), messages=messages, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", "") or "" for delta in deltas) == "Which one?"
    assert "".join(delta.content or "" for delta in deltas) == "I look.\n"
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in pieces if call.id] == [(0, "weather"), (1, "clock")]
    arguments = [call.function.arguments for call in pieces if call.index == 0]
    assert json.loads("".join(text or "" for text in arguments)) == ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_tool_loop(client: openai.OpenAI) -> None:
    messages = told(CALL, "It will rain.")
    first = client.chat.completions.create(model=_model(client), messages=messages, tools=TOOLS).choices[0].message
    (call,) = first.tool_calls or []
    messages += [first.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = client.chat.completions.create(model=_model(client), messages=messages, tools=TOOLS).choices[0]
    assert (second.message.content, second.finish_reason) == ("It will rain.", "stop")


def test_choices_of_tools(server: LiveServer) -> None:
    none = ask(server, told(CALL), tools=TOOLS, tool_choice="none")
    assert none["message"]["content"] == CALL and none["finish_reason"] == "stop"
    single = ask(server, told(f"{CALL}\n{SECOND}"), tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in single["message"]["tool_calls"]] == ["weather"]
    named = {"type": "function", "function": {"name": "clock"}}
    forced = ask(server, told("Hello."), tools=TOOLS, tool_choice=named)
    (call,) = forced["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": "{}"} and forced["finish_reason"] == "tool_calls"
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    several = ask(server, told("Hello."), tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in several["message"]["tool_calls"]] == ["clock"]


def test_a_started_call_is_held_to_a_strict_schema(server: LiveServer) -> None:
    wrong = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 77, "x": 1}}\n</tool_call>'
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    free = ask(server, told(wrong), tools=TOOLS)["message"]["tool_calls"][0]
    held = ask(server, told(wrong), tools=strict)["message"]["tool_calls"][0]
    assert json.loads(free["function"]["arguments"])["days"] == 77
    found = json.loads(held["function"]["arguments"])
    assert set(found) == {"city", "days"} and 1 <= found["days"] <= 9
    assert ask(server, told("No call."), tools=strict)["message"]["content"] == "No call."


def test_custom_tools_take_text(server: LiveServer) -> None:
    said = '<tool_call>\n{"name": "run", "arguments": {"input": "print(\\"é\\")\\n"}}\n</tool_call>'
    custom = [{"type": "custom", "custom": {"name": "run", "description": "Runs code."}}]
    (call,) = ask(server, told(said), tools=custom)["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"] == {"name": "run", "input": 'print("é")\n'}
    history = [{"role": "user", "content": "Run it."}, {"role": "assistant", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": call["id"], "content": "é"}]
    tokens = web.post(f"{server.url}/tokenize", json={"messages": history}).json()["tokens"]
    prompt = web.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert said.splitlines()[1] in prompt.replace("\\u00e9", "é")
    wrong = ask(server, [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "run"}}]}])
    assert wrong["error"]["param"] == "messages" and "needs custom" in wrong["error"]["message"]


def test_custom_calls_reach_the_next_turn(server: LiveServer, client: openai.OpenAI) -> None:
    """By chat and by responses, with the same text."""
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": "print(7)"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*told(SECOND, "Seven."), answer, {"role": "tool", "tool_call_id": "c1", "content": "7"}]
    items: list[Any] = [
        *told(SECOND, "Seven."),
        {"type": "custom_tool_call", "call_id": "c1", "name": "run", "input": "print(7)"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "7"},
    ]
    ids = web.post(f"{server.url}/tokenize", json={"messages": messages}).json()["tokens"]
    text = web.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"]
    assert '{"name": "run", "arguments": {"input": "print(7)"}}' in text
    after = client.responses.create(model=_model(client), input=items)
    assert after.output_text == "Seven." and after.usage is not None and after.usage.input_tokens == len(ids)
    assert ask(server, messages)["message"]["content"] == "Seven."


def test_reasoning_can_be_left_out(server: LiveServer) -> None:
    message = ask(server, told(f"{THOUGHT}Yes."), include_reasoning=False)["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": BLOCKS}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": "clock"}, {"role": "user", "content": "?"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}, *told("a")]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}, *told("a")]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"functions": [WEATHER]}, "functions"),
    ],
)
def test_wrong_tools_are_refused_by_name(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    error = ask(server, **{"messages": told("Hello."), **fields})["error"]
    assert error["param"] == param and error["message"]


BAD = {"type": "object", "properties": {"a": {"not": {}}}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": BAD, "strict": True}}]},
            "tools: The tool 'f': The JSON schema cannot be enforced: Unimplemented keys: [\"not\"]",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "run", "format": {"type": "grammar", "grammar": {
                "syntax": "regex", "definition": "("}}}}], "tool_choice": "required"},
            "tools: The tool 'run': The regular expression cannot be used",
        ),
        ({"thinking_token_budget": 5}, "max_tokens limits the whole answer"),
    ],
)  # fmt: skip
def test_errors_say_which_tool_and_what_to_do(server: LiveServer, fields: dict[str, Any], words: str) -> None:
    assert words in ask(server, told("Hello."), **fields)["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_tools_are_for_chat_requests(server: LiveServer, path: str) -> None:
    reply = web.post(server.url + path, json={"prompt": "a", "max_tokens": 2, "tools": TOOLS})
    assert reply.status_code == 400 and "only chat requests have tools" in reply.text
    assert web.post(server.url + path, json={"prompt": "a", "max_tokens": 2, "tools": []}).status_code == 200


def test_malformed_calls_are_text(server: LiveServer) -> None:
    text = '<tool_call>\n{"nam": "weather"}\n</tool_call>'
    choice = ask(server, told(text), tools=TOOLS)
    assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"


# ---------------------------------------------------------------- responses


def test_responses_call_tools(client: openai.OpenAI) -> None:
    asked = {"model": _model(client), "tools": FLAT}
    text = told(f"{THOUGHT}I look.\n{CALL}", "It will rain.")[0]["content"]
    made = client.responses.create(input=text, **asked)
    thought, message, call = made.output
    assert (thought.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert thought.content is not None and thought.content[0].text == "Which one?"
    assert made.output_text == "I look.\n" and json.loads(call.arguments) == ARGUMENTS
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after = client.responses.create(previous_response_id=made.id, input=[result], **asked)  # type: ignore[list-item]
    assert after.output_text == "It will rain."
    stateless = [{"role": "user", "content": text}, *(item.model_dump() for item in made.output), result]
    again = client.responses.create(input=stateless, **asked)  # type: ignore[arg-type]
    assert again.output_text == "It will rain."


def test_response_events(client: openai.OpenAI) -> None:
    text = told(f"{THOUGHT}I look.\n{CALL}")[0]["content"]
    with client.responses.stream(model=_model(client), input=text, tools=FLAT) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    kinds = [event.type for event in events]
    order = [
        *("response.created", "response.in_progress", "response.reasoning_text.done", "response.output_text.done"),
        *("response.function_call_arguments.done", "response.completed"),
    ]
    assert [kind for kind in kinds if kind in order] == order
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == ARGUMENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))


# ---------------------------------------------------------------- messages


def test_messages_call_tools(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    asked = {"model": _model(client), "max_tokens": 200, "tools": BLOCKS}
    messages = told(f"{THOUGHT}I look.\n{CALL}", "It will rain.")
    made = claude.messages.create(messages=messages, **asked)
    thought, text, call = made.content
    assert (thought.type, text.type, call.type, made.stop_reason) == ("thinking", "text", "tool_use", "tool_use")
    assert thought.thinking == "Which one?" and call.input == ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    after = claude.messages.create(messages=messages, **asked)
    assert after.content[0].text == "It will rain." and after.stop_reason == "end_turn"


def test_message_events(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    messages = told(f"{THOUGHT}I look.\n{CALL}\n{SECOND}")
    with claude.messages.stream(model=_model(client), max_tokens=200, tools=BLOCKS, messages=messages) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert final.content[2].input == ARGUMENTS and final.content[3].input == {}
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


def test_messages_choose_tools(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": _model(client), "max_tokens": 200, "tools": BLOCKS, "messages": told("Hello.")}
    named = claude.messages.create(tool_choice={"type": "tool", "name": "clock"}, **asked)
    assert [(block.type, block.name) for block in named.content] == [("tool_use", "clock")]
    with pytest.raises(anthropic.BadRequestError, match="no such tool"):
        claude.messages.create(tool_choice={"type": "tool", "name": "nope"}, **asked)
    none = claude.messages.create(tool_choice={"type": "none"}, **{**asked, "messages": told(CALL)})
    assert [block.type for block in none.content] == ["text"]


def _model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id
