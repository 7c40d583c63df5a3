"""What SIGTERM, SIGINT and SIGHUP do until anything else is imported, and what SIGHUP means.

This module imports next to nothing, so that it is in force within the first lines. Before
them, while the interpreter itself starts, the system's own reaction to a signal holds, and no
program can change that.
"""

import os
import signal
from _thread import interrupt_main, start_new_thread

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

kept: list[int] = []
"""Signals that came early and wait for `StopSignals`."""


def has_terminal() -> bool:
    """Whether a standard stream is a terminal, whose end SIGHUP then tells of.

    Without one, SIGHUP asks a daemon to reload its settings, as service managers do.
    """
    return any(map(os.isatty, (0, 1, 2)))


def leave_at_once(status: int | None, *, keep: tuple[int, ...] = (), word: str = "") -> None:
    """End the process when a signal comes, until `StopSignals` takes over.

    Only while nothing is open yet that somebody would have to close. Whoever started the process
    may have blocked the signals; they are heard all the same.

    Args:
        status: the exit status; None for 128 plus the signal's number.
        keep: signals that end nothing; `StopSignals` gets them.
        word: for the terminal of standard error, below the ^C that it has written.
    """

    def leave(number: int, _frame: object) -> None:
        if number in keep:
            kept.append(number)
            return
        try:
            os.write(2, f"\n{word}\n".encode() if word else b"")
        finally:  # the terminal may have gone
            # An exception could be lost in an import that catches it, or in a finaliser.
            os._exit(128 + number if status is None else status)

    for number in NUMBERS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def hear_interrupts_always() -> None:
    """Have SIGINT heard also while libc's `system` runs, by which MLX looks for a compiler.

    `system` has the whole process ignore SIGINT meanwhile. Linux drops an ignored signal only
    where a thread would take it, so all threads block it, and one waits for it and passes it on.
    The handler runs in the main thread as ever, but no system call of that thread is interrupted.
    What comes in the instant in which `system` begins is still lost.

    Programs that this process starts inherit the block. For the main thread, before there are
    others, which inherit it too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    start_new_thread(_pass_interrupts_on, ())


def _pass_interrupts_on() -> None:
    while True:
        signal.sigwait({signal.SIGINT})
        interrupt_main(signal.SIGINT)
