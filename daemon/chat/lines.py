"""Where a chat's questions come from, if that is not a terminal with line editing."""

import asyncio
import os
import sys
from typing import Protocol

from ..errors import ClientError

_PIECE = 65536
_LONGEST = 64 << 20  # bytes of a prompt; a daemon takes fewer


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
            if not (piece := await _read(self._source)):
                break
            self._rest += piece
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        return _text(line)


async def read_all(source: int) -> str:
    """Read a file descriptor to its end.

    Raises:
        ClientError: there is more than any daemon takes.
    """
    read = bytearray()
    while piece := await _read(source):
        read += piece
        if len(read) > _LONGEST:
            raise ClientError(f"standard input has more than {_LONGEST >> 20} MiB")
    return _text(bytes(read))


async def _read(source: int) -> bytes:
    """Wait for the next piece; an empty one at the end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(source, ready.set)
    except OSError:
        return os.read(source, _PIECE)  # a regular file, which never keeps a reader waiting
    try:
        await ready.wait()
    finally:
        loop.remove_reader(source)
    return os.read(source, _PIECE)


def _text(read: bytes) -> str:
    """Read bytes as UTF-8, whatever the locale says: it is often C where there is a pipe."""
    return read.decode("utf-8", errors="replace")
