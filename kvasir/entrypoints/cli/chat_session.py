"""A conversation: its messages, its parameters, its commands, its figures. Knows neither terminal nor model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from kvasir.config.engine import did_you_mean
from kvasir.entrypoints.cli.chat_backend import Backend, Message, Usage
from kvasir.errors import KvasirError
from kvasir.sampling_params import SamplingParams

PARAMETERS = {
    "temperature": "0 always takes the likeliest token",
    "max_tokens": "longest answer",
    "top_p": "draw from the likeliest tokens that make up this share",
    "top_k": "draw from so many",
    "min_p": "leave out what is less likely than this share of the best",
    "repetition_penalty": "above 1: avoid what was said",
    "presence_penalty": "above 0: avoid what was said",
    "frequency_penalty": "above 0: avoid what was said often",
    "seed": "the same seed gives the same answer",
    "stop": 'text that ends the answer, or a list: ["a", "b"]',
}
HELP = """\
/system TEXT      what the model is told before the chat; alone: show it
/reset            forget the conversation
/again            answer the last question once more
/params           show the sampling parameters
/params NAME=VALUE …   set some; NAME= unsets one
/stats            tokens and times so far
/exit             leave; so does Ctrl-D
End a line with \\ to go on in the next one, or put several between two lines of \"\"\".
Ctrl-C stops an answer."""


class Leave(Exception):
    """The person is done."""


@dataclass(slots=True)
class Figures:
    """Of the last answer, and of all."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0  # of writing, first token to last
    last: str = ""

    def add(self, usage: Usage, began: float, first: float, ended: float) -> None:
        self.answers += 1
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.output_tokens += usage.output
        self.seconds += ended - first
        rate = f", {(usage.output - 1) / (ended - first):.1f} tokens/s" if usage.output > 1 and ended > first else ""
        cut = ", cut at the limit" if usage.finish_reason == "length" else ""
        self.last = f"{usage.output} tokens, first after {1000 * (first - began):.0f} ms{rate}{cut}"

    def lines(self) -> list[str]:
        if not self.answers:
            return ["nothing was answered yet"]
        rate = f", {self.output_tokens / self.seconds:.1f} tokens/s" if self.seconds else ""
        return [
            f"last answer: {self.last}",
            f"all {self.answers}: {self.output_tokens} tokens said{rate}; {self.prompt_tokens} read, "
            f"{self.cached_tokens} of them cached",
        ]


@dataclass
class Session:
    backend: Backend
    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)  # of sampling, by their names in the API
    messages: list[Message] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)

    # ------------------------------------------------------------ talking

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer's text as it comes. Closed early, what was said so far is the answer; if nothing came, or it
        failed, the question is taken back."""
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        began, first, usage = time.perf_counter(), 0.0, None
        try:
            for piece in self.backend.answer(self._whole(), self.params):
                if isinstance(piece, Usage):
                    usage = piece
                elif piece:
                    first = first or time.perf_counter()
                    said.append(piece)
                    yield piece
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self.messages.pop()
            if usage is not None and first:
                self.figures.add(usage, began, first, time.perf_counter())

    def _whole(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)

    # ------------------------------------------------------------ commands

    def command(self, line: str) -> tuple[str, str | None]:
        """What to show, and a question to ask, if the command means one."""
        name, _, rest = line.strip().partition(" ")
        commands: dict[str, Callable[[str], tuple[str, str | None]]] = {
            "/help": lambda _: (HELP, None),
            "/system": self._system,
            "/reset": self._reset,
            "/again": self._again,
            "/params": self._params,
            "/stats": lambda _: ("\n".join([*self.figures.lines(), *self.backend.describe()]), None),
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
        return "the conversation is forgotten", None

    def _again(self, _: str) -> tuple[str, str | None]:
        if not self.messages:
            return "nothing was asked yet", None
        while self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        return "", self.messages.pop()["content"]

    def _params(self, text: str) -> tuple[str, str | None]:
        changed: dict[str, Any] = {}
        starts = [found.start() for found in re.finditer(r"(?<!\S)\w+=", text)]  # a value may have spaces in it
        if text and (not starts or starts[0]):
            name = text.split("=")[0].split()[0]
            return f"{name} is not a parameter.{did_you_mean(name, PARAMETERS)} They are set as NAME=VALUE.", None
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            name, _, value = text[start:end].strip().partition("=")
            if name not in PARAMETERS:
                return f"{name} is not a parameter.{did_you_mean(name, PARAMETERS)} They are set as NAME=VALUE.", None
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
        raise Leave


def _value(text: str) -> Any:
    """A number or list as JSON has it, else the text; None for nothing."""
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text
