from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvasir.errors import RequestError
from kvasir.frontend.text.chat_template import ChatTemplate, check_reads, choose_template, compile_template

TEMPLATES = [
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "GLM-4.6",
    "HuggingFaceTB-SmolLM3-3B",
    "Kimi-K2-Instruct",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
]
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather of a <place> & time, "quoted" é',
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"place": "Oslo"}}}
USER = {"role": "user", "content": "What is 2+2? <b>&amp;</b> 日本"}
ANSWER = {"role": "assistant", "content": "It is 4.  "}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER]},
    "prompted": {"messages": [USER], "add_generation_prompt": True},
    "system": {"messages": [{"role": "system", "content": " Be brief. "}, USER], "add_generation_prompt": True},
    "turns": {"messages": [USER, ANSWER, {"role": "user", "content": "Sure?"}, ANSWER]},
    "tools": {
        "messages": [{"role": "system", "content": "Help."}, USER],
        "tools": TOOLS,
        "add_generation_prompt": True,
    },
    "tool call": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "Sunny"},
        ],
        "tools": TOOLS,
    },
    "reasoning": {
        "messages": [USER, {"role": "assistant", "reasoning_content": "Add.", "content": "4"}, USER],
        "enable_thinking": False,
        "add_generation_prompt": True,
    },
    "inline thinking": {"messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}, USER]},
    "documents": {"messages": [USER], "documents": [{"title": "T", "text": "Text."}], "add_generation_prompt": True},
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "wrong roles": {"messages": [ANSWER, ANSWER]},
    "unknown role": {"messages": [{"role": "narrator", "content": "Once"}]},
    "continued": {"messages": [USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True},
    "continued space": {"messages": [USER, {"role": "assistant", "content": "It is "}], "continue_final_message": True},
}


@pytest.fixture(params=TEMPLATES)
def source(request: pytest.FixtureRequest, test_data: Path) -> str:
    return (test_data / "chat_templates" / f"{request.param}.jinja").read_text("utf-8")


def test_every_template_is_tested(test_data: Path) -> None:
    assert sorted(file.stem for file in (test_data / "chat_templates").glob("*.jinja")) == sorted(TEMPLATES)


def _theirs(source: str, conversation: dict[str, Any]) -> str | None:
    """What transformers renders, or None where it refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    options = dict(conversation)
    try:
        [text], _ = render_jinja_template([options.pop("messages")], chat_template=source, **SPECIAL, **options)
    except Exception:
        return None
    return str(text)


@pytest.mark.parametrize("title", CONVERSATIONS)
def test_real_templates_render_like_transformers(source: str, title: str) -> None:
    conversation = CONVERSATIONS[title]
    expected = _theirs(source, conversation)
    template = compile_template(source)
    if expected is None and ".append(" in source:  # which transformers refuses, and Kimi K2's own server does not
        assert "<|tool_call_begin|>functions." in template.render(**conversation, **SPECIAL)
    elif expected is None:
        with pytest.raises(RequestError):
            template.render(**conversation, **SPECIAL)
    else:
        assert template.render(**conversation, **SPECIAL) == expected


def test_real_templates_render_ordinary_conversations(source: str) -> None:
    """That transformers refuses, too, would otherwise hide an error common to both."""
    for title in ("one turn", "prompted", "turns", "continued"):
        text = compile_template(source).render(**{"tools": _needed_tools(source)} | CONVERSATIONS[title], **SPECIAL)
        assert "What is 2+2? <b>&amp;</b> 日本" in text
    assert text.endswith("It is")


def test_content_parts_read_as_text_in_every_real_template(source: str) -> None:
    template = compile_template(source)
    parts = [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]
    text = template.render([{"role": "user", "content": parts}], tools=_needed_tools(source), **SPECIAL)
    assert re.search(r"alpha\n?beta", text), text
    assert "'text'" not in text and '"text"' not in text


@pytest.mark.parametrize("calls", [{}, {"tool_calls": [CALL]}], ids=["silent", "calls"])
def test_no_content_is_no_text_in_every_real_template(source: str, calls: dict[str, Any]) -> None:
    template, tools = compile_template(source), _needed_tools(source)
    try:
        empty = template.render([USER, {"role": "assistant", "content": "", **calls}], tools=tools, **SPECIAL)
    except RequestError:
        pytest.skip("a template that knows no calls")
    for content in ({"content": None}, {}):
        text = template.render([USER, {"role": "assistant", **content, **calls}], tools=tools, **SPECIAL)
        assert text.count("None") == empty.count("None")


def test_templates_that_cannot_take_null_get_an_empty_text() -> None:
    silent = [USER, {"role": "assistant", "content": None}]
    assert ChatTemplate("{% for m in messages[1:] %}{{ '<' + m.content + '>' }}{% endfor %}").render(silent) == "<>"
    assert ChatTemplate("{% for m in messages[1:] %}<{{ m.content }}>{% endfor %}").render(silent) == "<>"
    reads_null = "{% for m in messages[1:] %}{{ 'null' if m.content is none else m.content }}{% endfor %}"
    assert ChatTemplate(reads_null).render(silent) == "null"


def _needed_tools(source: str) -> list[dict[str, Any]] | None:
    return TOOLS if source.startswith("{%- macro json_to_python_type") else None  # Hermes' tool_use template


# ---------------------------------------------------------------- content parts

PARTS_ONLY = "{% for m in messages %}{% for p in m.content if p.type == 'text' %}[{{ p.text }}]{% endfor %}{% endfor %}"
STRINGS_ONLY = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}"
PRINTS_LISTS = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
JSON_LISTS = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"


def test_parts_become_text_where_the_template_wants_strings() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]}]
    assert ChatTemplate(STRINGS_ONLY).render(messages) == "user: a\nb\nc\n"
    assert ChatTemplate(PRINTS_LISTS).render(messages) == "a\nb\nc"
    assert ChatTemplate(JSON_LISTS).render(messages) == '"a\\nb\\nc"'


def test_text_becomes_a_part_where_the_template_wants_parts() -> None:
    assert ChatTemplate(PARTS_ONLY).render([{"role": "user", "content": "a"}]) == "[a]"
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate(PARTS_ONLY).render(messages) == "[a][b]"
    assert ChatTemplate(PARTS_ONLY).render(messages, continue_final_message=True) == "[a][b"


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {"type": 3}]
)
def test_parts_that_are_no_text_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="accepts only text"):
        ChatTemplate(PARTS_ONLY).render([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        {"role": "user", "content": "x"},
        [{"content": "x"}],
        ["hi"],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        None,
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(STRINGS_ONLY).render(messages)
    assert caught.value.parameter == "messages"


# ---------------------------------------------------------------- the sandbox


def test_template_errors_are_request_errors() -> None:
    with pytest.raises(RequestError, match="does not compile at line 2"):
        ChatTemplate("line one\n{% for %}")
    with pytest.raises(RequestError, match="only user and assistant"):
        ChatTemplate("{{ raise_exception('only user and assistant') }}").render([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="cannot render"):
        ChatTemplate("{{ 1 / 0 }}").render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ dict.mro() }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range(99999999) | list }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(attack: str) -> None:
    template = ChatTemplate(attack)
    with contextlib.suppress(RequestError):
        assert template.render([{"role": "user", "content": "x"}]).strip() == ""  # undefined, and nothing happened


def test_templates_see_plain_data_only() -> None:
    class Evil:
        def write(self) -> str:
            return "written"

    messages = [{"role": "user", "content": "x", "thing": Evil(), "many": (1, True, None)}]
    assert ChatTemplate("{{ messages[0].thing }} {{ messages[0].many }}").render(messages) == "<Evil> [1, True, None]"
    with pytest.raises(RequestError):
        ChatTemplate("{{ thing.write() }}").render(messages, thing=Evil())
    assert set(messages[0]) == {"role", "content", "thing", "many"}


def test_what_templates_may_use() -> None:
    render = ChatTemplate(
        "{% generation %}{{ {'b': '<é>', 'a': 1} | tojson(indent=2, sort_keys=true) }}{% endgeneration %}\n"
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i > 2 %}{% break %}{% endif %}"
        "{% endfor %}\n"
        "{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }} {{ dict(a=2).a }} {{ dict.fromkeys('a') }}\n"
        "{{ strftime_now('%Y') | int > 2000 }} {{ bos_token }} {{ mine }} {{ 'é' | tojson(ensure_ascii=true) }}"
    ).render
    text = render([{"role": "user", "content": "x"}], bos_token="<s>", mine=[1])
    assert text == '{\n  "a": 1,\n  "b": "<é>"\n}0232 2 {\'a\': None}\nTrue <s> [1] "\\u00e9"'


def test_reasoning_goes_by_any_of_its_names() -> None:
    names = ("reasoning_content", "reasoning", "thinking")
    for read in names:
        template = ChatTemplate(f"{{{{ messages[0].{read} }}}}")
        for name in names:
            message = {"role": "assistant", "content": "x", **dict.fromkeys(names), name: "hm"}
            assert template.render([message]) == "hm", (read, name)
            assert template.render([{**message, **dict.fromkeys(names, ""), name: "hm"}]) == "hm", (read, name)
    with pytest.raises(RequestError, match="thinking of a message must be a string"):
        template.render([{"role": "assistant", "content": "x", "thinking": ["hm"]}])


def test_what_a_message_leaves_empty_is_not_there(source: str) -> None:
    """Clients send back replies with all their fields. Some templates fail on those that are null."""
    names = ("tool_calls", "reasoning", "reasoning_content", "thinking", "function_call", "audio", "refusal")

    def render(reply: dict[str, Any]) -> str:
        return compile_template(source).render([USER, reply, USER], tools=TOOLS, add_generation_prompt=True, **SPECIAL)

    for empty in (dict.fromkeys(names), {"tool_calls": []}):
        assert render({**ANSWER, **empty}) == render(ANSWER)


def test_reasoning_beside_text_and_calls_reaches_templates_that_refuse_both(test_data: Path) -> None:
    template = compile_template((test_data / "chat_templates" / "openai-gpt-oss-120b.jinja").read_text("utf-8"))
    said = {"role": "assistant", "content": "I look.", "reasoning": "Which one?", "tool_calls": [CALL]}
    text = template.render([USER, said, {"role": "tool", "content": "Sunny"}], **SPECIAL)
    assert "analysis<|message|>Which one?\n\nI look.<|end|>" in text and "get_weather" in text


def test_entries_of_content_parts_are_not_dropped() -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "annotations": [], "mood": None}
    assert ChatTemplate(STRINGS_ONLY).render([{"role": "user", "content": [part]}]) == "user: x\n"
    for name, message in (("mood", "'mood' in a content part is not supported"), ("refusl", "Did you mean refusal")):
        with pytest.raises(RequestError, match=message):
            ChatTemplate(STRINGS_ONLY).render([{"role": "user", "content": [{**part, name: "good"}]}])


def test_continuing_is_not_confused_by_what_users_write() -> None:
    messages = [{"role": "user", "content": "CONTINUE_FINAL_MESSAGE_TAG "}, {"role": "assistant", "content": "So"}]
    text = ChatTemplate(STRINGS_ONLY).render(messages, continue_final_message=True)
    assert text == "user: CONTINUE_FINAL_MESSAGE_TAG \nassistant: So"


def test_continuing_needs_something_to_continue() -> None:
    template = ChatTemplate(STRINGS_ONLY)
    with pytest.raises(RequestError, match="set only one"):
        template.render([USER], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="has no text"):
        template.render([{"role": "assistant"}], continue_final_message=True)
    with pytest.raises(RequestError, match="does not show"):
        ChatTemplate("nothing").render([USER], continue_final_message=True)


def test_tools_and_documents_are_dicts() -> None:
    for name in ("tools", "documents"):
        with pytest.raises(RequestError, match=f"{name} must be a list of dicts"):
            ChatTemplate("x").render([USER], **{name: [len]})  # type: ignore[arg-type]


def test_template_choice() -> None:
    several = {"default": "D", "tool_use": "T", "rag": "R"}
    assert choose_template(several, None, with_tools=False) == "D"
    assert choose_template(several, None, with_tools=True) == "T"
    assert choose_template(several, "rag", with_tools=True) == "R"
    assert choose_template(several, "{{ x }}", with_tools=False) == "{{ x }}"
    assert choose_template("own", "asked", with_tools=False) == "asked"
    with pytest.raises(RequestError, match="set chat_template to one of"):
        choose_template({"rag": "R", "x": "X"}, None, with_tools=True)
    with pytest.raises(RequestError, match="no chat template"):
        choose_template(None, None, with_tools=False)


def test_compiled_templates_are_kept() -> None:
    assert compile_template("{{ x }}") is compile_template("{{ x }}")


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "system", "content": None}], ids=str)
def test_a_message_without_content_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"role {message['role']!r} must have content"):
        compile_template("{{ messages[0].content }}").render([message])


# ---------------------------------------------------------------- what OpenAI's clients write


def test_a_misspelt_role_is_found_and_an_unusual_one_is_not() -> None:
    template = compile_template("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{# ipython #}")
    for role in ("", "  ", "friend\nINFO"):
        with pytest.raises(RequestError, match=r"is not a role. Known ones are assistant, "):
            template.render([{"role": role, "content": "x"}])
    with pytest.raises(RequestError, match=r"'usr' is not a role. Did you mean user\?"):
        template.render([{"role": "usr", "content": "Hi"}])
    for role in ("ipython", "critic", "tool"):
        assert template.render([{"role": role, "content": "Hi"}]) == f"{role}: Hi"


def test_developer_messages_are_system_messages_where_templates_know_no_others() -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    assert ChatTemplate("{{ messages[0].role }}").render(messages) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}").render(messages) == "developer"


def test_what_a_template_never_reads_is_refused() -> None:
    calls = [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
    check_reads("{{ messages }} {{ tools }} {{ tool_calls }}", calls, {"tools": [{}], "documents": None})
    for source, messages, given, name in (
        ("{{ messages }}", calls, {}, "tool_calls"),
        ("{{ messages }}", [], {"tools": [{}]}, "tools"),
    ):
        with pytest.raises(RequestError, match=f"{name} is not supported by this model") as error:
            check_reads(source, messages, given)
        assert error.value.parameter == name


def test_every_real_template_gets_the_calls_or_refuses_them(source: str) -> None:
    """They must not vanish: the model would see a result that nobody asked for."""
    call = {**CALL, "function": {"name": "get_weather", "arguments": '{"place": "Oslo"}'}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "Sunny"}
    try:
        messages = check_reads(source, [USER, answer, result], {})
        text = compile_template(source).render(messages, tools=TOOLS, **SPECIAL)
    except RequestError as error:
        assert re.search("its chat template does not read it|unsafe", str(error))
        return
    last = text.rindex("Oslo")
    assert "get_weather" in text[:last] and "Sunny" in text[last:]


def test_calls_of_custom_tools_are_shown_as_calls_of_functions(source: str) -> None:
    said = {"id": "abcdefghi", "type": "custom", "custom": {"name": "get_weather", "input": "of Oslo"}}
    call = {**CALL, "function": {"name": "get_weather", "arguments": '{"input": "of Oslo"}'}}
    shown = []
    for each in (said, call):
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": [each]}]
        try:
            messages = check_reads(source, messages, {})
            shown.append(compile_template(source).render(messages, tools=TOOLS, **SPECIAL))
        except RequestError as error:
            assert "its chat template does not read it" in str(error)
            shown.append("")
    assert shown[0] == shown[1] and ("of Oslo" in shown[0]) == bool(shown[0])


@pytest.mark.parametrize("custom", [None, {"name": "f"}, {"name": "f", "input": {}}])
def test_a_wrong_call_of_a_custom_tool_is_refused(custom: object) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "custom", "custom": custom}]}
    with pytest.raises(RequestError, match="needs custom, an object with name and input"):
        check_reads("{{ messages }} {{ tool_calls }}", [answer], {})


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("Call as <tool_call>", '<tool_call>\n{"name": "f", "arguments": {"x": "1", "y": true}}\n</tool_call>'),
        ("Call as <|tool_call|>", '<|tool_call|>[{"name": "f", "arguments": {"x": "1", "y": true}}]'),
        ("<|tool_list_start|>", '<|tool_call_start|>[f(x="1", y=True)]<|tool_call_end|>'),
    ],
)
@pytest.mark.parametrize("content", ["Hm. ", None, [{"type": "text", "text": "Hm. "}]])
def test_calls_are_written_as_the_templates_text_says(text: str, written: str, content: Any) -> None:
    source = text + "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": "1", "y": true}'}}
    (message,) = check_reads(source, [{"role": "assistant", "content": content, "tool_calls": [call]}], {})
    shown = ChatTemplate(source).render([message])
    assert shown.startswith(f"{text}assistant: {'Hm.' if content else ''}") and shown.endswith(f"{written};")


def test_a_role_that_a_template_leaves_out_is_refused() -> None:
    asked = "{% for m in messages %}{% if m.role in ('user', 'critic') %}{{ m.content }}{% endif %}{% endfor %}"
    for role in ("system", "developer", "tool", "narrator"):
        with pytest.raises(RequestError, match=f"The role '{role}' is not supported by this model"):
            check_reads(asked, [{"role": role, "content": "x"}], {})
    check_reads(asked, [{"role": "critic", "content": "x"}, USER], {})
    strict = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    check_reads(strict, [{"role": "tool", "content": "x"}], {})  # its own words tell more


def test_a_field_of_a_message_is_read_or_refused() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    whole = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    named = "{% for m in messages %}{{ m['mood'] }}{{ m.content }}{% endfor %}"
    message = {"role": "user", "content": "x", "mood": "good"}
    for source in (whole, named):
        assert "good" in ChatTemplate(source).render(check_reads(source, [message], {}))
    with pytest.raises(RequestError, match="'mood' in a message is not supported by this model"):
        check_reads(plain, [message], {})
    with pytest.raises(RequestError, match="Did you mean reasoning_content"):
        check_reads(plain, [{"role": "assistant", "content": "x", "reasoning_contnt": "hm"}], {})
    empty = {"mood": None, "audio": None, "function_call": None, "tool_calls": [], "prefix": False, "refusal": ""}
    check_reads(plain, [{"role": "user", "content": "x", "name": "Bo", **empty}], {})
    (refusal,) = check_reads(plain, [{"role": "assistant", "content": None, "refusal": "I must not."}], {})
    assert ChatTemplate(plain).render([refusal]) == "assistant: I must not."


def test_what_a_template_only_mentions_is_not_read() -> None:
    with pytest.raises(RequestError, match="tools is not supported"):
        check_reads("You have no tools. {{ messages[0].content }}", [USER], {"tools": TOOLS})


def test_arguments_of_tool_calls_are_read() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.place }}")

    def render(arguments: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return template.render([{"role": "assistant", "content": "", "tool_calls": [call]}])

    assert render('{"place": "Oslo"}') == render({"place": "Oslo"}) == "Oslo"
    with pytest.raises(RequestError, match="'f' are not JSON"):
        render("{")


def test_real_templates_read_openais_tool_calls_as_transformers_reads_values(source: str) -> None:
    conversation = CONVERSATIONS["tool call"]
    expected = _theirs(source, conversation)
    written = json.loads(json.dumps(conversation["messages"]))
    written[1]["tool_calls"][0]["function"]["arguments"] = '{"place": "Oslo"}'
    if expected is not None:
        assert compile_template(source).render(**{**conversation, "messages": written}, **SPECIAL) == expected
