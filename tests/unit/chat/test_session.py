"""A conversation without a terminal and without a model: what is remembered, what commands do, what is shown."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console

from kvasir.entrypoints.cli import chat_terminal
from kvasir.entrypoints.cli.chat_backend import AnswerUsage, Message, Piece
from kvasir.entrypoints.cli.chat_session import ExitChat, Session
from kvasir.entrypoints.cli.chat_terminal import finished_until, read, write
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
    assert finished_until("one\n\ntwo") == len("one\n\n")
    assert finished_until("one") == 0
    assert finished_until("a\n\n```\nx\n\ny\n") == len("a\n\n")
    assert finished_until("a\n\n```\nx\n\ny\n```\n\nb") == len("a\n\n```\nx\n\ny\n```\n\n")


def test_markdown_on_a_terminal_is_rendered_once() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, color_system=None, legacy_windows=False)
    write(console, iter(["# Ti", "tle\n\nsome **bo", "ld** text\n\n", "- one\n- two"]), markdown=True)
    lines = [line.strip() for line in _final_screen(out.getvalue())]
    assert [line for line in lines if "bold" in line] == ["some bold text"]
    assert sum("Title" in line for line in lines) == 1 and "#" not in "".join(lines)
    assert "• one" in lines and "• two" in lines


def test_html_is_text() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, color_system=None, legacy_windows=False)
    write(console, iter(["<script>alert(1)</script>\n\n<b>x</b> & y\n"]), markdown=True)
    assert "<script>alert(1)</script>" in out.getvalue() and "<b>x</b> & y" in out.getvalue()


def _final_screen(written: str) -> list[str]:
    """What is left of it when the control sequences of a live display have done their work."""
    import re

    screen: list[str] = [""]
    for part in re.split(r"(\x1b\[[0-9?;]*[A-Za-z]|\r|\n)", written):
        if part == "\n":
            screen.append("")
        elif part == "\x1b[1A":
            screen.pop()
        elif part in ("\x1b[2K", "\r"):
            screen[-1] = "" if part == "\x1b[2K" else screen[-1]
        elif not part.startswith("\x1b"):
            screen[-1] += part
    return screen


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
