"""`umbel service` with any service manager: installation, status, and the command line."""

import asyncio
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from umbel.daemon import installation
from umbel.daemon.cli import app
from umbel.daemon.errors import ServiceError
from umbel.daemon.installation import ServiceStatus, report, running_umbel
from umbel.daemon.installation.service import shipped
from umbel.daemon.installation.steps import Program

from .fake_system import UMBEL, FakeSystem, linux

__all__ = ["linux"]


def test_other_systems_have_no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two managers that umbel knows."""
    monkeypatch.setattr(sys, "platform", "freebsd14")
    with pytest.raises(ServiceError, match="freebsd14"):
        installation.find(system=False, umbel=UMBEL)


def test_the_umbel_that_runs_now_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its absolute path, with the last link kept; a module is run by its Python."""
    for folder in ("real", "bin"):
        (tmp_path / folder).mkdir()
    program = tmp_path / "real/umbel"
    program.write_text("")
    program.chmod(0o755)
    (tmp_path / "bin/umbel").symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    for called in ("umbel", "bin/umbel", "real/../bin/umbel"):
        found = running_umbel(called)
        assert found.command == [str(tmp_path.resolve() / "bin/umbel"), "serve"]
        assert found.folders[0] == program.resolve()
    found = running_umbel("/opt/umbel/__main__.py")
    assert found.command == [sys.executable, "-m", "umbel", "serve"]


async def test_a_daemon_that_runs_says_how_it_is(short_path: Path) -> None:
    told: dict[str, Any] = {"state": "loading", "phase": "downloading", "model": None}
    served = web.Application()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(told)

    served.router.add_get("/status", answer)
    runner = web.AppRunner(served)
    await runner.setup()
    path = short_path / "s"
    await web.UnixSite(runner, str(path)).start()
    status = ServiceStatus("active (running)", runs=True, pid="42", restarts="0", socket=path)
    assert await report(status) == [
        "service  active (running), pid 42, restarts: 0",
        f"daemon   downloading: no model yet on {path}",
    ]
    told.update(state="ready", phase=None, model={"name": "smollm2"})
    assert (await report(status))[-1] == f"daemon   ready: smollm2 on {path}"
    assert len(await report(status._replace(runs=False))) == 1
    await runner.cleanup()
    failed = status._replace(reason="it ended with status 1", last_line="umbel: no model")
    lines = await asyncio.wait_for(report(failed), 60)
    assert lines[1:3] == ["reason   it ended with status 1", "log      umbel: no model"]
    assert "no daemon answers" in lines[3]


COMMANDS = """
import sys
from umbel.daemon.cli import app
for words in (["install"], ["status"], ["logs"], ["uninstall", "--dry-run"], ["uninstall"]):
    try:
        app(["service", *words])
    except SystemExit as end:
        print(*words, end.code, flush=True)
assert not {"mlx", "mlx_lm", "umbel.models", "umbel.scheduler"} & set(sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="with systemd's programs")
def test_the_commands_run_without_mlx(
    linux: FakeSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line: each does its part where a user's units are, and says how it ended."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    linux.answer("systemctl show", SHOWN)
    linux.answer("journalctl umbel", "the log\n", status=2)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    ends = ["install 0", "status 1", "logs 2", "uninstall --dry-run 0", "uninstall 0"]
    assert [line for line in told if line in ends] == ends
    units = tmp_path / "config/systemd/user"
    assert told[0] == f"wrote {units / 'umbel.service'}"
    assert "service  failed (failed), since Mon, restarts: 5" in told
    assert "the log" in told
    assert f"would remove {units / 'umbel.socket'}" in told
    assert f"removed {units / 'umbel.socket'}" in told
    assert list(units.iterdir()) == []


SHOWN = """LoadState=loaded
ActiveState=failed
SubState=failed
MainPID=0
StateChangeTimestamp=Mon
NRestarts=5
Result=start-limit-hit
"""


def test_a_program_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the command, and where to look. The bound is over systemd's own."""
    waits = tmp_path / "systemctl"
    waits.write_text("#!/bin/sh\nexec sleep 60\n")
    waits.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ServiceError, match=r"`systemctl stop a` did not end within 0\.1 seconds"):
        Program("systemctl", longest=0.1).do("stop", "a")
    (most,) = re.findall(
        r"^TimeoutStopSec=(\d+)", shipped("systemd", "umbel.service"), re.MULTILINE
    )
    assert inspect.signature(Program).parameters["longest"].default > int(most)


def test_where_nothing_manages_services_the_command_says_so(
    linux: FakeSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a sentence, with status 1."""
    linux.answer("systemctl is-system-running", "offline\n", status=1)
    for name in ("install", "uninstall", "status", "logs"):
        with pytest.raises(SystemExit) as end:
            app(["service", name])
        assert end.value.code == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("umbel: systemd does not run for this user: ")
