"""SIGTERM, SIGINT and SIGHUP, from a process's first lines to its end.

Python itself would let a signal kill the process, or raise in the midst of whatever runs: between
two handlers, after the event loop has gone, while the interpreter ends. Here three states follow
each other without a gap: `leave_at_once` during the imports, `StopSignals` during the work, and
after that signals are ignored.

The module is imported first and so imports next to nothing. While the interpreter itself starts,
the system's own reaction to a signal holds; no program can change that.
"""

import atexit
import os
import signal
import sys
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_early: list[int] = []  # signals that came early and wait for `StopSignals`


def has_terminal() -> bool:
    """Return True if a standard stream is a terminal: SIGHUP then means its end.

    Without one, SIGHUP asks a daemon to reload its settings, as service managers do.
    """
    return any(map(os.isatty, (0, 1, 2)))


def leave_at_once(status: int | None, *, keep: tuple[int, ...] = (), word: str = "") -> None:
    """End the process when a signal comes, until `StopSignals` takes over.

    For the time in which nothing is open that needs closing. Signals that the parent process has
    blocked are unblocked.

    Args:
        status: the exit status; None for 128 plus the signal's number.
        keep: signals that end nothing; `StopSignals` gets them.
        word: for the terminal of standard error, below the ^C that it has written.
    """

    def leave(number: int, _frame: object) -> None:
        if number in keep:
            _early.append(number)
            return
        try:
            os.write(2, f"\n{word}\n".encode() if word else b"")
        finally:  # the terminal may have gone
            # An exception could be lost in an import that catches it, or in a finaliser.
            os._exit(128 + number if status is None else status)

    for number in _NUMBERS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)


def hear_interrupts_always() -> None:
    """Receive SIGINT also while libc's `system` runs, by which MLX looks for a compiler.

    `system` makes the whole process ignore SIGINT meanwhile. Linux drops an ignored signal only
    if a thread would take it, so all threads block it, and one waits for it and passes it on. The
    handler runs in the main thread as usual, but no system call of that thread is interrupted. A
    signal in the instant in which `system` begins is still lost.

    Programs that this process starts inherit the block. Call it in the main thread before there
    are others, which inherit it too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    start_new_thread(_pass_interrupts_on, ())


def _pass_interrupts_on() -> None:
    while True:
        signal.sigwait({signal.SIGINT})
        interrupt_main(signal.SIGINT)


class StopSignals:
    """Takes the signals while a `with` block lasts; after it they are ignored.

    They are not restored: the end of the process follows. For the main thread. A signal that comes
    before `calling` waits for it.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        """The signal that came first."""
        self._came: list[int] = []
        self._reactions: dict[int, Callable[[], object]] = {}

    def __enter__(self) -> "StopSignals":  # noqa: PYI034  (typing is not imported this early)
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)
        for number in _NUMBERS:
            signal.signal(number, self._note)
        self._came += _early
        _early.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for number in _NUMBERS:
            # The interpreter's end leaves this in force; a handler it would replace by death.
            signal.signal(number, signal.SIG_IGN)
        os.close(self._receiver)
        os.close(self._sender)

    @contextmanager
    def calling(self, reaction: Callable[[], object], *numbers: int) -> Iterator[None]:
        """Let the running loop call `reaction` for each of these signals, by default for all.

        A block inside another one takes its signals from it, and gives them back.
        """
        before = dict(self._reactions)
        self._reactions.update(dict.fromkeys(numbers or _NUMBERS, reaction))
        with self._listening() if not before else nullcontext():
            try:
                yield
            finally:
                self._reactions = before

    @contextmanager
    def _listening(self) -> Iterator[None]:
        from asyncio import get_running_loop  # noqa: PLC0415  (it is loaded by now)

        loop = get_running_loop()
        loop.add_reader(self._receiver, self._deliver)
        # A waiting loop does not notice a handler of Python's; a byte wakes it up. A full pipe
        # loses nothing: it wakes the loop as well.
        previous = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
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
            os.write(self._sender, b"\0")  # the loop may have its own wake-up descriptor

    def _deliver(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._receiver, 4096)
        came, self._came = self._came, []
        for number in came:
            if (reaction := self._reactions.get(number)) is not None:
                reaction()


def end_process(status: int) -> None:
    """Run Python's exit handlers, flush standard output and error, and leave the process.

    The destructors of C++ libraries do not run. MLX's threads and its CUDA context are still there
    when they would, and one of seven stops of an 8B model on CUDA ended in a segmentation fault
    after the daemon had closed all that it owns.
    """
    atexit._run_exitfuncs()  # noqa: SLF001  (no public function runs them without the teardown)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a pipe that nothing reads
            stream.flush()
    os._exit(status)
