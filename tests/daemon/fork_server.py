"""A process that has imported the daemon, and of which daemons are forked.

Imports are most of the processor time of a daemon that answers a few requests. What is forked is
a real process of its own all the same: a child of the one that asked, with its own arguments,
environment, log, signals and exit status. What a process does in its imports it does not do
again, and its hash seed is that of the others: whoever tests starts, signals or what is kept over
a restart, or asks for another environment, starts a fresh process.

On Linux only, where a process can adopt the child of its child.
"""

import atexit
import ctypes
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
START = 120.0
_MESSAGE = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
# What is read when the daemon runs, and by no import.
_LATE = ("UMBEL_", "XDG_CONFIG_HOME", "PYTEST_CURRENT_TEST")


class Forked:
    """A child of this process that it did not start itself; as `subprocess.Popen`.

    Attributes:
        pid: of the child.
        returncode: its exit status, or the negative number of the signal that ended it; None
            until it is waited for.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._end = select.poll()
        self._end.register(self._descriptor, select.POLLIN)

    def poll(self) -> int | None:
        """Look whether it has ended."""
        if self.returncode is None and self._end.poll(0):
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._descriptor)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self.returncode is None:
            self._end.poll(None if timeout is None else 1000 * timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """This process's fork server. It ends when this process does, in whatever way."""

    def __init__(self) -> None:
        self._like = _surroundings(os.environ)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(START)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_LATE)}
        command = [sys.executable, "-m", "tests.daemon.fork_server"]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), cwd=ROOT, env=environment
            )
        atexit.register(self._close)

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """Whether imports would find what they found there."""
        return _surroundings(environment) == self._like

    def fork(self, words: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Forked:
        """Run the `umbel` command in a child of this process."""
        message = json.dumps([words, str(Path.cwd()), dict(environment)]).encode()
        _adopt_orphans(yes=True)
        try:
            socket.send_fds(self._connection, [message], [log.fileno()])
            return Forked(int(self._connection.recv(_MESSAGE)))
        finally:
            _adopt_orphans(yes=False)

    def _close(self) -> None:
        self._connection.close()
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer | None:
    """Start the one of this process, where there can be one."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        _adopt_orphans(yes=False)
    except (AttributeError, OSError):  # another system, or a kernel without
        return None
    return ForkServer()


def _surroundings(environment: Mapping[str, str]) -> object:
    """What a process finds when it starts, but for what is read later."""
    early = {k: v for k, v in environment.items() if not k.startswith(_LATE)}
    return early, resource.getrlimit(resource.RLIMIT_NOFILE)


def _adopt_orphans(*, yes: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot adopt the children of children")


def _serve() -> None:
    """Fork whenever asked to; return in each process that was forked."""
    import umbel.daemon.cli  # noqa: PLC0415  (what most of the time goes into)
    import umbel.daemon.lifecycle.server  # noqa: F401, PLC0415

    gc.collect()
    gc.freeze()  # or each would look through it, and so make a copy of its own
    connection = socket.socket(fileno=0)
    while True:
        message, logs, _, _ = socket.recv_fds(connection, _MESSAGE, 1)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        if between := os.fork():
            os.waitpid(between, 0)  # whoever asked has adopted the other one then
            connection.send(os.read(reading, 32))
            for descriptor in (reading, writing, *logs):
                os.close(descriptor)
        elif daemon := os.fork():
            os.write(writing, b"%d" % daemon)
            os._exit(0)
        else:
            connection.detach()
            os.close(reading)
            os.close(writing)
            return _become(*json.loads(message), *logs)


def _become(words: list[str], folder: str, environment: dict[str, str], log: int) -> None:
    """Put on what a fresh process would have been given."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, taken in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, taken)
    os.close(nothing)
    os.close(log)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words


if __name__ == "__main__":
    _serve()
    from umbel.__main__ import main

    main()
