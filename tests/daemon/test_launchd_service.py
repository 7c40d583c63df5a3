"""umbel as a job of launchd, whose programs are stood in for."""

import asyncio
import os
import plistlib
import pwd
import sys
from pathlib import Path

import platformdirs
import pytest
from platformdirs.macos import MacOS

from umbel.daemon import installation
from umbel.daemon.config import default_socket
from umbel.daemon.errors import ServiceError
from umbel.daemon.installation.launchd import Launchd
from umbel.daemon.installation.service import last_words, report

from .fake_system import UMBEL, FakeSystem, said
from .launchd_keys import JOB, faults


@pytest.fixture
def macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    """A Mac."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return FakeSystem(tmp_path / "fake", monkeypatch, "launchctl", "tail", "ps")


DOMAIN = f"gui/{os.getuid()}"
TARGET = f"{DOMAIN}/org.umbel.daemon"


def test_an_agent_is_written_and_started(macos: FakeSystem, tmp_path: Path) -> None:
    """Its folders are there before launchd makes its socket and its log in them."""
    lines = said(installation.install, installation.find(system=False, umbel=UMBEL))
    library = tmp_path / "home/Library"
    plist = library / "LaunchAgents/org.umbel.daemon.plist"
    assert macos.calls() == [
        f"launchctl print {TARGET}",
        f"launchctl enable {TARGET}",
        f"launchctl bootstrap {DOMAIN} {plist}",
        f"launchctl kickstart {TARGET}",
    ]
    assert [line.split(":")[0] for line in lines[:3]] == [
        f"made {library / 'Logs/umbel'}",
        f"made {library / 'Caches/TemporaryItems/umbel'}",
        f"wrote {plist}",
    ]
    job = plistlib.loads(plist.read_bytes())
    assert list(faults(job, JOB)) == []
    assert job["ProgramArguments"] == UMBEL.command
    assert Path(job["StandardErrorPath"]).parent.is_dir()
    folder = Path(job["Sockets"]["Listeners"]["SockPathName"]).parent
    assert folder.stat().st_mode & 0o777 == 0o700


def test_clients_find_the_agents_socket(macos: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is where the daemon listens by itself on macOS."""
    (file,) = Launchd(UMBEL, system=False).files()
    path = plistlib.loads(file.text.encode())["Sockets"]["Listeners"]["SockPathName"]
    monkeypatch.setattr(
        platformdirs, "user_runtime_path", lambda name: MacOS(name).user_runtime_path
    )
    assert path == str(default_socket())
    assert macos.calls() == []


def test_a_job_that_is_loaded_ends_first(macos: FakeSystem) -> None:
    """A plist is read when its job is loaded."""
    for _ in range(2):
        macos.calls()
        said(installation.install, installation.find(system=False, umbel=UMBEL))
    calls = [call.split()[1] for call in macos.calls()]
    assert calls == ["print", "bootout", "print", "enable", "bootstrap", "kickstart"]


def test_nothing_stays_of_the_agent(macos: FakeSystem, tmp_path: Path) -> None:
    """But what it logged and remembers, which is named."""
    service = installation.find(system=False, umbel=UMBEL)
    said(installation.install, service)
    log = tmp_path / "home/Library/Logs/umbel/umbel.log"
    log.write_text("")
    macos.calls()
    lines = said(installation.uninstall, service)
    assert [call.split()[1] for call in macos.calls()] == ["bootout", "print"]
    assert list((tmp_path / "home/Library/LaunchAgents").iterdir()) == []
    assert lines[-1] == f"{log} stays"


def test_an_edited_plist_is_kept(macos: FakeSystem, tmp_path: Path) -> None:
    """As a unit is."""
    service = installation.find(system=False, umbel=UMBEL)
    said(installation.install, service)
    plist = tmp_path / "home/Library/LaunchAgents/org.umbel.daemon.plist"
    plist.write_text(plist.read_text().replace("10240", "256"))
    with pytest.raises(ServiceError, match=r"plist was changed.*--force"):
        said(installation.install, service)
    said(installation.install, service, force=True)
    assert "10240" in plist.read_text()
    assert macos.calls()


def test_the_systems_daemon_runs_as_the_user_of_sudo(
    macos: FakeSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is that user's, in that user's home; as root it does not run."""
    ada = pwd.struct_passwd(("ada", "*", 501, 20, "", str(tmp_path / "ada"), "/bin/zsh"))
    monkeypatch.setattr(pwd, "getpwnam", {"ada": ada}.__getitem__)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", "ada")
    service = Launchd(UMBEL, system=True)
    service.require()
    (file,) = service.files()
    assert file.path == Path("/Library/LaunchDaemons/org.umbel.daemon.plist")
    job = plistlib.loads(file.text.encode())
    assert list(faults(job, JOB)) == []
    assert job["UserName"] == "ada"
    listeners = job["Sockets"]["Listeners"]
    assert (listeners["SockPathOwner"], listeners["SockPathGroup"]) == (501, 20)
    assert listeners["SockPathName"].startswith(f"{tmp_path}/ada/")
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    with pytest.raises(ServiceError, match="use sudo"):
        service.require()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("SUDO_USER")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(ServiceError, match="does not run as root"):
        Launchd(UMBEL, system=True).require()
    assert macos.calls() == []


PRINTED = """gui/501/org.umbel.daemon = {{
\tactive count = 1
\tstate = {0}

\tendpoints = {{
\t\t"x" = {{
\t\t\tstate = active
\t\t}}
\t}}
\truns = {1}
{2}
}}
"""


ENDED_WITH_1 = "\tlast exit code = 1"
LOG = """timestamp=T level=info event=listening socket=/u.sock pid=41
timestamp=T level=info event=loading model=gone backend=metal
umbel: there is no model
"""
RUNS_NOW = """timestamp=T level=info event=listening socket=/u.sock pid=42
timestamp=T level=info event=ready model=m
"""


@pytest.mark.parametrize(
    ("state", "runs", "facts", "reason"),
    [
        ("running", 1, "\tpid = 42\n\tlast exit code = (never exited)", ""),
        (
            "running",
            3,
            f"\tpid = 42\n{ENDED_WITH_1}",
            "the run before this one ended with",
        ),
        ("not running", 1, "\tlast exit code = 0", ""),
        ("not running", 1, "\tlast exit code = (never exited)", ""),
        ("spawn scheduled", 3, ENDED_WITH_1, "it ended with status 1; launchd starts it again, at"),
        ("spawn scheduled", 3, "\tlast exit code = 78: EX_CONFIG", "ended with status 78: EX_CONF"),
        ("spawn scheduled", 3, "\tlast terminating signal = Killed: 9", "was ended by Killed: 9;"),
    ],
)
def test_status_is_what_launchd_says(
    macos: FakeSystem, state: str, runs: int, facts: str, reason: str
) -> None:
    """With the reason where it does not get on, and what its log says of that."""
    service = installation.find(system=False, umbel=UMBEL)
    said(installation.install, service)
    macos.answer("launchctl print", PRINTED.format(state, runs, facts))
    macos.answer("ps lstart=", "Mon Nov 23 01:00:00 2026\n")
    macos.answer("tail 400", LOG + RUNS_NOW * (state == "running"))
    status = service.status()
    assert status.state == state
    assert (status.pid, status.runs) == (("42", True) if state == "running" else ("", False))
    assert status.since == ("Mon Nov 23 01:00:00 2026" if status.runs else "")
    assert status.restarts == str(runs - 1)
    assert reason in status.reason
    assert bool(status.reason) == bool(reason)
    assert status.last_line == ("umbel: there is no model" if reason else "")


def test_a_crash_loop_is_told_with_how_often_it_is_started(
    macos: FakeSystem, tmp_path: Path
) -> None:
    service = installation.find(system=False, umbel=UMBEL)
    said(installation.install, service)
    macos.answer("launchctl print", PRINTED.format("spawn scheduled", 9, ENDED_WITH_1))
    macos.answer("tail 400", LOG * 9)
    assert service.status().reason.endswith("at most every 10 seconds")
    plist = tmp_path / "home/Library/LaunchAgents/org.umbel.daemon.plist"
    job = plistlib.loads(plist.read_bytes())
    plist.write_bytes(plistlib.dumps({**job, "ThrottleInterval": 60}))
    told = asyncio.run(report(service.status()))
    assert told == [
        "service  spawn scheduled, restarts: 8",
        "reason   it ended with status 1; launchd starts it again, at most every 60 seconds",
        "log      umbel: there is no model",
    ]
    for text in ("", "<plist", "[]"):
        plist.write_text(text)
        assert service.status().reason.endswith("at most every 10 seconds")
        assert service.status().socket is None


FAULT = 'timestamp=T level=error event="handler failed" path=/x'
JSON_FAULT = '{"level": "error", "event": "handler failed", "timestamp": "T"}'
JSON_BEGIN = '{"socket": "/u.sock", "pid": 42, "event": "listening", "level": "info"}'
BEGIN = RUNS_NOW.splitlines()[0]
REFUSED = "timestamp=T level=info event=refused status=400"


@pytest.mark.parametrize(
    ("lines", "pid", "found"),
    [
        ([], "", ""),
        ([BEGIN, FAULT, REFUSED], "", FAULT),
        ([BEGIN, FAULT, BEGIN, REFUSED], "", REFUSED),  # killed, and another run's fault
        ([FAULT, BEGIN, REFUSED, FAULT[:-1]], "42", FAULT),
        ([JSON_FAULT, JSON_BEGIN, "x"], "42", JSON_FAULT),
        ([JSON_FAULT, REFUSED, JSON_BEGIN], "4", JSON_BEGIN),  # another one's begin
        ([BEGIN, FAULT, BEGIN, REFUSED, "umbel: setting x"], "", "umbel: setting x"),
        (["Traceback (most recent call last):", "  raise x", "mlx.OutOfError: no"], "", None),
        (["libc++abi: terminating due to", "abort"], "", "libc++abi: terminating due to"),
        (
            [BEGIN, "Fatal Python error: Aborted", "", "Thread 1:"],
            "",
            "Fatal Python error: Aborted",
        ),
    ],
)
def test_a_log_says_why_the_last_run_ended(lines: list[str], pid: str, found: str | None) -> None:
    """By its last error; what runs now has not ended."""
    assert last_words(list(lines), pid) == (lines[-1] if found is None else found)


def test_the_log_is_followed(macos: FakeSystem, tmp_path: Path) -> None:
    """By tail, also where the file is rotated."""
    assert installation.find(system=False, umbel=UMBEL).follow_log() == 0
    log = tmp_path / "home/Library/Logs/umbel/umbel.log"
    assert macos.calls() == [f"tail -n 20 -F {log}"]


def test_without_launchctl_there_is_a_sentence(
    macos: FakeSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    service = installation.find(system=False, umbel=UMBEL)
    for act in (service.require, service.status):
        with pytest.raises(ServiceError, match="no launchd here"):
            act()
    assert macos.calls() == []
