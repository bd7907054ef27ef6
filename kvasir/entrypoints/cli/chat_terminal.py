"""A chat in a terminal: reads lines with history, and renders replies as markdown while they come."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.padding import Padding
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from kvasir.entrypoints.cli.chat_session import ExitChat, Session
from kvasir.entrypoints.interrupts import delay_interrupts
from kvasir.errors import KvasirError

_FENCE = '"""'
_MAX_HISTORY = 2000  # lines
_INTERRUPTED = 130  # exit status that shells expect after Ctrl-C
_DRAWING_PERIOD = 5  # the rest is drawn at most so often that drawing takes a fifth of the time
_CODE_THEME = "monokai"
_CONTEXT_LINES = 100
_ANY_FENCE = re.compile(r"[ \t]*(?P<fence>`{3,}(?=[^`]*$)|~{3,})(?P<info>.*)")
_FENCE_LINE = re.compile(r"(?P<fence>`{3,}(?=[^`\n]*\n)|~{3,})(?P<info>.*)\n")
_ITEM = re.compile(r"([-*+]|\d{1,9}[.)]) +\S")
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
    """Write text as it comes; in a terminal, render it as markdown.

    What is complete is printed once, and scrolls like any output. Only what may still change is drawn again and again,
    below it. Ctrl-C takes effect between two pieces: in the middle of a control sequence it would spoil the screen.
    What is typed meanwhile is not echoed, because it would move the cursor, but it is read later.
    """
    if not (markdown and console.is_terminal):
        for piece in pieces:
            console.file.write(piece)
            console.file.flush()
        console.file.write("\n")
        return
    with _no_echo():
        _render(console, pieces)


def _render(console: Console, pieces: Iterator[str]) -> None:
    reply, tail = MarkdownReply(), Tail()
    # It has no thread that draws: rich does not keep that apart from what is printed meanwhile.
    live = Live(tail, console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
    due = 0.0
    try:
        with _interrupts_wait():
            live.start()
        for piece in pieces:
            with _interrupts_wait():
                complete = reply.add(piece)
                began = time.perf_counter()
                if not complete and began < due:
                    continue
                tail.shown = reply.rest()
                if complete:
                    console.print(Group(*complete))  # draws the rest, too
                else:
                    live.refresh()
                due = began + _DRAWING_PERIOD * (time.perf_counter() - began)
    finally:
        with _interrupts_wait():
            tail.shown = Text()
            if complete := reply.end():
                console.print(Group(*complete))
            live.stop()


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keep the terminal from writing what is typed, such as ^C, into what is being drawn."""
    terminal = _own_terminal()
    if terminal is None:
        yield
        return
    import termios

    before = termios.tcgetattr(terminal)
    termios.tcsetattr(terminal, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _own_terminal() -> int | None:
    """The terminal that standard input is, if this process may change it: it would be stopped in the background."""
    try:
        terminal = sys.stdin.fileno()
        return terminal if os.tcgetpgrp(terminal) == os.getpgrp() else None
    except (AttributeError, OSError, ValueError):  # not on Unix, or no terminal
        return None


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C take effect at the end of the block."""
    with delay_interrupts() as check:
        yield
        check()


class Tail:
    """The end of what is to be shown, as much as fits into the window."""

    def __init__(self, shown: RenderableType = "") -> None:
        self.shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.shown, options, pad=False)
        for line in lines[-max(1, options.size.height - 1) :]:
            yield from line
            yield Segment.line()


class Block:
    """Rendered markdown without empty lines around it. HTML is shown as text, because rich would leave it out."""

    def __init__(self, text: str) -> None:
        self._markdown = Markdown(text)
        self._markdown.parsed = _PARSER.parse(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._markdown, options, pad=False)
        shown = [number for number, line in enumerate(lines) if any(map(_is_visible, line))]
        for line in lines[shown[0] : shown[-1] + 1] if shown else []:
            yield from line
            yield Segment.line()


def _is_visible(segment: Segment) -> bool:
    return bool(segment.text.strip()) or (segment.style is not None and segment.style.bgcolor is not None)


class MarkdownReply:
    """Divides a markdown text that comes in pieces into parts that are complete and a rest that may still change.

    A part is a block, an item of a list, or some lines of a code block. The parts do not depend on the pieces.
    """

    def __init__(self) -> None:
        self._text = ""  # what is not in a part yet, without a code block's lines
        self._code: CodeLines | None = None
        self._begun = False  # whether there was a part
        self._gap = False  # whether an empty line comes before the next part

    def add(self, piece: str) -> list[RenderableType]:
        """Add a piece and return the parts that it completes."""
        self._text += piece
        parts: list[RenderableType] = []
        while True:
            if self._code is not None:
                closed, self._text = self._code.take(self._text)
                parts += self._code.next_part(closed)
                if not closed:
                    return parts
                self._code = None
            elif opener := _FENCE_LINE.match(self._text):
                parts += [Text()] if self._begun else []
                self._code = CodeLines(opener["fence"], opener["info"].strip().partition(" ")[0])
                self._text = self._text[opener.end() :]
                self._gap = self._begun = True
            elif cut := first_block(self._text):
                parts += self._block(self._text[:cut])
                self._text = self._text[cut:]
            else:
                return parts

    def rest(self) -> RenderableType:
        """What comes after the last part, as far as it is known."""
        if self._code is not None:
            return self._code.rest(self._text)
        return Group(*self._empty_line(), Block(self._text)) if self._text.strip() else Text()

    def end(self) -> list[RenderableType]:
        """The last parts: nothing more comes."""
        if self._code is None:
            return self._block(self._text) if self._text.strip() else []
        self._code.take(self._text + "\n")
        return self._code.next_part(True)

    def _block(self, text: str) -> list[RenderableType]:
        if not text.strip():
            return []
        parts = [*self._empty_line(), Block(text)]
        self._gap, self._begun = not text.splitlines()[-1].strip(), True
        return parts

    def _empty_line(self) -> list[RenderableType]:
        return [Text()] if self._gap else []


class CodeLines:
    """A code block: its lines are shown as they are complete."""

    def __init__(self, fence: str, language: str) -> None:
        self._fence = fence
        self._language = language or "text"
        self._lines: list[str] = []
        self._num_shown = 0
        self._begun = False  # whether a part has been shown, and with it the margin at the top

    def take(self, text: str) -> tuple[bool, str]:
        """Take complete lines from a text. Returns whether the block is closed, and the text after it or after them."""
        *lines, rest = text.split("\n")
        for number, line in enumerate(lines):
            fence = line.strip()
            if len(fence) >= len(self._fence) and set(fence) == set(self._fence) and not line.startswith(" " * 4):
                return True, "\n".join([*lines[number + 1 :], rest])
            self._lines.append(line)
        return False, rest

    def next_part(self, closed: bool) -> list[RenderableType]:
        """The lines that are not shown yet. Empty lines wait for another line: at the end, they are left out."""
        while closed and self._lines and not self._lines[-1].strip() and len(self._lines) > self._num_shown:
            self._lines.pop()
        end = len(self._lines)
        while end > self._num_shown and not self._lines[end - 1].strip():
            end -= 1
        if end == self._num_shown and not closed:
            return []
        part = self._render(self._lines[:end], bottom=closed)
        self._num_shown, self._begun = end, True
        return [part]

    def rest(self, text: str) -> RenderableType:
        """The lines that are not shown yet, and the beginning of the next one."""
        lines = [*self._lines, *([text] if text.strip() else [])]
        return self._render(lines, bottom=True)

    def _render(self, lines: list[str], bottom: bool) -> RenderableType:
        # Lines before the new ones are highlighted with them, because a text or a comment may have begun there.
        first = max(0, self._num_shown - _CONTEXT_LINES)
        margins = (int(not self._begun), 1, int(bottom), 1)
        if len(lines) == self._num_shown:  # only margins
            background = Syntax.get_theme(_CODE_THEME).get_background_style()
            return Padding(Text(), (margins[0] + margins[2] - 1, 0, 0, 0), style=background)
        return Syntax(
            "\n".join(lines[first:]),
            self._language,
            theme=_CODE_THEME,
            word_wrap=True,
            padding=margins,
            line_range=(self._num_shown - first + 1, len(lines) - first),
        )


def first_block(text: str) -> int:
    """Length of the text's first block, or item of a list, if it is complete: its rendering cannot change any more.

    It ends before the first line that begins another. Such a line is not indented, and stands outside of code blocks:
    after an empty line, as the first line of a code block, or as an item of a list without empty lines.
    """
    at, fence, before, is_list = 0, "", "", _ITEM.match(text) is not None
    for line in text.splitlines(keepends=True):
        found = _ANY_FENCE.match(line) if line.endswith("\n") else None
        if fence:
            closes = found is not None and found["fence"].startswith(fence) and not found["info"].strip()
            fence = "" if closes else fence
        elif at and not line[0].isspace() and (not before.strip() or found or (is_list and _ITEM.match(line))):
            return at
        elif found is not None:
            fence = found["fence"]
        at, before = at + len(line), line
    return 0
