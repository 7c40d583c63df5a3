"""Keys, as they are pressed."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
