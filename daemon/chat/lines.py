"""Questions of a chat, line by line: from a pipe, or from a terminal with line editing."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ClientError
from .conversation import COMMANDS

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_PIECE = 65536
_LONGEST = 64 << 20  # bytes of a prompt; a daemon takes fewer


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
        return os.read(source, _PIECE)  # a regular file never blocks
    try:
        await ready.wait()
    finally:
        loop.remove_reader(source)
    return os.read(source, _PIECE)


def _text(read: bytes) -> str:
    """Read bytes as UTF-8, whatever the locale: it is often C beside a pipe."""
    return read.decode("utf-8", errors="replace")


class EditedLines:
    """Lines from the terminal. Pasted text may have several; Alt-Enter begins another.

    Args:
        session: of `edited_session`.
    """

    def __init__(self, session: "PromptSession[str]") -> None:
        self._session = session

    async def next(self) -> str | None:
        """Wait for a line; an empty one after Ctrl-C, None at the end of input."""
        # The library handles a signal of its own through asyncio, which takes this away.
        previous = signal.set_wakeup_fd(-1)
        try:
            return await self._session.prompt_async("> ", handle_sigint=False)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None
        finally:
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)

    def interrupt(self) -> None:
        """Clear the line that is being written, for a SIGINT from outside."""
        if self._session.app.is_running:
            self._session.app.exit(exception=KeyboardInterrupt())


def edited_session() -> "PromptSession[str]":
    """Make a session of prompt_toolkit, with a history of earlier chats."""
    import platformdirs  # noqa: PLC0415  (a pipe needs none of these)
    from prompt_toolkit import PromptSession  # noqa: PLC0415
    from prompt_toolkit.completion import WordCompleter  # noqa: PLC0415

    return PromptSession(
        history=_history(platformdirs.user_state_path("umbel") / "chat_history"),
        key_bindings=_keys(),
        completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
        complete_while_typing=False,
        prompt_continuation="… ",
        enable_history_search=True,
    )


def _history(path: Path) -> "History":
    """Open the history, for its owner only; in memory if the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory  # noqa: PLC0415  (likewise)

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(opened, 0o600)
        finally:
            os.close(opened)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415  (likewise)

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def begin_line(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    return keys
