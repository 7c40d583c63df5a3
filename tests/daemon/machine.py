"""A real systemd in namespaces of its own, as a machine that has just booted."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from .running import eventually

ROOT = Path(__file__).parents[2]
PATIENCE = 120
NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup")

_BASIC = "[Unit]\nDefaultDependencies=no\n"
UNITS = {
    "boot.target": f"{_BASIC}Wants=umbel.socket\n",
    # Units that every service asks for by default. There is nothing to set up here.
    "sysinit.target": _BASIC,
    "basic.target": _BASIC,
    "shutdown.target": _BASIC,
    "umbel.service.d/test.conf": (
        "[Service]\nWatchdogSec=8s\nRestartSec=100ms\n"
        "StandardOutput=append:/opt/umbel/log/log\nStandardError=append:/opt/umbel/log/log\n"
    ),
}


@dataclass
class Machine:
    """A booted one.

    Attributes:
        init: the number that its systemd has out here.
    """

    init: int

    def path(self, name: str) -> Path:
        """Where a file of the machine's is found out here."""
        return Path(f"/proc/{self.init}/root", name)

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command there, and return what it says."""
        enter = ["nsenter", "--target", str(self.init), "--root", "--wd=/", *NAMESPACES]
        done = subprocess.run(
            [*enter, "env", "-i", "PATH=/usr/bin:/bin", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr, self.log())
        return done.stdout.strip()

    def show(self, name: str, unit: str = "umbel.service") -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def log(self) -> str:
        """Lines that the daemon has logged."""
        with suppress(FileNotFoundError):
            return self.path("opt/umbel/log/log").read_text()
        return ""


@contextmanager
def booted(folder: Path, model: Path, settings: str) -> Iterator[Machine]:
    """Boot a machine with this tree's units and code; skip where that cannot be done.

    Nothing of it is left when the block ends, or this process: its processes end with the first
    one, which ends with its parent, and mounts end with them.

    Args:
        folder: an empty one.
        model: the folder of the model that is found there as `/opt/umbel/model`.
        settings: of its `umbel.toml`.
    """
    _skip_without("setpriv", "unshare", "nsenter", "systemctl")
    _lay_out(folder, model, settings)
    with _cgroup() as cgroup, (folder / "boot.log").open("w") as log:
        process = subprocess.Popen(
            ["sh", "-c", f'echo $$ >"{cgroup}/cgroup.procs" && exec "$@"', "sh", *_boot(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield Machine(_wait_booted(process, folder / "boot.log"))
        finally:
            _end(process)


def _skip_without(*commands: str) -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("booting systemd takes root on Linux")
    for command in commands:
        if shutil.which(command) is None:
            pytest.skip(f"there is no {command}")
    if not Path("/lib/systemd/systemd").exists():
        pytest.skip("there is no systemd")
    tried = subprocess.run(
        ["unshare", "--fork", *NAMESPACES, "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"there are no namespaces: {tried.stderr.strip()}")


def _lay_out(folder: Path, model: Path, settings: str) -> None:
    """Write what the machine finds below /opt/umbel."""
    units = folder / "units"
    shutil.copytree(ROOT / "systemd", units, ignore=shutil.ignore_patterns("*.d"))
    for name, text in UNITS.items():
        (units / name).parent.mkdir(exist_ok=True)
        (units / name).write_text(text)
    shutil.copytree(ROOT / "src", folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(model, folder / "model")
    python = f"/opt/umbel/python/bin/{Path(sys.executable).resolve().name}"
    (folder / "umbel").write_text(
        "#!/bin/sh\n"
        "export LD_LIBRARY_PATH=/opt/umbel/python/lib PYTHONPATH=/opt/umbel/app:/opt/umbel/site\n"
        f'exec {shlex.quote(python)} -m umbel "$@"\n'
    )
    (folder / "umbel").chmod(0o755)
    (folder / "umbel.toml").write_text(settings)
    for path in [*(folder / "app").rglob("*"), *(folder / "model").rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def _boot(folder: Path) -> list[str]:
    script = Path(__file__).with_name("boot_systemd.sh")
    packages = Path(msgspec.__file__).parents[1]
    return [
        *("setpriv", "--pdeathsig", "KILL"),  # or what is killed with this process would stay
        *("unshare", "--fork", "--kill-child=KILL", *NAMESPACES),
        *("sh", str(script), str(folder), sys.base_prefix, str(packages)),
    ]


@contextmanager
def _cgroup() -> Iterator[Path]:
    """Make a cgroup that the machine takes for the root of all; skip where there is no v2."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    roots = [Path(words[4]) for words in mounts if words[words.index("-") + 1] == "cgroup2"]
    if not roots:
        pytest.skip("there are no cgroups of version 2")
    cgroup = roots[0] / f"umbel-test-{os.getpid()}"
    try:
        cgroup.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        yield cgroup
    finally:
        eventually(lambda: _remove(cgroup))


def _remove(cgroup: Path) -> bool:
    """Remove a cgroup and those in it; False while a process is left."""
    for folder, _, _ in os.walk(cgroup, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()
    return not cgroup.exists()


def _wait_booted(process: "subprocess.Popen[bytes]", log: Path) -> int:
    """Wait until units can be started; skip where the kernel allows no such machine."""
    end = time.monotonic() + PATIENCE
    while "booting" not in log.read_text():
        if process.poll() is not None:
            pytest.skip(f"no machine can be made here: {log.read_text().strip()}")
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    machine = Machine(_children(process)[0])
    up = ("systemctl", "is-active", "umbel.socket")
    eventually(lambda: machine.run(*up, check=False) == "active", PATIENCE)
    return machine.init


def _children(process: "subprocess.Popen[bytes]") -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in path.read_text().split()] if path.exists() else []


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the machine. Its first process is gone when all others are, and is waited for first."""
    for first in _children(process):
        os.kill(first, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    process.kill()
    process.wait(PATIENCE)
