"""An answer as it comes, and what it took."""

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from ..cli.client import StreamEvent
from ..errors import ClientError
from ..terminal.console import moves, spinner
from ..terminal.keys import without_echo
from ..terminal.phases import REFRESH
from ..terminal.sizes import share
from .conversation import Conversation
from .word_wrap import WordWrap

_KEPT = "\n\t"


async def print_answer(conversation: Conversation, text: str, console: Console) -> None:
    """Say something, and print the answer on standard output as it comes.

    On a terminal a spinner turns until it begins, words are wrapped, control codes are escaped,
    what is typed is not shown, and a line on standard error says at the end what it took.

    Raises:
        ClientError: the daemon refused or failed.
    """
    on_terminal = console.is_terminal and sys.stdout.isatty()
    measured, writer = Measured(), _terminal_writer if on_terminal else _plain_writer
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
    """Write an answer as it is."""
    yield _write


@contextmanager
def _terminal_writer(console: Console) -> Iterator[Callable[[str], None]]:
    """Write an answer so that it can be read, and does nothing to the terminal."""
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
    """End the line of an answer: what follows it, an error or a shell's prompt, has its own."""
    _write("\n")


class Measured:
    """What an answer took, as its reader sees it."""

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._first: float | None = None
        self._last = self._asked_at
        self._usage: dict[str, Any] | None = None
        self.cut_off = False
        """The answer has as many tokens as it may have, and did not end by itself."""

    def add(self, event: StreamEvent) -> None:
        """Take a part of the answer."""
        self._usage = event.usage or self._usage
        self.cut_off = self.cut_off or event.finish == "length"
        if event.text:
            self._last = time.monotonic()
            self._first = self._last if self._first is None else self._first

    @property
    def began(self) -> bool:
        """Whether any of the answer has come."""
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
