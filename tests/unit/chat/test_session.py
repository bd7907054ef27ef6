"""A conversation without a terminal and without a model: what is remembered, what commands do, what is shown."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import pytest
from rich.console import Console

from kvasir.entrypoints.cli import chat_terminal
from kvasir.entrypoints.cli.chat_backend import AnswerUsage, Message, Piece
from kvasir.entrypoints.cli.chat_session import ExitChat, Session
from kvasir.entrypoints.cli.chat_terminal import MarkdownReply, Tail, first_block, read, write
from kvasir.errors import RequestError


class Parrot:
    """Says what was said last, word by word."""

    name = "parrot"

    def __init__(self) -> None:
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []
        self.closed_early = False

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Iterator[Piece]:
        self.asked.append((list(messages), dict(params)))
        if messages[-1]["content"] == "fail":
            raise RequestError("that was too much")
        words = messages[-1]["content"].split()
        try:
            for word in words:
                yield f"{word} "
            yield AnswerUsage(10, 4, len(words), "stop")
        except GeneratorExit:
            self.closed_early = True
            raise

    def describe(self) -> list[str]:
        return ["a bird"]

    def close(self) -> None:
        pass


@pytest.fixture
def session() -> Session:
    return Session(Parrot())


def roles(session: Session) -> list[str]:
    return [message["role"] for message in session.messages]


def test_the_conversation_is_sent_whole(session: Session) -> None:
    session.system = "You are a bird."
    assert "".join(session.ask("good morning")) == "good morning "
    assert "".join(session.ask("and good night")) == "and good night "
    sent, params = session.backend.asked[1]  # type: ignore[attr-defined]
    assert [message["content"] for message in sent] == [
        "You are a bird.",
        "good morning",
        "good morning ",
        "and good night",
    ]
    assert params == {}


def test_an_answer_that_is_stopped_is_kept_and_a_failed_question_is_not(session: Session) -> None:
    pieces = session.ask("one two three")
    assert next(pieces) == "one "
    pieces.close()
    assert session.backend.closed_early  # type: ignore[attr-defined]
    assert session.messages[-1] == {"role": "assistant", "content": "one "}
    with pytest.raises(RequestError):
        list(session.ask("fail"))
    assert roles(session) == ["user", "assistant"]


def test_system_reset_again(session: Session) -> None:
    list(session.ask("one"))
    assert session.command("/system Be brief.") == ("system prompt set", None)
    assert session.command("/system")[0] == "system prompt: Be brief."
    assert session.command("/again") == ("", "one")
    assert session.messages == []
    list(session.ask("one"))
    session.command("/reset")
    assert session.messages == [] and session.system == "Be brief."
    assert session.command("/again") == ("there is no message yet", None)
    session.command("/system none")
    assert session.system == ""


def test_params(session: Session) -> None:
    shown, _ = session.command('/params temperature=0.5 stop=["a","b"] seed=7')
    assert session.params == {"temperature": 0.5, "stop": ["a", "b"], "seed": 7}
    assert "temperature         0.5" in shown
    session.command("/params seed= stop=END")
    assert session.params == {"temperature": 0.5, "stop": "END"}
    session.command('/params seed=3 stop=["a b", "c"] top_p=0.5')
    assert session.params == {"temperature": 0.5, "stop": ["a b", "c"], "seed": 3, "top_p": 0.5}
    shown, _ = session.command("/params top_p=7")
    assert "top_p" in shown and session.params["top_p"] == 0.5, "a value that no question could be asked with"
    shown, _ = session.command("/params")
    assert "temperature         0.5" in shown
    shown, _ = session.command("/params top_p 0.7")
    assert shown == "Set top_p as top_p=VALUE; it is 0.5 now." and session.params["top_p"] == 0.5
    shown, _ = session.command("/params hot")
    assert shown.startswith("hot is not a parameter.")
    shown, _ = session.command("/params temprature=1")
    assert "Did you mean temperature?" in shown and session.params["temperature"] == 0.5


def test_stats(session: Session) -> None:
    assert session.command("/stats")[0].startswith("no reply yet")
    list(session.ask("one two three"))
    shown, _ = session.command("/stats")
    assert "last reply: 3 tokens" in shown and "10 prompt tokens, 4 of them cached" in shown and "a bird" in shown


def test_commands_that_do_not_exist_and_leaving(session: Session) -> None:
    assert "Did you mean /stats?" in session.command("/stat")[0]
    assert "/system TEXT" in session.command("/help")[0]
    with pytest.raises(ExitChat):
        session.command("/exit")


# ---------------------------------------------------------------- the terminal


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["hello"], "hello"),
        (["a \\", "b\\", "c"], "a \nb\nc"),
        (['"""', "def f():", "", "    return 1", '"""'], "def f():\n\n    return 1"),
    ],
)
def test_messages_of_several_lines(typed: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(typed)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert read(Console(file=io.StringIO())) == expected
    assert list(lines) == []


def test_paragraphs_are_finished_but_code_is_not() -> None:
    for text, first in {
        "one\n\ntwo": "one\n\n",
        "one": "",
        "one\n\n": "",  # what follows may belong to it
        "a\n```\nx": "a\n",
        "a\n``": "",
        "- a\n- b": "- a\n",
        "- a\n  ```\n- x\n\ny": "",
        "- a\n  ```\n- x\n  ```\n- b": "- a\n  ```\n- x\n  ```\n",
        "- a\n\n  more\n\nb": "- a\n\n  more\n\n",
        "a\n- b": "",
    }.items():
        assert text[: first_block(text)] == first, text


def test_markdown_on_a_terminal_is_rendered_once() -> None:
    window = Window()
    write(window.console, iter(["# Ti", "tle\n\nsome **bo", "ld** text\n\n", "- one\n- two"]), markdown=True)
    lines = window.texts()
    assert [line for line in lines if "bold" in line] == ["some bold text"]
    assert sum("Title" in line for line in lines) == 1 and "#" not in "".join(lines)
    assert "• one" in lines and "• two" in lines


def test_html_is_text() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, color_system=None, legacy_windows=False)
    write(console, iter(["<script>alert(1)</script>\n\n<b>x</b> & y\n"]), markdown=True)
    assert "<script>alert(1)</script>" in out.getvalue() and "<b>x</b> & y" in out.getvalue()


class Window:
    """A terminal window: what was written to it, as its user sees it."""

    def __init__(self, width: int = 40, height: int = 10) -> None:
        self.height = height
        self.lines = [""]  # those above the window, too
        self.row = 0
        self.column = 0
        self.cursor_visible = True
        self.num_writes = 0
        self._pending = ""  # the beginning of a control sequence
        self.on_write: Callable[[int], None] | None = None
        self.console = Console(
            file=cast(Any, self),
            force_terminal=True,
            width=width,
            height=height,
            color_system=None,
            legacy_windows=False,
        )

    def write(self, text: str) -> None:
        """Half of it is written before something may interrupt the rest."""
        self.num_writes += 1
        half = len(text) // 2
        for part in (text[:half], text[half:]):
            self._write(part)
            if self.on_write is not None:
                self.on_write(self.num_writes)

    def _write(self, text: str) -> None:
        self._pending += text
        for part in re.findall(r"\x1b\[[0-9?;]*[A-Za-z]|\x1b[^A-Za-z]*$|[\r\n]|[^\x1b\r\n]+", self._pending):
            if part.startswith("\x1b") and not part[-1].isalpha():
                self._pending = part
                return
            self._apply(part)
        self._pending = ""

    def _apply(self, part: str) -> None:
        if part == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif part == "\r":
            self.column = 0
        elif part == "\x1b[2K":
            self.lines[self.row] = ""
        elif part == "\x1b[1A":
            assert self.row > len(self.lines) - self.height, "the cursor cannot leave the window"
            self.row -= 1
        elif part in ("\x1b[?25l", "\x1b[?25h"):
            self.cursor_visible = part.endswith("h")
        else:
            assert not part.startswith("\x1b"), part
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
            self.column += len(part)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True

    def texts(self) -> list[str]:
        return [line.strip() for line in self.lines if line.strip()]


CODE = [f"print({i})" for i in range(60)]
TALL = "Here it is:\n```python\n" + "\n".join(CODE) + "\n```\nThat was it."


def words(text: str) -> list[str]:
    return re.findall(r"\s*\S+\s?", text)


def test_code_taller_than_the_window_streams() -> None:
    window = Window()

    def pieces() -> Iterator[str]:
        yield "Here it is:\n```python\n"
        for number, line in enumerate(CODE):
            yield line[:3]
            yield line[3:] + "\n"
            shown = window.texts()
            assert shown == ["Here it is:", *CODE[: number + 1]], "every complete line is seen at once"
        yield "```\nThat was it."

    write(window.console, pieces(), markdown=True)
    assert window.texts() == ["Here it is:", *CODE, "That was it."]
    assert window.cursor_visible and window.column == 0


LONG = {
    "list": "\n".join(f"- item {i}" for i in range(40)),
    "numbers": "\n".join(f"{i}. item" for i in range(1, 40)),
    "paragraph": " ".join(f"word{i}" for i in range(300)),
    "table": "| a | b |\n|---|---|\n" + "\n".join(f"| row {i} | {'x' * (i % 7)} |" for i in range(40)),
    "quote": "\n".join(f"> line {i}" for i in range(200)),
    "nested code": "1. do\n   ```sh\n" + "\n".join(f"   ls {i}" for i in range(40)) + "\n   ```\n2. done",
    "fences": "````md\n```\nx\n```\n" + "y\n" * 40 + "````\n~~~\n```\n~~~\n``` `x` ```\nend",
    "code": TALL,
}


@pytest.mark.parametrize("kind", LONG)
def test_blocks_taller_than_the_window(kind: str) -> None:
    """They are shown once and in whole, however they are cut into pieces; meanwhile their end is seen."""
    text = LONG[kind]
    whole = Window()
    write(whole.console, iter([text]), markdown=True)
    expected = whole.texts()
    assert len(expected) > 30
    for cut in (words, list):
        window = Window()
        write(window.console, iter(cut(text)), markdown=True)
        assert window.texts() == expected
    reply, seen = MarkdownReply(), Window()
    for piece in words(text):
        for part in reply.add(piece):
            seen.console.print(part)
    before = len(seen.lines)
    seen.console.print(Tail(reply.rest()))
    assert len(seen.lines) - before <= seen.height, "the rest fits into the window"
    assert expected[-1] in " ".join(seen.texts()[-seen.height :])


@pytest.fixture
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_inside_of_code() -> None:
    """At any time: the screen shows what came until then, once, and the cursor is where it belongs."""
    text = TALL.replace("\n".join(CODE[12:]), "")
    at = 1
    while (window := interrupted(text, at)) is not None:
        assert window.cursor_visible and window.column == 0
        window.console.print("stopped")
        assert window.texts()[-1] == "stopped"
        at += 1
    assert at > 12, "the interrupt came in every write"


def interrupted(text: str, at: int) -> Window | None:
    """A window after a reply that Ctrl-C ends in the write of this number; None if there are fewer."""
    window, given = Window(height=6), []

    def pieces() -> Iterator[str]:
        for word in words(text):
            given.append(word)
            yield word

    def interrupt(number: int) -> None:
        if number == at:
            window.on_write = None
            signal.raise_signal(signal.SIGINT)

    window.on_write = interrupt
    try:
        write(window.console, pieces(), markdown=True)
        return None
    except KeyboardInterrupt:
        expected = Window(height=6)
        write(expected.console, iter(["".join(given)]), markdown=True)
        assert window.texts() == expected.texts(), f"interrupted in write {at}"
        return window


DRAWING = """
import itertools, time
from rich.console import Console
from kvasir.entrypoints.cli.chat_terminal import write
pieces = ("```\\n" if number == 0 else f"line {number}\\n" for number in itertools.count() if not time.sleep(0.005))
try:
    write(Console(force_terminal=True, width=40, height=6), pieces, markdown=True)
except KeyboardInterrupt:
    print("stopped")
"""


def test_typing_is_not_echoed_into_a_reply() -> None:
    """It would move the cursor, from which the reply's last lines are drawn again."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", DRAWING])
    shown = b""

    def read_until(end: bytes) -> None:
        nonlocal shown
        while end not in shown:
            assert select.select([terminal], [], [], 30)[0], shown
            shown += os.read(terminal, 4096)

    try:
        read_until(b"line 20")
        assert not termios.tcgetattr(terminal)[3] & termios.ECHO
        os.write(terminal, b"typed")
        read_until(b"line 30")
        os.write(terminal, b"\x03")
        read_until(b"stopped")
        assert termios.tcgetattr(terminal)[3] & termios.ECHO, "the terminal is as it was"
        assert b"typed" not in shown and b"^C" not in shown
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def plain_console(out: io.StringIO) -> Console:
    """Whatever the environment says of colours and columns."""
    return Console(file=out, force_terminal=False, width=100)


def test_plain_text_where_there_is_no_terminal(session: Session) -> None:
    out = io.StringIO()
    console = plain_console(out)
    assert chat_terminal.ask(session, console, "**one** two", markdown=True) == 0
    assert chat_terminal.ask(session, console, "fail", markdown=True) == 1
    assert out.getvalue() == "**one** two \nthat was too much\n"


def test_a_whole_conversation(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["hello there", "/reset", "", "/again", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    out = io.StringIO()
    assert chat_terminal.run_chat(session, plain_console(out)) == 0
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("parrot") and lines[1] == "hello there "
    assert lines[2:4] == ["all messages deleted", "there is no message yet"]
