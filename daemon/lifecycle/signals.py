"""SIGTERM, SIGINT and SIGHUP, from the end of the imports to the end of the process.

Where Python is left to itself a signal kills the process, or raises in the midst of whatever
runs: between two handlers, after the event loop has gone, while the interpreter ends. Here
three states follow each other without a gap: `leave_at_once` during the imports, `StopSignals`
during the work, and after that signals are ignored.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Self

from .early_signals import NUMBERS, kept


class StopSignals:
    """Takes the signals for as long as a `with` block lasts. After it they are ignored.

    Ignored, and not put back: what follows is the end of the process, and it has begun.
    For the main thread. A signal that comes before `calling` waits for it.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        """The signal that came first."""
        self._came: list[int] = []
        self._reactions: dict[int, Callable[[], object]] = {}

    def __enter__(self) -> Self:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        for number in NUMBERS:
            signal.signal(number, self._note)
        self._came += kept
        kept.clear()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number in NUMBERS:
            # The interpreter's end leaves this in force; a handler it would replace by death.
            signal.signal(number, signal.SIG_IGN)
        self._receiver.close()
        self._sender.close()

    @contextmanager
    def calling(self, reaction: Callable[[], object], *numbers: int) -> Iterator[None]:
        """Have the running loop call `reaction` for each of these signals; all, if none is named.

        A block inside another one takes its signals from it, and gives them back.
        """
        before = dict(self._reactions)
        self._reactions.update(dict.fromkeys(numbers or NUMBERS, reaction))
        with self._listening() if not before else nullcontext():
            try:
                yield
            finally:
                self._reactions = before

    @contextmanager
    def _listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._receiver, self._deliver)
        # A loop that waits does not notice a handler of Python's; a byte wakes it up. A full
        # socket loses nothing: it wakes the loop as well.
        previous = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        loop.call_soon(self._deliver)  # what came before
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            loop.remove_reader(self._receiver)

    def _note(self, number: int, _frame: object) -> None:
        if self.first is None:
            self.first = number
        self._came.append(number)
        with suppress(OSError):  # full, or closed by an end that has begun
            self._sender.send(b"\0")  # where somebody else has the wake-up descriptor

    def _deliver(self) -> None:
        with suppress(BlockingIOError):
            self._receiver.recv(4096)
        came, self._came = self._came, []
        for number in came:
            if (reaction := self._reactions.get(number)) is not None:
                reaction()
