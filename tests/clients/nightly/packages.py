"""Programs of the npm packages that `.ci/nightly` installs, run by the machine's Node."""

import shutil
from pathlib import Path

import pytest

from ...daemon.running import RunningDaemon
from ..outside import installed, run


def node(
    daemon: RunningDaemon, script: str, *arguments: str, home: Path, **environment: str
) -> str:
    """Run a script with Node.js and return its standard output; skip the test without Node.

    Args:
        daemon: whose network it runs in.
        script: its path.
        arguments: of the script.
        home: its home and working directory.
        environment: besides what `outside.run` sets.
    """
    program = shutil.which("node")
    if program is None:
        pytest.skip("no Node.js here")
    return run(daemon, [program, script, *arguments], home, **environment)


def package(path: str) -> str:
    """Find a path in the folder of npm packages, or skip the test."""
    return installed(f"nightly-npm/node_modules/{path}")
