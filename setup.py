"""The version: that of the release, and the commit where umbel is built from a clone of git.

setuptools reads everything else from pyproject.toml. An sdist has its version in PKG-INFO.
"""

import subprocess
from email.parser import Parser
from pathlib import Path

from setuptools import setup

RELEASE = "0.1.0"
ROOT = Path(__file__).resolve().parent


def version() -> str:
    """Give the version of what lies here; a commit with the release's tag is the release."""
    if (ROOT / "PKG-INFO").exists():
        return str(Parser().parsestr((ROOT / "PKG-INFO").read_text(encoding="utf-8"))["Version"])
    if not (ROOT / ".git").exists():  # or git would tell of a repository around this folder
        return RELEASE
    command = ["git", "describe", "--tags", "--always", "--dirty", "--abbrev=7"]
    command += ["--match", f"v{RELEASE}"]
    try:
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return RELEASE
    commit = told.stdout.strip().rpartition("-g")[2].replace("-", ".")
    return RELEASE if commit == f"v{RELEASE}" else f"{RELEASE}+g{commit}"


if __name__ == "__main__":
    setup(version=version())
