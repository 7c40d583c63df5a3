"""What the daemon tells systemd of itself, and the sockets that it has from there.

Both protocols are a few lines each and stable: sd_notify(3) and sd_listen_fds(3).
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Self

import structlog

from ..errors import SocketError
from ..quoting import quote

_FIRST = 3  # the first descriptor that is handed over, as sd_listen_fds(3) has it
_BEATS = 3  # that are sent in the time in which one must come

log = structlog.get_logger()


class ServiceManager:
    """Tells who started this process how it is; nobody hears it where nobody listens.

    What cannot be told is logged once. Nothing waits, and any thread may call.

    Args:
        address: of the datagram socket that listens, a path or `@` and an abstract name; None
            where nobody does.
        watchdog: seconds within which a beat must come; None where none is waited for.
    """

    def __init__(self, address: str | None, watchdog: float | None = None) -> None:
        self.watchdog = watchdog
        self._address = None if address is None else _path_of(address)
        self._failed = False

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Self:
        """Find who listens. Programs that this process starts will not find them."""
        address = environment.pop("NOTIFY_SOCKET", None)
        microseconds = environment.pop("WATCHDOG_USEC", "")
        owner = environment.pop("WATCHDOG_PID", "")
        beats = microseconds.isdecimal() and int(microseconds) > 0 and _is_own(owner)
        return cls(address, int(microseconds) / 1e6 if beats else None)

    def status(self, text: str) -> None:
        """Say in a few words what is being done."""
        self._send(_status(text))

    def extend(self, seconds: float) -> None:
        """Ask for so many seconds from now, in which the start, or the stop, need not be over."""
        self._send(f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")

    def ready(self, text: str) -> None:
        """Say that requests are served."""
        self._send("READY=1", _status(text))

    def reloading(self) -> None:
        """Say that settings are read again."""
        # systemd tells by the time which of several reloads this one is.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """Say that a reload is over, whatever came of it."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Say that the end has begun."""
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


def _path_of(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())


def _is_own(pid: str) -> bool:
    """Whether what is set is meant for this process, and not for one that started it."""
    return not pid or pid == str(os.getpid())


class InheritedListener:
    """A listening Unix socket that a service manager has made, and keeps.

    It outlives the daemon: clients that connect while there is none wait until the next one
    serves them. So nothing is removed at the end.

    Args:
        number: of the descriptor.

    Raises:
        SocketError: it is no Unix socket that listens.
    """

    def __init__(self, number: int) -> None:
        try:
            self.socket = socket.socket(fileno=number)
            listens = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise _useless(f"descriptor {number}: {error.strerror}") from error
        name = self.socket.getsockname()
        if self.socket.family != socket.AF_UNIX or not listens or not isinstance(name, str):
            self.socket.close()
            raise _useless(f"{name!r} is none")
        self.socket.setblocking(False)
        self.path = Path(name)

    def close(self) -> None:
        """Stop listening here; who made the socket still does."""
        self.socket.close()


def inherited(environment: MutableMapping[str, str]) -> InheritedListener | None:
    """Take the socket that the service manager listens on; None where it has none for us.

    Raises:
        SocketError: what it has is no Unix socket that listens, or there are several.
    """
    count, owner = environment.pop("LISTEN_FDS", ""), environment.pop("LISTEN_PID", "")
    environment.pop("LISTEN_FDNAMES", None)
    if not count or owner != str(os.getpid()):
        return None
    if count != "1":
        raise _useless(f"there are {quote(count)}")
    os.set_inheritable(_FIRST, False)
    return InheritedListener(_FIRST)


def _useless(what: str) -> SocketError:
    return SocketError(
        f"the service manager should hand over one Unix socket that listens, and {what}; "
        "see ListenStream in umbel.socket, or Listeners in org.umbel.daemon.plist"
    )
