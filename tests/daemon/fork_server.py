"""A process that has imported umbel, and from which daemons and commands are forked.

Imports are most of the CPU time of a command, and of a daemon that answers a few requests. A forked
process is a child of the test process, with arguments, environment, streams, signals and an exit
status of its own. It does not repeat the imports, and has the hash seed of its siblings. Tests of
start-up, of signals and of state kept over a restart use a fresh process, as does every process
whose environment would change an import.

On Linux only, where a process can adopt the child of its child.
"""

import atexit
import ctypes
import functools
import gc
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
START = 120.0
_MESSAGE = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# No import reads these.
_LATE = re.compile(r"UMBEL_|XDG_(?!CACHE_HOME)|(HOME|COLUMNS|TERM|PYTEST_CURRENT_TEST)$")


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
        environment = _early(os.environ)
        command = [sys.executable, "-m", "tests.daemon.fork_server"]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), cwd=ROOT, env=environment
            )
        atexit.register(self._close)

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """Return True if imports would find what they found in the server."""
        return _surroundings(environment) == self._like

    def fork(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[IO[bytes], IO[bytes], IO[bytes]],
        folder: Path | None = None,
    ) -> Forked:
        """Run the `umbel` command in a child of this process.

        Args:
            words: the command line after `umbel`.
            environment: the child's whole environment.
            streams: its standard input, output and error.
            folder: where it runs; here, if None.
        """
        message = json.dumps([words, str(folder or Path.cwd()), dict(environment)]).encode()
        _adopt_orphans(yes=True)
        try:
            socket.send_fds(self._connection, [message], [each.fileno() for each in streams])
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


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not _LATE.match(key)}


def _surroundings(environment: Mapping[str, str]) -> object:
    """Return everything that imports depend on."""
    return _early(environment), resource.getrlimit(resource.RLIMIT_NOFILE)


def _adopt_orphans(*, yes: bool) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, int(yes))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def _serve() -> None:
    """Fork on request; return in each process that was forked."""
    import umbel  # noqa: PLC0415

    sys.argv[0] = str(Path(umbel.__file__).with_name("__main__.py"))  # an import looks at it
    import umbel.daemon.cli  # noqa: PLC0415  (it takes most of the time)
    import umbel.daemon.lifecycle.server  # noqa: PLC0415

    gc.collect()
    tests = os.getppid()
    gc.freeze()  # or each would look through it, and so make a copy of its own
    connection = socket.socket(fileno=0)
    while True:
        message, streams, _, _ = socket.recv_fds(connection, _MESSAGE, 3)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        if between := os.fork():
            os.waitpid(between, 0)  # the test process has then adopted the daemon
            connection.send(os.read(reading, 32))
            for descriptor in (reading, writing, *streams):
                os.close(descriptor)
            continue
        between = os.getpid()
        if child := os.fork():
            os.write(writing, b"%d" % child)
            os._exit(0)
        connection.detach()
        os.close(reading)
        os.close(writing)
        while os.getppid() == between:
            time.sleep(0.001)
        # It is not left behind if the tests are killed, now or later.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != tests:
            os._exit(1)
        words, folder, environment = json.loads(message)
        return _become(words, folder, environment, streams)


def _become(words: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> None:
    """Take over everything that a fresh process would have been given."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in streams:
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (the process's own, to its end)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words


def _run() -> None:
    """Run the command; to take the interpreter down would take longer than most commands."""
    from umbel.__main__ import main  # noqa: PLC0415

    sys.modules["__main__"] = sys.modules["umbel.__main__"]  # as under `python -m umbel`
    try:
        main()
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(ended.code or 0)


if __name__ == "__main__":
    _serve()
    _run()
