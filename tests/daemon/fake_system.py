"""Programs in PATH that stand in for a system's own: they note their words, and answer as told."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from umbel.daemon.installation import Installation, Umbel

UMBEL = Umbel(["/opt/umbel/bin/umbel", "serve"], [Path("/opt/umbel")])
"""The program that is installed as a service."""

_PROGRAM = """#!/bin/sh
name=${0##*/}
folder=${0%/*}/..
printf '%s\\n' "$name $*" >>"$folder/calls"
for verb; do case $verb in -*) ;; *) break ;; esac; done
case "$name $verb" in
"launchctl bootstrap") : >"$folder/loaded" ;;
"launchctl bootout") /bin/rm -f "$folder/loaded" ;;
"launchctl print") [ -e "$folder/loaded" ] || exit 113 ;;
esac
answer="$folder/answers/$name $verb"
[ -e "$answer" ] || exit 0
/bin/cat "$answer"
[ ! -e "$answer.errors" ] || /bin/cat "$answer.errors" >&2
exit "$(/bin/cat "$answer.status")"
"""


class FakeSystem:
    """A folder of such programs, which is all of PATH.

    Args:
        folder: where they are, and what they note.
        programs: their names.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *programs: str) -> None:
        self._folder = folder
        for name in ("bin", "answers"):
            (folder / name).mkdir(parents=True)
        for name in programs:
            path = folder / "bin" / name
            path.write_text(_PROGRAM)
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder / "bin"))

    def answer(self, command: str, text: str = "", *, errors: str = "", status: int = 0) -> None:
        """Make a program answer its first word that is no option: `systemctl show`."""
        answer = self._folder / "answers" / command
        answer.write_text(text)
        answer.with_name(f"{command}.errors").write_text(errors)
        answer.with_name(f"{command}.status").write_text(str(status))

    def calls(self) -> list[str]:
        """Return the commands since the last look, but questions how it is."""
        calls = self._folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return [line for line in lines if not re.match(r"systemctl (--user )?is-", line)]


def said(change: Any, service: Installation, **options: bool) -> list[str]:
    """Install or uninstall, and return what was said."""
    lines: list[str] = []
    change(service, lines.append, **{"force": False, "dry_run": False} | options)
    return lines


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    """A Linux machine with systemd."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    fake = FakeSystem(tmp_path / "fake", monkeypatch, "systemctl", "systemd-analyze", "journalctl")
    fake.answer("systemctl is-system-running", "running\n")
    return fake
