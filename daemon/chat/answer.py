"""An answer on standard output: words, line breaks, and the time it took."""

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from ..cli.client import StreamEvent
from ..errors import ClientError
from ..quoting import share
from ..terminal.console import moves, spinner, without_echo
from ..terminal.display import REFRESH
from .conversation import Conversation

_KEPT = "\n\t"
_TAB = 8


async def print_answer(conversation: Conversation, text: str, console: Console) -> None:
    """Send a message, and print the answer on standard output as it comes.

    On a terminal a spinner turns until it begins, words are wrapped, control codes are escaped,
    typed keys are not shown, and a line on standard error has its tokens and times.

    Raises:
        ClientError: the daemon refused or failed.
    """
    on_terminal = console.is_terminal and sys.stdout.isatty()
    measured, writer = _Measured(), _terminal_writer if on_terminal else _plain_writer
    try:
        with (
            writer(console) as show,
            _spinner(console, turns=on_terminal and moves(console)) as live,
        ):
            async for event in conversation.say(text):
                measured.add(event)
                if event.text:
                    live.stop()
                    show(event.text)
    except ClientError:
        if measured.began:
            end_line()
        raise
    end_line()
    if on_terminal:
        console.print(str(measured), style="dim")
    if measured.cut_off:
        most = conversation.options.max_tokens
        console.print(f"cut off after {most} tokens; --max-tokens allows more", style="yellow")


@contextmanager
def _plain_writer(_: Console) -> Iterator[Callable[[str], None]]:
    yield _write


@contextmanager
def _terminal_writer(console: Console) -> Iterator[Callable[[str], None]]:
    """Wrap words, and escape control codes, which the terminal would obey."""
    wrap = WordWrap(lambda: console.width)
    with without_echo():
        try:
            yield lambda text: _write(wrap.add(harmless(text)))
        finally:
            _write(wrap.end())


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def end_line() -> None:
    """End the line of an answer, before an error or a shell's prompt."""
    _write("\n")


class _Measured:
    """Tokens and times of an answer, as its reader sees them."""

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._first: float | None = None
        self._last = self._asked_at
        self._usage: dict[str, Any] | None = None
        self.cut_off = False  # at the most tokens of an answer

    def add(self, event: StreamEvent) -> None:
        self._usage = event.usage or self._usage
        self.cut_off = self.cut_off or event.finish == "length"
        if event.text:
            self._last = time.monotonic()
            self._first = self._last if self._first is None else self._first

    @property
    def began(self) -> bool:
        return self._first is not None

    def __str__(self) -> str:
        usage = self._usage
        if usage is None:
            return ""
        out, prompt = usage["completion_tokens"], usage["prompt_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        parts = [f"{out} tokens"]
        if self._first is not None:
            if self._last > self._first and out > 1:
                parts.append(f"{(out - 1) / (self._last - self._first):.1f} tokens/s")
            parts.append(f"the first after {self._first - self._asked_at:.2f} s")
        parts.append(f"{share(cached, prompt)} of {prompt} prompt tokens cached")
        return ", ".join(parts)


def harmless(text: str) -> str:
    """Escape the control codes of a text: a terminal would obey them."""
    return "".join(
        c if c in _KEPT or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text
    )


@contextmanager
def _spinner(console: Console, *, turns: bool) -> Iterator[Live]:
    live = Live(
        Spinner(spinner(console), style="dim"),
        console=console,
        refresh_per_second=REFRESH,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    if turns:
        live.start()
    try:
        yield live
    finally:
        live.stop()


class WordWrap:
    """Begins a new line before a word that would not end on this one.

    A word is held back until it is complete; a character of double width, such as a Chinese one, is
    a word of its own. A word that is longer than a line is broken at the line's end.

    Args:
        columns: returns the width of the terminal, which may change.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._blanks = ""
        self._word = ""

    def add(self, text: str) -> str:
        """Add text, and return the complete words."""
        return "".join(piece for character in text for piece in self._take(character))

    def end(self) -> str:
        """Return the last word."""
        return "".join(self._end_word())

    def _take(self, character: str) -> Iterator[str]:
        if character == "\n":
            yield from self._end_word()
            yield character
            self._column, self._blanks = 0, ""
        elif character.isspace():
            yield from self._end_word()
            self._blanks += character
        elif unicodedata.east_asian_width(character) in "WF":
            yield from self._end_word()
            self._word = character
            yield from self._end_word()
        else:
            self._word += character
            if cell_len(self._word) > self._columns():
                yield from self._end_word()
                self._column %= self._columns()  # the terminal breaks the line itself

    def _end_word(self) -> Iterator[str]:
        if not self._word:
            return
        width, after = cell_len(self._word), self._after_blanks()
        if self._column and after + width > self._columns():
            yield "\n"
            after = 0
        else:
            yield self._blanks
        yield self._word
        self._column, self._blanks, self._word = after + width, "", ""

    def _after_blanks(self) -> int:
        column = self._column
        for blank in self._blanks:
            column += _TAB - column % _TAB if blank == "\t" else cell_len(blank)
        return column
