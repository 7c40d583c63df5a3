"""Signals at any rate and in any state: a daemon that is told to stop ends with status 0.

The storms begin when the process has run its first lines. Before that, while the interpreter
itself starts, the system's own reaction holds.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .running import START, STOP, Process, RunningDaemon, eventually, spawn

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def storm(process: Process, chance: random.Random) -> None:
    """Send signals in bursts of random lengths and distances until the process has ended."""
    end = time.monotonic() + STOP
    while process.poll() is None:
        assert time.monotonic() < end, "it does not end"
        for _ in range(chance.choice((1, 3, 400))):
            process.send_signal(chance.choice(NUMBERS))
        time.sleep(chance.random() * chance.choice((0.001, 0.05)))


def assert_ended_in_order(daemon: RunningDaemon) -> None:
    """Status 0, nothing ugly in the log, no socket."""
    log = daemon.log()
    assert daemon.process.wait(STOP) == 0, log
    assert "Traceback" not in log, log
    assert "Exception ignored" not in log, log
    assert not daemon.socket.exists()


def is_guarded(process: Process) -> bool:
    """True if the process has run its first lines: the kernel knows of its handlers."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in text.splitlines() if line.startswith("SigCgt:"))
    return all(int(caught.split()[1], 16) >> (number - 1) & 1 for number in NUMBERS)


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc tells when handlers are there")
@pytest.mark.parametrize("seed", range(6))
def test_storm_during_the_imports(short_path: Path, long_tiny_dir: Path, seed: int) -> None:
    """From the first line on, the daemon ends with status 0 and without a word."""
    chance = random.Random(seed)  # noqa: S311
    daemon = spawn(short_path, long_tiny_dir, fresh=True)
    eventually(lambda: is_guarded(daemon.process), START)
    time.sleep(chance.random() * chance.choice((0.01, 1.0)))
    storm(daemon.process, chance)
    assert_ended_in_order(daemon)


@pytest.mark.parametrize("state", ["listening", "loading", "ready", "stopping"])
def test_storm_later(short_path: Path, long_tiny_dir: Path, state: str) -> None:
    """While it listens, loads, serves and stops, and to the very end of the process."""
    daemon = spawn(short_path, long_tiny_dir, fresh=True)
    if state == "stopping":
        eventually(lambda: "event=ready" in daemon.log(), START)
        daemon.process.send_signal(signal.SIGTERM)
    eventually(lambda: f"event={state}" in daemon.log(), START)
    storm(daemon.process, random.Random(state))  # noqa: S311
    assert_ended_in_order(daemon)


def test_three_at_once(short_path: Path, long_tiny_dir: Path) -> None:
    """Three SIGTERMs within milliseconds are one that is in a hurry."""
    daemon = spawn(short_path, long_tiny_dir, fresh=True)
    eventually(lambda: "event=ready" in daemon.log(), START)
    for _ in range(3):
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    assert_ended_in_order(daemon)
    assert "event=stopped" in daemon.log()


EARLY = """
import asyncio, os, signal
from umbel.daemon.lifecycle.signals import leave_at_once
leave_at_once(0, keep=(signal.SIGHUP,))
os.kill(os.getpid(), signal.SIGHUP)
from umbel.daemon.lifecycle.signals import StopSignals

async def main():
    came = asyncio.Event()
    with signals.calling(came.set, signal.SIGHUP):
        await asyncio.wait_for(came.wait(), 60)

with StopSignals() as signals:
    asyncio.run(main())
print("came")
"""


def test_an_early_reload_is_not_lost() -> None:
    command = [sys.executable, "-c", EARLY]
    done = subprocess.run(command, capture_output=True, check=False, timeout=STOP)
    assert (done.stdout, done.stderr, done.returncode) == (b"came\n", b"", 0)


DURING_SYSTEM = """
import asyncio, ctypes, signal, sys, threading
from umbel.daemon.lifecycle.signals import hear_interrupts_always, leave_at_once
leave_at_once(0)
hear_interrupts_always()
running_system = threading.Thread(target=ctypes.CDLL(None).system, args=(sys.argv[1].encode(),))
from umbel.daemon.lifecycle.signals import StopSignals

async def main():
    came = asyncio.Queue()
    with signals.calling(lambda: came.put_nowait("came")):
        for _ in range(2):
            print(await came.get(), running_system.is_alive(), flush=True)

if sys.argv[2] == "later":
    with StopSignals() as signals:
        running_system.start()  # after the handlers: to set one undoes what it does
        asyncio.run(main())
else:
    running_system.start()
    while True:
        asyncio.run(asyncio.sleep(0.01))
"""


@contextmanager
def in_system(folder: Path, state: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program that is in libc's `system` until the block ends."""
    gate = folder / "gate"
    os.mkfifo(gate)
    # A shell that has begun says so, and ends when the pipe is open for writing.
    command = [sys.executable, "-c", DURING_SYSTEM, f"echo begun; : <{gate}", state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"begun\n"
            yield process
        finally:
            writer = os.open(gate, os.O_RDWR)  # waits for no reader
            process.wait(STOP)
            process.stdout.read()  # the shell has ended
            os.close(writer)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems drop it though it is blocked")
def test_an_interrupt_in_system(short_path: Path) -> None:
    """MLX calls `system`, which has the process ignore SIGINT; each is acted on all the same."""
    with in_system(short_path, "later") as process:
        assert process.stdout is not None
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"came True\n"
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems drop it though it is blocked")
def test_an_early_interrupt_in_system(short_path: Path) -> None:
    """Before anything is open, it ends the process, which waits for no program."""
    with in_system(short_path, "early") as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_the_parent_has_blocked(
    short_path: Path, long_tiny_dir: Path, number: int
) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        daemon = spawn(short_path, long_tiny_dir, fresh=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    eventually(lambda: "event=listening" in daemon.log(), START)
    daemon.process.send_signal(number)
    assert_ended_in_order(daemon)


def test_other_commands_end_by_their_signal(short_path: Path) -> None:
    program = (
        "import os, signal, sys; from umbel.daemon.lifecycle.signals import leave_at_once;"
        "leave_at_once(None); os.kill(os.getpid(), int(sys.argv[1])); signal.pause()"
    )
    for number in NUMBERS:
        done = subprocess.run(
            [sys.executable, "-c", program, str(int(number))],
            capture_output=True,
            check=False,
            timeout=STOP,
            cwd=short_path,
        )
        assert (done.returncode, done.stderr) == (128 + number, b"")
