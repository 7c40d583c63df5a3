"""Keys, as they are pressed."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOCAL = 3
"""The place of the local modes in the list of a terminal's attributes."""


@contextmanager
def pressed(call: Callable[[str], object]) -> Iterator[None]:
    """Call a function with each key for as long as a block lasts; nothing is echoed.

    Ctrl-C stays a signal. Afterwards the terminal is as it was. Without one nothing is called.
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
    """Have the terminal not show what is typed while a block lasts; it is read afterwards.

    Ctrl-C does not throw it away. Without a terminal nothing changes.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    quiet = list(before)
    quiet[_LOCAL] = before[_LOCAL] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(source, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
