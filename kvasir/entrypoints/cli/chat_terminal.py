"""A chat in a terminal: reads lines with history, and renders replies as markdown while they come."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from kvasir.entrypoints.cli.chat_session import ExitChat, Session
from kvasir.errors import KvasirError

_FENCE = '"""'
_MAX_HISTORY = 2000  # lines
_INTERRUPTED = 130  # exit status that shells expect after Ctrl-C
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


def run_chat(session: Session, console: Console, markdown: bool = True) -> int:
    """Chat until the user exits. Returns the exit status."""
    console.print(f"[bold]{session.backend.name}[/]  [dim]/help lists commands, Ctrl-D exits[/]", highlight=False)
    with _history():
        while True:
            try:
                text = read(console)
                _handle(session, console, text, markdown)
            except (EOFError, ExitChat):
                console.print()
                return 0
            except KeyboardInterrupt:
                console.print("[dim]Ctrl-D exits[/]")


def _handle(session: Session, console: Console, text: str, markdown: bool) -> None:
    question: str | None = text
    if text.startswith("/"):
        shown, question = session.command(text)
        if shown:
            console.print(shown, style="dim", markup=False, highlight=False)
    if question and question.strip():
        ask(session, console, question, markdown)


def ask(session: Session, console: Console, question: str, markdown: bool) -> int:
    """Send a message and show the reply or the error. Returns an exit status."""
    try:
        with closing(session.ask(question)) as pieces:
            write(console, pieces, markdown)
        return 0
    except KeyboardInterrupt:
        console.print("[dim]stopped[/]")
        return _INTERRUPTED
    except KvasirError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1


# ---------------------------------------------------------------- input


def read(console: Console) -> str:
    """Read a message: a line, lines that end with a backslash, or lines between fences."""
    line = input("> " if console.is_terminal else "")
    if line.strip() == _FENCE:
        return "\n".join(iter(lambda: input(_more(console)), _FENCE))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(_more(console)))
    return "\n".join(lines)


def _more(console: Console) -> str:
    return ". " if console.is_terminal else ""


class _history:
    """Keeps the history of input lines, if readline is available."""

    def __enter__(self) -> None:
        try:
            import readline
        except ImportError:
            return
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvasir"
        self.file = folder / "chat_history"
        with suppress(OSError):
            readline.read_history_file(self.file)
        readline.set_history_length(_MAX_HISTORY)

    def __exit__(self, *_: object) -> None:
        if not sys.stdin.isatty() or not hasattr(self, "file"):
            return
        import readline

        with suppress(OSError):  # the history is optional
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(self.file)
            self.file.chmod(0o600)


# ---------------------------------------------------------------- output


def write(console: Console, pieces: Iterator[str], markdown: bool) -> None:
    """Write text as it comes; in a terminal, render it as markdown paragraph by paragraph."""
    if not (markdown and console.is_terminal):
        for piece in pieces:
            console.file.write(piece)
            console.file.flush()
        console.file.write("\n")
        return
    rest = ""
    with Live(console=console, refresh_per_second=12, transient=True, vertical_overflow="crop") as live:
        try:
            for piece in pieces:
                rest += piece
                if cut := finished_until(rest):
                    live.console.print(rendered(rest[:cut]))
                    rest = rest[cut:]
                live.update(rendered(rest))
        finally:
            live.update("")
            if rest.strip():
                live.console.print(rendered(rest))


def rendered(text: str) -> Markdown:
    """Render markdown with HTML as plain text, because rich would leave the HTML out."""
    made = Markdown(text)
    made.parsed = _PARSER.parse(text)
    return made


def finished_until(text: str) -> int:
    """Length of the text whose rendering cannot change: up to the last empty line outside of a code block."""
    cut, at, inside = 0, 0, False
    for line in text.splitlines(keepends=True):
        at += len(line)
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not line.strip() and line.endswith("\n") and not inside:
            cut = at
    return cut
