"""umbel as a service of systemd, whose programs are stood in for."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from umbel.daemon import installation
from umbel.daemon.errors import ServiceError
from umbel.daemon.installation import Umbel
from umbel.daemon.installation.systemd import Systemd

from .fake_system import UMBEL, FakeSystem, linux, said

__all__ = ["linux"]

NO_DEVICE = Path("/nowhere")


def units(tmp_path: Path, *, system: bool = False, umbel: Umbel = UMBEL) -> Systemd:
    """The units, in a folder of this test's."""
    return Systemd(umbel, system=system, folder=tmp_path / "units", device=NO_DEVICE)


@pytest.mark.parametrize("system", [False, True])
def test_units_are_written_checked_and_started(
    linux: FakeSystem, tmp_path: Path, *, system: bool
) -> None:
    """In this order; each thing done is told, and the umbel that runs now is what they run."""
    scope = "" if system else "--user "
    lines = said(installation.install, units(tmp_path, system=system))
    checked, *calls = linux.calls()
    assert checked.startswith(f"systemd-analyze {scope}verify ")
    assert calls == [
        f"systemctl {scope}daemon-reload",
        f"systemctl {scope}enable --now --no-block umbel.socket umbel.service",
    ]
    written = [tmp_path / "units" / name for name in ("umbel.service", "umbel.socket")]
    assert lines[:2] == [f"wrote {path}" for path in written]
    assert [line.partition(":")[0] for line in lines[2:]] == [f"ran {call}" for call in calls]
    assert "\nExecStart=/opt/umbel/bin/umbel serve\n" in written[0].read_text()
    assert "/usr/local" not in written[0].read_text()
    wanted = "multi-user.target" if system else "default.target"
    assert f"\nWantedBy={wanted}\n" in written[0].read_text()


def test_what_did_not_change_is_left(linux: FakeSystem, tmp_path: Path) -> None:
    """A second installation stops nothing; one of another umbel ends the one before first."""
    said(installation.install, units(tmp_path))
    linux.calls()
    lines = said(installation.install, units(tmp_path))
    assert [line.split()[0] for line in lines] == ["left", "left", "ran", "ran"]
    assert not [call for call in linux.calls() if "stop" in call]
    other = Umbel(["/opt/other/umbel", "serve"], [Path("/opt/other")])
    said(installation.install, units(tmp_path, umbel=other))
    assert linux.calls()[1] == "systemctl --user stop umbel.service umbel.socket"
    assert "/opt/other/umbel" in (tmp_path / "units/umbel.service").read_text()


def test_a_service_that_was_given_up_starts_again(linux: FakeSystem, tmp_path: Path) -> None:
    """A unit that failed too often is started only after systemd is told to forget that."""
    linux.answer("systemctl is-failed", "failed\nactive\n")
    lines = said(installation.install, units(tmp_path))
    assert linux.calls()[1:] == [
        "systemctl --user daemon-reload",
        "systemctl --user reset-failed umbel.service",
        "systemctl --user enable --now --no-block umbel.socket umbel.service",
    ]
    assert "reset-failed umbel.service: systemd forgets how often they failed" in lines[3]


@pytest.mark.parametrize("change", [installation.install, installation.uninstall])
@pytest.mark.parametrize("text", ["[Service]\n", None])
def test_an_edited_unit_is_kept(
    linux: FakeSystem, tmp_path: Path, change: Any, text: str | None
) -> None:
    path = tmp_path / "units" / "umbel.service"
    said(installation.install, units(tmp_path))
    edited = text or path.read_text().replace("RestartSec=5s", "RestartSec=9s")
    path.write_text(edited)
    linux.calls()
    with pytest.raises(ServiceError, match=r"umbel\.service was changed.*--force"):
        said(change, units(tmp_path))
    assert path.read_text() == edited
    assert linux.calls() == []
    said(change, units(tmp_path), force=True)
    assert not path.exists() or "RestartSec=5s" in path.read_text()


@pytest.mark.parametrize("change", [installation.install, installation.uninstall])
def test_a_dry_run_does_nothing(linux: FakeSystem, tmp_path: Path, change: Any) -> None:
    """It says what would be written and run."""
    if change is installation.uninstall:
        said(installation.install, units(tmp_path))
        linux.calls()
    before = sorted(tmp_path.rglob("units/*"))
    lines = said(change, units(tmp_path), dry_run=True)
    assert sorted(tmp_path.rglob("units/*")) == before
    assert not [call for call in linux.calls() if call.startswith("systemctl")]
    told = [line for line in lines if line.startswith("would ")]
    assert any(line.startswith("would run systemctl --user daemon-reload") for line in told)
    if change is installation.install:
        assert "    ExecStart=/opt/umbel/bin/umbel serve" in lines


def test_nothing_stays_of_the_units(linux: FakeSystem, tmp_path: Path) -> None:
    """They stop first. State and settings stay, and are named."""
    state = tmp_path / "home/.cache/umbel"
    state.mkdir(parents=True)
    service = units(tmp_path)
    said(installation.install, service)
    linux.calls()
    lines = said(installation.uninstall, service)
    assert linux.calls() == [
        "systemctl --user disable --now umbel.socket umbel.service",
        "systemctl --user daemon-reload",
    ]
    assert list((tmp_path / "units").iterdir()) == []
    assert "journal" in lines[-1]
    with pytest.raises(ServiceError, match="not installed"):
        said(installation.uninstall, service)


def test_a_machine_with_gpus_gets_the_drop_in(linux: FakeSystem, tmp_path: Path) -> None:
    """The system's unit sees no device otherwise. It goes with the units."""
    service = Systemd(UMBEL, system=True, folder=tmp_path / "units", device=tmp_path)
    said(installation.install, service)
    assert (tmp_path / "units/umbel.service.d/nvidia.conf").is_file()
    said(installation.uninstall, service)
    assert list((tmp_path / "units").iterdir()) == []
    assert linux.calls()


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("offline", r"says offline"),
        ("no systemd", r"no systemd here"),
        ("a user", r"use sudo, or --user"),
        ("a home", r"/home/ada is in a home"),
        ("bad units", r"refuses the units: umbel\.service:1: no$"),
        ("a failing start", r"`systemctl enable .*` failed with status 4: no$"),
        ("a file in the way", r"cannot read .*/umbel\.service: Not a directory$"),
        ("no place to write", r"cannot write .*/umbel\.service: Is a directory$"),
    ],
)
def test_what_cannot_be_installed_is_refused_in_a_sentence(
    linux: FakeSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    problem: str,
    expected: str,
) -> None:
    """And where the problem is known before, nothing is written."""
    umbel = UMBEL
    match problem:
        case "offline":
            linux.answer("systemctl is-system-running", "offline\n", status=1)
        case "no systemd":
            monkeypatch.setenv("PATH", str(tmp_path))
        case "a user":
            monkeypatch.setattr(os, "geteuid", lambda: 1000)
        case "a home":
            umbel = Umbel(UMBEL.command, [Path("/opt"), Path("/home/ada")])
        case "bad units":
            linux.answer("systemd-analyze verify", errors="umbel.service:1: no", status=1)
        case "a failing start":
            linux.answer("systemctl enable", errors="no\n", status=4)
        case "a file in the way":
            (tmp_path / "units").write_text("")
        case _:
            (tmp_path / "units/.umbel.service.new").mkdir(parents=True)
    with pytest.raises(ServiceError, match=expected):
        said(installation.install, units(tmp_path, system=True, umbel=umbel))
    written = [path.name for path in tmp_path.glob("units/umbel.*")]
    assert bool(written) == (problem == "a failing start")


def test_words_of_the_command_are_neither_split_nor_replaced(
    linux: FakeSystem, tmp_path: Path
) -> None:
    """As systemd.service(5) has it."""
    umbel = Umbel(['/opt/my "umbel"/100%/$HOME/a\\b', "serve"], [Path("/opt")])
    (service, *_) = units(tmp_path, umbel=umbel).files()
    start = r'ExecStart="/opt/my \"umbel\"/100%%/$$HOME/a\\b" serve'
    assert start in service.text.splitlines()
    assert linux.calls() == []


SHOWN = """LoadState=loaded
ActiveState={0}
SubState={1}
MainPID={2}
StateChangeTimestamp=Mon 2026-11-23 01:00:00 UTC
NRestarts={3}
Result={4}
ExecMainStatus=1
Listen=/run/umbel/umbel.sock (Stream)
"""


@pytest.mark.parametrize(
    ("shown", "pid", "reason"),
    [
        (("active", "running", 42, 0, "success"), "42", ""),
        (("active", "running", 42, 3, "exit-code"), "42", ""),
        (("inactive", "dead", 0, 0, "success"), "", ""),
        (("activating", "auto-restart", 0, 2, "exit-code"), "", "it ended with status 1"),
        (("activating", "auto-restart", 0, 2, "watchdog"), "", "its engine stalled"),
        (("failed", "failed", 0, 5, "exit-code"), "", "with status 1, and systemd starts it no"),
        (("failed", "failed", 0, 5, "start-limit-hit"), "", "reset-failed umbel.service"),
        (("failed", "failed", 0, 0, "resources"), "", "systemd says resources"),
    ],
)
def test_status_is_what_systemd_says(
    linux: FakeSystem, tmp_path: Path, shown: tuple[object, ...], pid: str, reason: str
) -> None:
    """With the reason where it does not run as it should, and the last line of its log then."""
    linux.answer("systemctl show", SHOWN.format(*shown))
    linux.answer("journalctl _SYSTEMD_UNIT=umbel.service", "umbel: there is no model\n")
    status = units(tmp_path, system=True).status()
    assert status.state == f"{shown[0]} ({shown[1]})"
    assert (status.pid, status.runs) == (pid, bool(pid))
    assert status.since == "Mon 2026-11-23 01:00:00 UTC"
    assert status.restarts == str(shown[3])
    assert status.socket == Path("/run/umbel/umbel.sock")
    assert reason in status.reason
    assert bool(status.reason) == bool(reason)
    assert status.last_line == ("umbel: there is no model" if reason else "")


def test_units_that_are_not_there_have_no_status(linux: FakeSystem, tmp_path: Path) -> None:
    """The sentence says what else to try."""
    linux.answer("systemctl show", "LoadState=not-found\n")
    with pytest.raises(ServiceError, match=r"not installed.*--system"):
        units(tmp_path).status()


def test_the_journal_is_followed(linux: FakeSystem, tmp_path: Path) -> None:
    """By journalctl, whose exit status counts."""
    linux.answer("journalctl umbel", status=3)
    assert units(tmp_path).follow_log() == 3
    assert linux.calls() == ["journalctl --user -u umbel -f"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("system", [False, True])
def test_systemd_understands_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, system: bool
) -> None:
    """systemd-analyze has nothing to say of them, and finds a planted word."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    service = units(tmp_path, system=system, umbel=Umbel(["/bin/true", "serve"], []))
    files = service.files()
    assert service.check(files) == []
    planted = [file._replace(text=f"{file.text}Frobnicate=yes\n") for file in files]
    assert len([line for line in service.check(planted) if "Frobnicate" in line]) == 2


def test_a_users_units_are_the_systems_in_what_both_have(tmp_path: Path) -> None:
    """Times and restarts are the same; only the scope differs."""
    times = ("RestartSec", "TimeoutStart", "TimeoutStop", "WatchdogSec", "StartLimit")
    keys: tuple[str, ...] = (
        "Type",
        "NotifyAccess",
        "ExecStart",
        "Restart=",
        "WatchdogSignal",
        "KillMode",
    )
    keys += ("LimitCORE", "UMask", "NoNewPrivileges", "Requires", "ListenStream")
    told = []
    for system in (False, True):
        service, socket = units(tmp_path, system=system).files()
        lines = f"{service.text}{socket.text}".splitlines()
        told.append([line for line in lines if line.startswith(keys + times)])
    assert told[0] == told[1]
    assert len(told[0]) > len(keys + times)
