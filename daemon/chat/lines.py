"""Where a chat's lines come from, if that is not a terminal with line editing."""

import asyncio
import os
import sys
from typing import Protocol


class Lines(Protocol):
    """What is said to the model, line by line."""

    async def next(self) -> str | None:
        """Wait for a line, without its end; None at the end of input."""


class PipedLines:
    """Lines from a file descriptor, read on the event loop.

    A thread that waits in `input` cannot be ended: Ctrl-C would hang until the next Enter.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._rest = b""

    async def next(self) -> str | None:
        """Wait for a line, without its end; None at the end of input."""
        if sys.stdin.isatty():
            sys.stdout.write("> ")
            sys.stdout.flush()
        while b"\n" not in self._rest:
            await self._wait()
            if not (piece := os.read(self._source, 65536)):
                break
            self._rest += piece
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(sys.stdin.encoding, errors="replace")

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._source, ready.set)
        except OSError:
            return  # a regular file, which never keeps a reader waiting
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._source)
