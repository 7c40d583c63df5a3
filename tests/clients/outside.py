"""Clients that are programs of their own, run with nothing of this process's environment.

`.ci/nightly` installs them. Where the daemon has a network of its own (`scripted.leave_network`),
they run in it too: they then reach the daemon and no other host.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ..daemon.running import RunningDaemon

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / ".clients"
PROGRAMS = Path(__file__).parent / "programs"
MODEL = "scripted"
_PATIENCE = 200.0  # seconds; the longest prompt takes an idle machine less than ten
_PAIR = re.compile(r"(\w+)=(\S*)")


def installed(pattern: str) -> str:
    """Find what `.ci/nightly` has installed, or skip the test."""
    for path in sorted(INSTALLED.glob(pattern)):
        return str(path)
    pytest.skip(f"no {pattern} in .clients: .ci/nightly installs it where registries are reached")


def run(
    daemon: RunningDaemon,
    command: Sequence[str],
    home: Path,
    stdin: str = "",
    **environment: str,
) -> str:
    """Run a client to its end and return what it wrote on standard output.

    Args:
        daemon: whose network it runs in.
        command: the program and its arguments.
        home: its home and working directory.
        stdin: what it reads there.
        environment: what it is to find besides `HOME`, `PATH` and `TERM`.
    """
    done = subprocess.run(
        [*_in_network_of(daemon), *command],
        cwd=home,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", "TERM": "dumb", **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{daemon.log()[-4000:]}"
    return done.stdout


def run_program(
    daemon: RunningDaemon,
    name: str,
    home: Path,
    tasks: Mapping[str, str],
    *,
    recipe: str = "",
    ours: bool = False,
) -> Any:
    """Run one of `programs/`.

    Args:
        daemon: whom it talks to.
        name: its file.
        home: its home and working directory.
        tasks: what it is to ask, by what for.
        recipe: lines of Python that it begins with.
        ours: whether this environment has its packages, and not only that of `.ci/nightly`.

    Returns:
        What it printed, as JSON.
    """
    python = sys.executable if ours else installed("venv/bin/python")
    output = run(
        daemon,
        [python, str(PROGRAMS / name), json.dumps(tasks)],
        home,
        RECIPE=recipe,
        SOCKET=str(daemon.socket),
        URL=f"http://127.0.0.1:{daemon.tcp_port()}",
        LITELLM_LOCAL_MODEL_COST_MAP="true",  # it would fetch them otherwise
    )
    return json.loads(output)


def _in_network_of(daemon: RunningDaemon) -> list[str]:
    network = Path(f"/proc/{daemon.process.pid}/ns/net")
    own = Path("/proc/self/ns/net")
    if not own.exists() or network.readlink() == own.readlink():
        return []
    return ["nsenter", f"--net={network}"]


def requests_in(log: str) -> list[Mapping[str, str]]:
    """Read the lines that a daemon has logged of requests, oldest first."""
    return [dict(_PAIR.findall(line)) for line in log.splitlines() if " event=request " in line]
