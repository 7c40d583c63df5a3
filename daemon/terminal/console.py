"""The terminal: rich's console on it, and its keys."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

_LOCAL_MODES = 3  # their place in the list of a terminal's attributes


def standard_error() -> Console | None:
    """Make a console on standard error; None if that is no terminal.

    NO_COLOR and TERM=dumb are heeded by rich itself.
    """
    if not sys.stderr.isatty():
        return None
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def spinner(console: Console) -> str:
    """Name a spinner that the terminal's encoding has the characters of."""
    return "line" if console.options.ascii_only else "dots"


def moves(console: Console) -> bool:
    """Return True if lines can be redrawn in place; with TERM=dumb they cannot."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def pressed(call: Callable[[str], object]) -> Iterator[None]:
    """Call a function with each key while a block lasts; nothing is echoed.

    Ctrl-C stays a signal. The terminal is restored at the end. Without a terminal there are no
    calls.
    """
    if not sys.stdin.isatty():
        yield
        return
    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in os.read(source, 64).decode(errors="replace"):
            call(key)

    try:
        tty.setcbreak(source)
        loop.add_reader(source, read)
        yield
    finally:
        loop.remove_reader(source)
        termios.tcsetattr(source, termios.TCSAFLUSH, before)


@contextmanager
def without_echo() -> Iterator[None]:
    """Turn the terminal's echo off while a block lasts; what is typed is read afterwards.

    Ctrl-C does not discard it. Without a terminal nothing changes.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    quiet = list(before)
    quiet[_LOCAL_MODES] = before[_LOCAL_MODES] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(source, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
