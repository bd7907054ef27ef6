"""A chat: its messages, sampling parameters, commands and statistics. Knows neither terminal nor model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from kvasir.entrypoints.cli.chat_backend import AnswerUsage, Backend, Message
from kvasir.errors import KvasirError, did_you_mean
from kvasir.sampling_params import SamplingParams

PARAMETERS = {
    "temperature": "0 always selects the most likely token",
    "max_tokens": "maximum number of tokens in a reply",
    "top_p": "sample from the most likely tokens with this total probability",
    "top_k": "sample from this many of the most likely tokens",
    "min_p": "minimum probability, as a fraction of that of the most likely token",
    "repetition_penalty": "above 1 discourages repeated tokens",
    "presence_penalty": "above 0 discourages repeated tokens",
    "frequency_penalty": "above 0 discourages frequent tokens",
    "seed": "the same seed gives the same reply",
    "stop": 'stop sequence, or a list of them: ["a", "b"]',
}
HELP = """\
/system TEXT      set the system prompt; without TEXT, show it
/reset            delete all messages
/again            generate the last reply again
/params           show the sampling parameters
/params NAME=VALUE …   set some; NAME= resets one
/stats            show token counts and times
/exit             exit, like Ctrl-D
End a line with \\ to continue in the next one, or put several lines between two lines of \"\"\".
Ctrl-C stops a reply."""


class ExitChat(Exception):
    """The user wants to exit."""


@dataclass(slots=True)
class ChatStats:
    """Statistics of the last reply and of all replies."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0  # from first to last token
    last: str = ""

    def add(self, usage: AnswerUsage, began: float, first: float, ended: float) -> None:
        self.answers += 1
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.output_tokens += usage.output
        self.seconds += ended - first
        rate = f", {(usage.output - 1) / (ended - first):.1f} tokens/s" if usage.output > 1 and ended > first else ""
        cut = ", cut at max_tokens" if usage.finish_reason == "length" else ""
        self.last = f"{usage.output} tokens, first after {1000 * (first - began):.0f} ms{rate}{cut}"

    def lines(self) -> list[str]:
        if not self.answers:
            return ["no reply yet"]
        rate = f", {self.output_tokens / self.seconds:.1f} tokens/s" if self.seconds else ""
        return [
            f"last reply: {self.last}",
            f"all {self.answers} replies: {self.output_tokens} tokens{rate}; {self.prompt_tokens} prompt tokens, "
            f"{self.cached_tokens} of them cached",
        ]


@dataclass
class Session:
    backend: Backend
    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)  # sampling parameters, by their names in the API
    messages: list[Message] = field(default_factory=list)
    stats: ChatStats = field(default_factory=ChatStats)

    # ------------------------------------------------------------ messages

    def ask(self, text: str) -> Generator[str, None, None]:
        """Send a message and stream the reply. If the caller stops early, the partial reply is kept; without any
        text, the message is removed again."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        began, first, usage = time.perf_counter(), 0.0, None
        try:
            for piece in self.backend.answer(self._all_messages(), self.params):
                if isinstance(piece, AnswerUsage):
                    usage = piece
                elif piece:
                    first = first or time.perf_counter()
                    pieces.append(piece)
                    yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()
            if usage is not None and first:
                self.stats.add(usage, began, first, time.perf_counter())

    def _all_messages(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)

    # ------------------------------------------------------------ commands

    def command(self, line: str) -> tuple[str, str | None]:
        """Run a command. Returns the text to show, and a message to send if the command asks for one."""
        name, _, rest = line.strip().partition(" ")
        commands: dict[str, Callable[[str], tuple[str, str | None]]] = {
            "/help": lambda _: (HELP, None),
            "/system": self._system,
            "/reset": self._reset,
            "/again": self._again,
            "/params": self._params,
            "/stats": lambda _: ("\n".join([*self.stats.lines(), *self.backend.describe()]), None),
            "/exit": self._exit,
        }
        aliases = {"/?": "/help", "/quit": "/exit", "/bye": "/exit", "/clear": "/reset", "/regenerate": "/again"}
        name = aliases.get(name, name)
        if name not in commands:
            return f"{name} is not a command.{did_you_mean(name, commands)} /help lists them.", None
        return commands[name](rest.strip())

    def _system(self, text: str) -> tuple[str, str | None]:
        if not text:
            return f"system prompt: {self.system or 'none'}", None
        self.system = "" if text in ('""', "none") else text
        return "system prompt " + ("set" if self.system else "removed"), None

    def _reset(self, _: str) -> tuple[str, str | None]:
        self.messages.clear()
        return "all messages deleted", None

    def _again(self, _: str) -> tuple[str, str | None]:
        if not self.messages:
            return "there is no message yet", None
        while self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        return "", self.messages.pop()["content"]

    def _params(self, text: str) -> tuple[str, str | None]:
        changed: dict[str, Any] = {}
        starts = [found.start() for found in re.finditer(r"(?<!\S)\w+=", text)]  # a value may contain spaces
        if text and (not starts or starts[0]):
            name = text.split("=")[0].split()[0]
            if name in PARAMETERS:
                return f"Set {name} as {name}=VALUE; it is {self.params.get(name, 'the default')} now.", None
            return f"{name} is not a parameter.{did_you_mean(name, PARAMETERS)} Set parameters as NAME=VALUE.", None
        for start, end in zip(starts, [*starts, len(text)][1:], strict=True):
            name, _, value = text[start:end].strip().partition("=")
            if name not in PARAMETERS:
                return f"{name} is not a parameter.{did_you_mean(name, PARAMETERS)} Set parameters as NAME=VALUE.", None
            changed[name] = _value(value)
        params = {name: value for name, value in {**self.params, **changed}.items() if value is not None}
        try:
            SamplingParams(**params)
        except (KvasirError, TypeError) as error:
            return str(error), None
        self.params = params
        width = max(map(len, PARAMETERS))
        shown = [f"{name:{width}}  {self.params.get(name, 'default')!s:8} {why}" for name, why in PARAMETERS.items()]
        return "\n".join(shown), None

    def _exit(self, _: str) -> tuple[str, str | None]:
        raise ExitChat


def _value(text: str) -> Any:
    """Parse a value as JSON, or take it as text; None if it is empty."""
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text
