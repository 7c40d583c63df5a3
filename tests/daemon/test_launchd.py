"""The daemon under launchd, as launch_activate_socket(3) describes it."""

import ctypes
import errno
import os
import plistlib
import socket
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from umbel.daemon.config import Settings
from umbel.daemon.errors import SocketError
from umbel.daemon.lifecycle import service_manager

from .launchd_keys import JOB, faults

# -- the socket --------------------------------------------------------------------------

_ARRAY = ctypes.POINTER(ctypes.c_int)
_ACTIVATE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_ARRAY), ctypes.POINTER(ctypes.c_size_t)
)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class System:
    """Fake of libSystem: C functions, memory from malloc, and planted faults.

    Args:
        numbers: the descriptors of the socket.
        fault: what the function returns, as it is; 0 where it gives the socket.
    """

    def __init__(self, numbers: list[int], fault: int = 0) -> None:
        self._numbers, self._fault = numbers, fault
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.malloc.argtypes = [ctypes.c_size_t]
        self._libc.free.argtypes = [ctypes.c_void_p]
        self.asked: list[bytes] = []
        self.given: list[int] = []
        self.freed: list[int] = []
        self.launch_activate_socket = _ACTIVATE(self._activate)
        self.free = _FREE(self._free)

    def _activate(self, name: bytes, array: Any, count: Any) -> int:
        self.asked.append(name)
        if self._fault:
            return self._fault
        size = len(self._numbers) * ctypes.sizeof(ctypes.c_int)
        address = self._libc.malloc(size)
        self.given.append(address)
        place = ctypes.cast(address, _ARRAY)
        for index, number in enumerate(self._numbers):
            place[index] = number
        array[0] = place
        count[0] = len(self._numbers)
        return 0

    def _free(self, address: int) -> None:
        self.freed.append(address)
        self._libc.free(address)


@pytest.mark.parametrize("numbers", [[7], [7, 2**31 - 1, 0]])
def test_the_array_is_read_and_given_back_once(numbers: list[int]) -> None:
    """It is malloc's, and its pointer may not fit an int."""
    system = System(numbers)
    assert service_manager.activate("Listeners", system) == numbers
    assert system.asked == [b"Listeners"]
    assert system.freed == system.given
    assert len(system.freed) == 1


@pytest.mark.parametrize("fault", [errno.ESRCH, errno.ENOENT])
def test_without_launchd_or_without_the_name_there_is_no_socket(fault: int) -> None:
    """The daemon then makes its own, and nothing is freed that was never given."""
    system = System([], fault)
    assert service_manager.activate("Listeners", system) == []
    assert system.freed == []


def test_a_socket_that_was_taken_is_refused() -> None:
    """The second time launchd says so, and the daemon does not serve elsewhere instead."""
    system = System([], errno.EALREADY)
    with pytest.raises(SocketError, match=r"Listeners.*already"):
        service_manager.activate("Listeners", system)
    assert system.freed == []


def test_the_socket_is_served_and_stays(short_path: Path) -> None:
    """It is launchd's: closing it here removes nothing, and no child inherits it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(short_path / "s"))
        listening.listen()
        number = os.dup(listening.fileno())
        os.set_inheritable(number, True)
        listener = service_manager.listener_of(
            service_manager.activate("Listeners", System([number]))
        )
    assert listener is not None
    assert listener.path == short_path / "s"
    assert listener.socket.fileno() == number
    assert not os.get_inheritable(number)
    listener.close()
    assert (short_path / "s").is_socket()
    assert service_manager.listener_of([]) is None


def test_several_sockets_are_refused_and_closed() -> None:
    """The daemon serves one; it does not choose."""
    pipe = os.pipe()
    with pytest.raises(SocketError, match=r"2 sockets.*Listeners"):
        service_manager.listener_of(list(pipe))
    for number in pipe:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


@pytest.mark.skipif(sys.platform == "darwin", reason="for systems without launchd")
def test_elsewhere_nobody_is_asked() -> None:
    """There is no such function in the C library."""
    assert service_manager.inherited({}) is None


# -- a stalled engine --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "parent", "name", "is_parent"),
    [
        ("darwin", 1, "org.umbel.daemon", True),
        ("darwin", 1, "homebrew.mxcl.umbel", True),
        ("darwin", 501, "org.umbel.daemon", False),  # a shell in a job
        ("darwin", 501, "application.com.apple.Terminal.1", False),
        ("darwin", 1, "0", False),
        ("darwin", 1, None, False),
        ("linux", 1, "org.umbel.daemon", False),  # PID 1 of a container
    ],
)
def test_launchd_is_known_as_the_parent(
    platform: str, parent: int, name: str | None, *, is_parent: bool, monkeypatch: Any
) -> None:
    """By what it sets for its jobs, and by being the first process."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    environment = {} if name is None else {"XPC_SERVICE_NAME": name}
    assert service_manager.is_job_of_launchd(environment) == is_parent


STALLED = """
import asyncio, os, sys, threading, time
from umbel.daemon.lifecycle import service_manager as launchd
launchd._LOOK = 0.001
sys.platform, os.getppid = "darwin", lambda: int(sys.argv[1])
threading.Thread(target=time.sleep, args=(600,)).start()
looks = iter([False, False, True])
asyncio.run(launchd.end_when_stalled(lambda: next(looks)))
print("goes on", flush=True)
os._exit(0)
"""
"""Runs the watch beside a thread that does not end, as one in a computation does not."""


@pytest.mark.parametrize(("parent", "status"), [(1, 1), (2, 0)])
def test_a_stalled_engine_ends_the_daemon_that_launchd_starts_anew(
    parent: int, status: int
) -> None:
    """With a status that is no success; where launchd is not the parent, nothing ends it."""
    done = subprocess.run(
        [sys.executable, "-c", STALLED, str(parent)],
        env=os.environ | {"XPC_SERVICE_NAME": "org.umbel.daemon"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    assert ("goes on" in done.stdout) == (status == 0)
    assert ("engine stalled" in done.stdout + done.stderr) == (status == 1)


# -- the plist ---------------------------------------------------------------------------


def job() -> dict[str, Any]:
    """Read the plist that umbel ships."""
    text = files("umbel").joinpath("launchd/org.umbel.daemon.plist").read_bytes()
    loaded: dict[str, Any] = plistlib.loads(text)
    return loaded


def test_launchd_understands_every_key_of_the_plist() -> None:
    """It ignores what it does not know, without a word."""
    assert list(faults(job(), JOB)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"KeepALive": True},
        {"KeepAlive": {"SuccesfulExit": False}},
        {"RunAtLoad": 1},
        {"ThrottleInterval": "10"},
        {"ExitTimeOut": True},
        {"ProcessType": "interactive"},
        {"ProgramArguments": "umbel serve"},
        {"ProgramArguments": ["umbel", 1]},
        {"Sockets": {"Listeners": {"SockPathMode": "0600"}}},
        {"SoftResourceLimits": {"OpenFiles": 1}},
    ],
)
def test_a_planted_fault_of_the_plist_is_found(change: dict[str, Any]) -> None:
    """Each once."""
    assert len(list(faults(job() | change, JOB))) == 1


def test_the_plist_says_what_a_daemon_needs() -> None:
    """Kept alive unless it stopped in order, not slowed down, and with time to stop."""
    given = job()
    assert given["Label"] == "org.umbel.daemon"
    assert all(Path(path).is_absolute() for path in given["ProgramArguments"][:1])
    assert given["ProgramArguments"][1:] == ["serve"]
    assert given["RunAtLoad"] is True
    assert given["KeepAlive"] == {"SuccessfulExit": False}
    assert given["ProcessType"] == "Interactive"
    assert given["ExitTimeOut"] >= Settings().stop_grace + 90
    assert given["Umask"] == 0o077
    assert given["Sockets"]["Listeners"]["SockPathMode"] == 0o600
    assert given["Sockets"]["Listeners"]["SockType"] == "stream"
