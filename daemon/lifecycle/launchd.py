"""The socket that launchd hands over, and the end of a daemon that launchd is to start anew.

launch_activate_socket(3) is all that launchd has for its jobs: no readiness, and no watchdog.
"""

import asyncio
import ctypes
import errno
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from ..errors import SocketError
from .service_manager import InheritedListener

_NAME = "Listeners"  # of the socket in org.umbel.daemon.plist
_LOOK = 10.0  # seconds between two looks at the engine
_FIRST_PROCESS = 1  # launchd itself

log = structlog.get_logger()


def inherited() -> InheritedListener | None:
    """Take the socket that launchd listens on; None where it has none for this process.

    Raises:
        SocketError: what it has is no Unix socket that listens, or there are several.
    """
    if sys.platform != "darwin":
        return None
    return listener_of(activate(_NAME, ctypes.CDLL(None)))  # libSystem is in every process


def activate(name: str, system: Any) -> list[int]:
    """Ask launchd for the descriptors of a socket that its plist names.

    Args:
        name: of the socket.
        system: the library that has `launch_activate_socket` and `free`.

    Returns:
        None of them where launchd did not start this process, or the plist has no such socket.

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


def listener_of(numbers: list[int]) -> InheritedListener | None:
    """Make a listener of the one descriptor; None of none.

    Raises:
        SocketError: there are several, or it is no Unix socket that listens.
    """
    if len(numbers) > 1:
        for number in numbers:
            os.close(number)
        raise SocketError(
            f"launchd hands over {len(numbers)} sockets, and umbel serves one; "
            f"see {_NAME} in org.umbel.daemon.plist"
        )
    if not numbers:
        return None
    os.set_inheritable(numbers[0], False)
    return InheritedListener(numbers[0])


def is_parent(environment: Mapping[str, str]) -> bool:
    """Whether launchd started this process as a job of its own.

    In a terminal the variable is set too: to 0, or to the terminal's own job.
    """
    name = environment.get("XPC_SERVICE_NAME", "0")
    return sys.platform == "darwin" and name != "0" and os.getppid() == _FIRST_PROCESS


async def end_when_stalled(stalled: Callable[[], bool]) -> None:
    """End the process with status 1 once `stalled()`, if launchd starts it anew then.

    Nothing is ended in order: the engine is inside a computation that nothing interrupts.
    """
    while is_parent(os.environ):
        if stalled():
            log.error("the engine makes no progress: umbel ends, and launchd restarts it")
            os._exit(1)
        await asyncio.sleep(_LOOK)
