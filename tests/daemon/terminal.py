"""A command in a terminal of its own, and the screen that its user sees."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte

from .command import environment

CTRL_C, CTRL_D = "\x03", "\x04"
COLUMNS, LINES = 120, 60
PATIENCE = 120.0
"""Seconds that what is waited for may take on a busy machine."""

# The terminal becomes the one of its session, so that Ctrl-C is a signal.
_IN_TERMINAL = (
    "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "runpy.run_module('umbel', run_name='__main__', alter_sys=True)"
)
_REPORT = b"\x1b[6n"
"""Asks where the cursor is."""


class Terminal:
    """A pseudo-terminal with one command in it.

    Attributes:
        process: the command.
        screen: what its user sees.
        output: all that was written, byte for byte.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", master: int, inside: int) -> None:
        self.process = process
        self.output = b""
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._master = master
        self._inside = inside

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._master, text.encode())

    def lines(self) -> list[str]:
        """Text of the screen, without blank ends and lines."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def text(self) -> str:
        """The same as one text."""
        return "\n".join(self.lines())

    def wait_for(self, condition: "str | Callable[[], Any]", patience: float = PATIENCE) -> None:
        """Read until a text is on the screen, or a condition holds."""
        holds = condition if callable(condition) else lambda: condition in self.text()
        end = time.monotonic() + patience
        while not holds():
            assert time.monotonic() < end, f"{condition} never came:\n{self.text()}"
            if not self._read(0.1) and self.process.poll() is not None:
                self._read(0.1)
                assert holds(), f"{condition} did not come before the end:\n{self.text()}"

    def wait(self, patience: float = PATIENCE) -> int:
        """Read to the end of the command; give its exit status."""
        self.wait_for(lambda: self.process.poll() is not None, patience)
        while self._read(0.1):
            pass
        return self.process.wait(1)

    def modes(self) -> list[Any]:
        """The terminal's attributes, as termios has them."""
        return termios.tcgetattr(self._inside)

    def _read(self, seconds: float) -> bool:
        """Take what is written within so many seconds; False if nothing is."""
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        piece = os.read(self._master, 65536)
        self.output += piece
        self._stream.feed(piece)
        if _REPORT in piece:  # a terminal answers
            cursor = self.screen.cursor
            os.write(self._master, f"\x1b[{cursor.y + 1};{cursor.x + 1}R".encode())
        return True


def in_terminal(folder: Path) -> dict[str, str]:
    """Build an environment for a terminal with colours, without settings."""
    plain = environment(folder)
    left_out = ("COLUMNS", "LINES", "NO_COLOR")
    return {k: v for k, v in plain.items() if k not in left_out} | {"TERM": "xterm-256color"}


@contextmanager
def terminal(*words: str, env: Mapping[str, str], folder: Path) -> Iterator[Terminal]:
    """Run `umbel` in a terminal until the block ends; the terminal must then be as it was.

    Args:
        words: of the command line.
        env: all of its environment; see `in_terminal`.
        folder: where it runs.
    """
    master, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", LINES, COLUMNS, 0, 0))
    before = termios.tcgetattr(inside)
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_TERMINAL, *words],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=env,
        cwd=folder,
        start_new_session=True,
    )
    shown = Terminal(process, master, inside)
    try:
        yield shown
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            shown.wait()
        assert shown.modes() == before
        assert not shown.screen.cursor.hidden
        assert "Traceback" not in shown.text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
        os.close(inside)
