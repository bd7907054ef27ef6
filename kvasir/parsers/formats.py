"""How models write tool calls and reasoning: one row for each format, with vLLM's names. API process.

A row is read three times: by the scanner (scanner.py), by the grammar (grammar.py), and by the writer of calls of
earlier turns (templates.py). Markers stand with the whitespace that models write. The scanner takes any whitespace
between the words of a marker and around it; the grammar writes it as it stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvasir.errors import ConfigError

Pair = tuple[str, str]
Row = TypeVar("Row")
Arguments = Literal["json", "tagged", "pythonic", "gemma", "harmony"]


@dataclass(frozen=True)
class ReasoningFormat:
    """Where reasoning begins and ends in an answer."""

    name: str
    open: tuple[str, ...]  # the first is what templates write and grammars force
    close: tuple[str, ...]
    answer: Pair = ("", "")  # markers around the answer itself, which are removed
    ends_at_call: bool = False  # a call without the closing marker before it also ends the reasoning


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    A section holds all calls and may be absent, with `("", "")`. Without markers (`is_bare`) only a whole answer can be
    calls, and only of tools that the request has.
    """

    name: str
    arguments: Arguments = "json"
    section: Pair = ("", "")
    call: Pair = ("", "")
    array: bool = False  # the calls are entries of a list in brackets
    separator: str = ""  # between two calls
    # JSON with the name inside: {"name": ..., "arguments": {...}}
    id_key: str = ""  # the model writes a number under it first
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")  # the first is the model's own
    # the name outside of the arguments: call[0], name, name_end, arguments, call[1]
    name_end: str = ""  # empty: the name is in the JSON, or before the bracket of a Python call
    id_end: str = ""  # between the name and name_end: a marker, the call's id
    numbered: bool = False  # the name is written as functions.NAME:NUMBER, which is also the call's id
    # tagged arguments: key[0], key, key[1], value, value_end
    key: Pair = ("", "")
    flag_end: str = ""  # after key[1]: "true" if the value is a string or "false" if it is JSON, then this marker
    value_end: str = ""
    quote: str = ""  # around strings in Gemma's arguments
    also: tuple[str, ...] = ()  # other texts that models write for the beginning of the section or call
    older: str = ""  # the row of an older form with the same opening, for answers where a bracket follows it
    short_ids: bool = False  # the template wants ids of nine letters and digits

    @property
    def is_bare(self) -> bool:
        return not (self.section[0] or self.call[0]) and self.arguments != "harmony"

    @property
    def opening(self) -> str:
        """The text with which calls begin, in an answer."""
        return self.section[0] or self.call[0]

    def texts(self) -> frozenset[str]:
        """All markers, for looking them up among special tokens."""
        found = {*self.section, *self.call, self.name_end, self.id_end, *self.key, self.value_end, self.quote}
        return frozenset((*found, *self.also, self.flag_end)) - {""}


_THINK = (("<think>",), ("</think>",))

_TOOLS = (
    ToolFormat("hermes", call=("<tool_call>\n", "\n</tool_call>")),
    ToolFormat(
        "qwen3_coder",
        "tagged",
        call=("<tool_call>\n<function=", "</function>\n</tool_call>"),
        name_end=">\n",
        key=("<parameter=", ">\n"),
        value_end="\n</parameter>\n",
        also=("<function=",),
    ),
    ToolFormat(
        "seed_oss",
        "tagged",
        call=("<seed:tool_call>\n<function=", "</function>\n</seed:tool_call>"),
        name_end=">\n",
        key=("<parameter=", ">"),
        value_end="</parameter>\n",
    ),
    ToolFormat(
        "glm45",
        "tagged",
        call=("<tool_call>", "</tool_call>"),
        name_end="\n",
        key=("<arg_key>", "</arg_key>\n<arg_value>"),
        value_end="</arg_value>\n",
    ),
    ToolFormat(
        "minimax_m2",
        "tagged",
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        call=('<invoke name="', "</invoke>\n"),
        name_end='">\n',
        key=('<parameter name="', '">'),
        value_end="</parameter>\n",
    ),
    ToolFormat(
        "step3",
        "tagged",
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        call=(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        name_end='">',
        key=('<steptml:parameter name="', '">'),
        value_end="</steptml:parameter>",
    ),
    ToolFormat(
        "deepseek_v32",
        "tagged",
        section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>\n"),
        name_end='">\n',
        key=('<｜DSML｜parameter name="', '" string="'),
        flag_end='">',
        value_end="</｜DSML｜parameter>\n",
    ),
    ToolFormat(
        "deepseek_v4",
        "tagged",
        section=("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
        call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>\n"),
        name_end='">\n',
        key=('<｜DSML｜parameter name="', '" string="'),
        flag_end='">',
        value_end="</｜DSML｜parameter>\n",
    ),
    ToolFormat("llama3_json", arguments_keys=("parameters", "arguments"), separator="; ", also=("<|python_tag|>",)),
    ToolFormat("pythonic", "pythonic", array=True),
    ToolFormat("llama4_pythonic", "pythonic", array=True, also=("<|python_start|>",), section=("", "<|python_end|>")),
    ToolFormat("olmo3", "pythonic", section=("<function_calls>", "</function_calls>"), separator="\n"),
    ToolFormat("lfm2", "pythonic", section=("<|tool_call_start|>", "<|tool_call_end|>"), array=True),
    ToolFormat("mistral_v1", section=("[TOOL_CALLS]", ""), array=True, short_ids=True),
    ToolFormat(
        "mistral", call=("[TOOL_CALLS]", ""), name_end="[ARGS]", id_end="[CALL_ID]", short_ids=True, older="mistral_v1"
    ),
    ToolFormat(
        "deepseek_v3",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),
        name_end="\n```json\n",
    ),
    ToolFormat(
        "deepseek_v31",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        name_end="<｜tool▁sep｜>",
    ),
    ToolFormat(
        "kimi_k2",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        name_end="<|tool_call_argument_begin|>",
        numbered=True,
    ),
    ToolFormat(
        "functiongemma",
        "gemma",
        call=("<start_function_call>call:", "<end_function_call>"),
        quote="<escape>",
    ),
    ToolFormat("gemma4", "gemma", call=("<|tool_call>call:", "<tool_call|>"), quote='<|"|>'),
    ToolFormat("granite", section=("<|tool_call|>", ""), array=True, also=("<tool_call>",)),
    ToolFormat("granite-20b-fc", call=("<function_call> ", "")),
    ToolFormat("gigachat3", call=("<|function_call|>", "")),
    ToolFormat("phi4_mini_json", section=("functools", ""), array=True),
    ToolFormat("xlam", array=True, also=("[TOOL_CALLS]", "<tool_call>")),
    ToolFormat("jamba", section=("<tool_calls>", "</tool_calls>"), array=True),
    ToolFormat("minimax", section=("<tool_calls>\n", "\n</tool_calls>"), separator="\n"),
    ToolFormat(
        "internlm",
        call=("<|action_start|><|plugin|>\n", "<|action_end|>"),
        arguments_keys=("parameters", "arguments"),
    ),
    ToolFormat(
        "cohere_command3",
        section=("<|START_ACTION|>", "<|END_ACTION|>"),
        array=True,
        id_key="tool_call_id",
        name_key="tool_name",
        arguments_keys=("parameters", "arguments"),
    ),
    ToolFormat("longcat", call=("<longcat_tool_call>", "</longcat_tool_call>")),
    ToolFormat(
        "openai", "harmony", also=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
    ),
)

_REASONING = (
    ReasoningFormat("think", *_THINK),
    ReasoningFormat("kimi_k2", *_THINK, ends_at_call=True),
    ReasoningFormat("think_response", *_THINK, answer=("<response>", "</response>")),
    ReasoningFormat("think_answer", *_THINK, answer=("<answer>", "</answer>")),
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    ReasoningFormat(
        "cohere_command3",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat("gemma4", ("<|channel>thought\n",), ("<channel|>",)),
    ReasoningFormat("openai_gptoss", ("<|channel|>analysis<|message|>",), ("<|end|>",)),
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {row.name: row for row in _TOOLS}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {row.name: row for row in _REASONING}

# vLLM's other names. Models of one format have several there, because each file of vLLM reads one model.
TOOL_ALIASES: Mapping[str, str] = {
    **{"qwen2.5": "hermes", "qwen3": "hermes", "granite4": "hermes", "ernie45": "hermes"},
    **{"qwen3_xml": "qwen3_coder", "mimo": "qwen3_coder", "step3p5": "qwen3_coder"},
    **{"glm47": "glm45", "poolside_v1": "glm45", "llama4_json": "llama3_json", "llama": "llama3_json"},
    **{"hunyuan": "jamba", "hunyuan_a13b": "jamba"},
    **{"gemma": "functiongemma", "cohere": "cohere_command3", "command_r": "cohere_command3"},
    **{"gpt_oss": "openai", "harmony": "openai", "mistral_old": "mistral_v1"},
    **{"deepseek_r1": "deepseek_v3", "gpt-oss": "openai", "command-r": "cohere_command3"},
}
REASONING_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *(
                "deepseek_r1",
                "qwen3",
                "deepseek_v3",
                "deepseek_v31",
                "deepseek_v32",
                "deepseek_v4",
                "glm45",
                "glm47",
                "minimax_m2",
                "step3",
                "step3p5",
                "olmo3",
            ),
            *("mimo", "holo2", "nemotron_v3", "poolside_v1", "ling3"),
        ),
        "think",
    ),
    **{"ernie45": "think_response", "hunyuan_a13b": "think_answer", "hunyuan": "think_answer"},
    **dict.fromkeys(("gpt_oss", "gpt-oss", "openai"), "openai_gptoss"),
    **dict.fromkeys(("cohere", "command_r", "command-r"), "cohere_command3"),
}
# vLLM's names of formats that are not in the tables.
VLLM_FORMATS = frozenset(
    {
        *("apertus", "cohere_command4", "hy_v3", "inkling", "kimi_k3", "minicpm5", "minimax_m3", "solar_open2"),
        "minimax_m2_append_think",
    }
)
TOOL_NAMES = tuple(sorted({*TOOL_FORMATS, *TOOL_ALIASES}))
REASONING_NAMES = tuple(sorted({*REASONING_FORMATS, *REASONING_ALIASES}))


@dataclass(frozen=True)
class AnswerFormat:
    """Format of one model's answers. None: the model writes no calls, or no reasoning, of a known form."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def is_plain(self) -> bool:
        return self.tools is None and self.reasoning is None

    @property
    def is_harmony(self) -> bool:
        by_tools = self.tools is not None and self.tools.arguments == "harmony"
        return by_tools or (self.reasoning is not None and self.reasoning.name == "openai_gptoss")

    def texts(self) -> frozenset[str]:
        """All markers, for looking them up among special tokens."""
        found: frozenset[str] = frozenset() if self.tools is None else self.tools.texts()
        if self.reasoning is not None:
            found |= {*self.reasoning.open, *self.reasoning.close, *self.reasoning.answer} - {""}
        return found | TOOL_FORMATS["openai"].texts() if self.is_harmony else found


def tool_format(name: str) -> ToolFormat:
    """Return the row of this name, which may be one of vLLM's."""
    return _find("tool_call_parser", name, TOOL_FORMATS, TOOL_ALIASES)


def reasoning_format(name: str) -> ReasoningFormat:
    return _find("reasoning_parser", name, REASONING_FORMATS, REASONING_ALIASES)


def _find(setting: str, name: str, rows: Mapping[str, Row], aliases: Mapping[str, str]) -> Row:
    found = rows.get(aliases.get(name, name))
    if found is None:
        known = ", ".join(sorted({*rows, *aliases}))
        raise ConfigError(f"{setting}={name!r} is not a known format; known are {known}, auto and none.")
    return found
