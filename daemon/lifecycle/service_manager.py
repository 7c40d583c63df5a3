"""The service manager that started the daemon: its notifications, its socket, its watchdog.

systemd has sd_notify(3) and sd_listen_fds(3), a few lines each and stable. launchd has only
launch_activate_socket(3): no readiness, and no watchdog.
"""

import asyncio
import ctypes
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import structlog

from ..errors import SocketError
from ..quoting import quote
from .display import Display

if TYPE_CHECKING:
    from ...models.load.watch import Progress
    from ..models.assembly import Phase

_FIRST = 3  # the first descriptor that systemd hands over
_BEATS = 3  # a watchdog's interval has so many beats
_LAUNCHD_SOCKET = "Listeners"  # its name in org.umbel.daemon.plist
_LAUNCHD = 1  # launchd's process id
_LOOK = 10.0  # seconds between two looks at the engine
_PHASE = 900.0  # seconds that a phase without progress of its own may take
_STATUS_EVERY = 5.0  # seconds
_LOG_EVERY = 30.0  # seconds
_GIB = 1 << 30

log = structlog.get_logger()


class ServiceManager:
    """Sends notifications to systemd; without it they go nowhere.

    A failure is logged once. Nothing waits, and any thread may call.

    Args:
        address: of systemd's datagram socket, a path or `@` and an abstract name; None without it.
        watchdog: seconds within which a beat must come; None without a watchdog.
    """

    def __init__(self, address: str | None, watchdog: float | None = None) -> None:
        self.watchdog = watchdog
        if address is not None and address.startswith("@"):
            address = "\0" + address[1:]
        self._address = address
        self._failed = False

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Self:
        """Take systemd's variables, so that programs of this process do not inherit them."""
        address = environment.pop("NOTIFY_SOCKET", None)
        microseconds = environment.pop("WATCHDOG_USEC", "")
        owner = environment.pop("WATCHDOG_PID", "")
        is_ours = owner in ("", str(os.getpid()))
        beats = microseconds.isdecimal() and int(microseconds) > 0 and is_ours
        return cls(address, int(microseconds) / 1e6 if beats else None)

    def status(self, text: str) -> None:
        """Describe the daemon's work in a few words."""
        self._send(_status(text))

    def extend(self, seconds: float) -> None:
        """Ask for so many seconds from now before the start, or the stop, counts as failed."""
        self._send(f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")

    def ready(self, text: str) -> None:
        """Notify that requests are served."""
        self._send("READY=1", _status(text))

    def reloading(self) -> None:
        """Notify that a reload begins."""
        # systemd tells by the time which of several reloads this one is.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """Notify that a reload is over, whether it succeeded or not."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Notify that the daemon stops."""
        self._send("STOPPING=1", _status("stopping"))

    async def beat(self, stalled: Callable[[], bool]) -> None:
        """Send the watchdog's beats until cancelled; none while `stalled()`."""
        while self.watchdog is not None:
            if not stalled():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog / _BEATS)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("the service manager does not listen", reason=error.strerror)


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())


class StartUp:
    """Reports the progress of start-up to the service manager, the log and the display.

    Any thread may call. While bytes arrive, the service manager is asked for more time, so that a
    download may take long; without them it ends a start that hangs.

    Args:
        manager: of services.
        stalled_after: seconds without a byte after which a download fails.
        display: of the daemon's user.
    """

    def __init__(self, manager: ServiceManager, stalled_after: float, display: Display) -> None:
        self._manager = manager
        self._display = display
        self._grace = stalled_after + _PHASE
        self._done = 0
        self._status_at = self._logged_at = float("-inf")

    def begin(self, phase: "Phase") -> None:
        """Report the next phase."""
        self._manager.status(phase)
        self._manager.extend(_PHASE)
        self._display.begin(phase)

    def downloaded(self, progress: "Progress") -> None:
        """Report the progress of the download."""
        done, total = progress
        self._display.advance(done, total)
        now, arrived, self._done = time.monotonic(), done > self._done, done
        if now - self._status_at >= _STATUS_EVERY or done == total:
            self._status_at = now
            self._manager.status(f"downloading: {done / _GIB:.2f} of {total / _GIB:.2f} GiB")
            if arrived:
                self._manager.extend(self._grace)
        if now - self._logged_at >= _LOG_EVERY or done == total:
            self._logged_at = now
            log.info("downloading", bytes=done, total=total)


class InheritedListener:
    """A listening Unix socket that a service manager has made, and keeps.

    It outlives the daemon: clients that connect while there is none wait until the next one
    serves them. So nothing is removed at the end.

    Raises:
        SocketError: the descriptor is no Unix socket that listens.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            self.socket = socket.socket(fileno=descriptor)
            listens = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise _useless(f"descriptor {descriptor}: {error.strerror}") from error
        name = self.socket.getsockname()
        if self.socket.family != socket.AF_UNIX or not listens or not isinstance(name, str):
            self.socket.close()
            raise _useless(f"{name!r} is none")
        self.socket.setblocking(False)
        self.path = Path(name)

    def close(self) -> None:
        """Stop listening here; the service manager still does."""
        self.socket.close()


def _useless(fault: str) -> SocketError:
    return SocketError(
        f"the service manager should hand over one Unix socket that listens, and {fault}; "
        "see ListenStream in umbel.socket, or Listeners in org.umbel.daemon.plist"
    )


def inherited(environment: MutableMapping[str, str]) -> InheritedListener | None:
    """Take the socket of systemd or launchd; None if neither has one for this process.

    Raises:
        SocketError: it is no Unix socket that listens, or there are several.
    """
    count, owner = environment.pop("LISTEN_FDS", ""), environment.pop("LISTEN_PID", "")
    environment.pop("LISTEN_FDNAMES", None)
    if count and owner == str(os.getpid()):
        if count != "1":
            raise _useless(f"there are {quote(count)}")
        os.set_inheritable(_FIRST, False)
        return InheritedListener(_FIRST)
    if sys.platform == "darwin":
        return listener_of(activate(_LAUNCHD_SOCKET, ctypes.CDLL(None)))  # it has libSystem
    return None


def activate(name: str, system: Any) -> list[int]:
    """Ask launchd for the descriptors of a socket in its plist.

    Args:
        name: of the socket.
        system: the library that has `launch_activate_socket` and `free`.

    Returns:
        No descriptors if launchd did not start this process, or the plist has no such socket.

    Raises:
        SocketError: launchd refuses, as it does the second time.
    """
    ask, free = system.launch_activate_socket, system.free
    pointer = ctypes.POINTER(ctypes.c_int)
    ask.argtypes = [ctypes.c_char_p, ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t)]
    free.argtypes, free.restype = [ctypes.c_void_p], None
    array, count = pointer(), ctypes.c_size_t()
    fault = ask(name.encode(), ctypes.byref(array), ctypes.byref(count))
    if fault in (errno.ESRCH, errno.ENOENT):
        return []
    if fault:
        raise SocketError(f"launchd does not hand over its socket {name!r}: {os.strerror(fault)}")
    try:
        return [array[index] for index in range(count.value)]
    finally:
        free(array)


def listener_of(descriptors: list[int]) -> InheritedListener | None:
    """Make a listener of launchd's one descriptor; None without any.

    Raises:
        SocketError: there are several, or it is no Unix socket that listens.
    """
    if len(descriptors) > 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise SocketError(
            f"launchd hands over {len(descriptors)} sockets, and umbel serves one; "
            f"see {_LAUNCHD_SOCKET} in org.umbel.daemon.plist"
        )
    if not descriptors:
        return None
    os.set_inheritable(descriptors[0], False)
    return InheritedListener(descriptors[0])


def is_job_of_launchd(environment: Mapping[str, str]) -> bool:
    """Return True if launchd started this process as a job of its own.

    In a terminal the variable is set too: to 0, or to the terminal's own job.
    """
    name = environment.get("XPC_SERVICE_NAME", "0")
    return sys.platform == "darwin" and name != "0" and os.getppid() == _LAUNCHD


async def end_when_stalled(stalled: Callable[[], bool]) -> None:
    """End a job of launchd with status 1 once `stalled()`: launchd then restarts it.

    Nothing is closed: the engine is inside a computation that nothing interrupts.
    """
    while is_job_of_launchd(os.environ):
        if stalled():
            log.error("engine stalled; exiting so that launchd restarts umbel")
            os._exit(1)
        await asyncio.sleep(_LOOK)
