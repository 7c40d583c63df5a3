"""The end of a daemon's process: libraries that fail in their teardown do not change its status."""

import signal
from pathlib import Path

import pytest

from .running import START, STOP, eventually, is_ready, spawn

# libc calls abort when the process exits in order, as it calls destructors of C++ libraries.
FAILING_TEARDOWN = """
import ctypes
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
from umbel.__main__ import main
main()
"""
PROGRAM = ("-c", FAILING_TEARDOWN)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_never_ends_in_a_signal(
    short_path: Path, long_tiny_dir: Path, number: signal.Signals
) -> None:
    """The status is 0, and the last line of the log is there."""
    daemon = spawn(short_path, long_tiny_dir, program=PROGRAM)
    eventually(lambda: is_ready(daemon), START)
    daemon.process.send_signal(number)
    assert daemon.process.wait(STOP) == 0
    assert "event=stopped" in daemon.log()


def test_a_failed_start_ends_with_its_own_status(short_path: Path) -> None:
    """The status is 1, and the sentence that says why is there."""
    daemon = spawn(short_path, short_path / "missing", program=PROGRAM)
    assert daemon.process.wait(START) == 1
    assert "umbel: " in daemon.log()
