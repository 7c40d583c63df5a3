"""umbel as a job of launchd: an agent of this user's session, or a daemon of the system."""

import os
import plistlib
import pwd
import re
import time
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from ..errors import ServiceError
from .service import (
    LOG_LINES,
    ServiceStatus,
    Umbel,
    follow_file,
    last_words,
    log_file,
    not_installed,
    not_root,
    shipped,
)
from .steps import Program, ServiceFile, Step, command, folder, remove, seal, write

_LABEL = "org.umbel.daemon"
_FILE = f"{_LABEL}.plist"
_THROTTLE = 10  # seconds between two starts, if a plist does not say
_POLL = 0.5  # seconds
_FACT = re.compile(r"^\t(\w[\w ]*) = (.*)$", re.MULTILINE)
"""A line of `launchctl print` about the job itself; its parts are indented further."""


class Launchd:
    """umbel's job.

    Args:
        umbel: that it runs.
        system: it is the system's, and starts before a user logs in.
    """

    def __init__(self, umbel: Umbel, *, system: bool) -> None:
        self._umbel, self._is_system = umbel, system
        self._owner, home = _owner(system=system)
        library = home / "Library"
        # Where clients of this user look (`default_socket`).
        self._socket = library / "Caches" / "TemporaryItems" / "umbel" / "umbel.sock"
        self._log = library / "Logs" / "umbel" / "umbel.log"
        self._kept = [library / "Application Support" / "umbel", library / "Caches" / "umbel"]
        place = Path("/Library/LaunchDaemons") if system else library / "LaunchAgents"
        self._plist = place / _FILE
        self._launchctl = Program("launchctl")
        self._domain = "system" if system else f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{_LABEL}"

    def require(self) -> None:
        """Refuse a system without launchd, or a user that may not install.

        Raises:
            ServiceError: it names the fault.
        """
        self._require_launchd()
        if self._is_system and os.geteuid() != 0:
            raise not_root()
        if self._is_system and self._owner.pw_uid == 0:
            raise ServiceError("umbel does not run as root: use sudo as the user it is to run as")

    def _require_launchd(self) -> None:
        if not self._launchctl.is_there():
            raise ServiceError("there is no launchd here: launchctl is not in PATH")

    def files(self) -> list[ServiceFile]:
        """Make the plist that umbel ships, with the paths of this machine."""
        job = plistlib.loads(shipped("launchd", _FILE).encode())
        job["ProgramArguments"] = self._umbel.command
        job["StandardErrorPath"] = str(self._log)
        listeners = job["Sockets"]["Listeners"]
        listeners["SockPathName"] = str(self._socket)
        if self._is_system:
            job["UserName"] = self._owner.pw_name
            listeners["SockPathOwner"] = self._owner.pw_uid
            listeners["SockPathGroup"] = self._owner.pw_gid
        text = plistlib.dumps(job, sort_keys=False).decode()
        return [ServiceFile(self._plist, seal(text, after=1, comment="<!-- {} -->"))]

    def check(self, files: list[ServiceFile]) -> list[str]:
        """Read the plist as launchd does."""
        for file in files:
            plistlib.loads(file.text.encode())
        return []

    def paths(self) -> list[Path]:
        """List the plist if it is there."""
        return [self._plist] if self._plist.exists() else []

    def to_install(self, files: list[ServiceFile]) -> list[Step]:
        """List the steps: write, load, start; a loaded job ends first."""
        ctl = self._launchctl
        steps = [folder(self._log.parent, self._owner), folder(self._socket.parent, self._owner)]
        if ctl.is_there() and self._facts() is not None:
            steps.append(self._to_end("the old job ends"))
        steps += [write(file) for file in files]
        when = "the system does" if self._is_system else "you log in"
        load = ("bootstrap", self._domain, str(self._plist))
        return [
            *steps,
            command(ctl, "enable", self._target, why="it may start"),
            command(ctl, *load, why=f"it starts whenever {when}"),
            command(ctl, "kickstart", self._target, why="it starts now"),
        ]

    def to_uninstall(self, paths: list[Path]) -> list[Step]:
        """List the steps: end the job, and remove its plist."""
        return [self._to_end("it ends, and starts no more"), *(remove(path) for path in paths)]

    def _to_end(self, why: str) -> Step:
        words = f"{self._launchctl.line('bootout', self._target)}: {why}"
        return Step(("run", "ran"), words, self._end)

    def _end(self) -> None:
        """Unload the job, and wait until it has ended."""
        within = plistlib.loads(shipped("launchd", _FILE).encode())["ExitTimeOut"] + 10
        deadline = time.monotonic() + within
        self._launchctl.ask("bootout", self._target)  # it fails while the job is ending
        while self._facts() is not None:
            if time.monotonic() > deadline:
                raise ServiceError(f"{self._target} does not end within {within:g} seconds")
            time.sleep(_POLL)

    def leftovers(self) -> list[str]:
        """Name the folders of the daemon, and its log, that stay."""
        return [f"{path} stays" for path in (*self._kept, self._log) if path.exists()]

    def status(self) -> ServiceStatus:
        """Ask launchd, and the log if the last run failed.

        launchd restarts such a daemon: the reason may be that of the run before this one.

        Raises:
            ServiceError: it is not installed.
        """
        self._require_launchd()
        if not self._plist.exists():
            raise not_installed()
        facts = self._facts()
        if facts is None:
            return ServiceStatus("not loaded", runs=False, reason="launchd does not know the job")
        job, pid, runs = self._job(), facts.get("pid", ""), facts.get("runs", "")
        reason = _reason(facts, job.get("ThrottleInterval", _THROTTLE))
        return ServiceStatus(
            state=facts.get("state", "unknown"),
            runs=bool(pid),
            pid=pid,
            since=Program("ps").ask("-o", "lstart=", "-p", pid).text.strip() if pid else "",
            restarts=str(max(int(runs) - 1, 0)) if runs.isdecimal() else "",
            reason=reason,
            last_line=self._last_line(pid) if reason else "",
            socket=_listens_on(job),
        )

    def _facts(self) -> dict[str, str] | None:
        """Ask launchctl about the job; None if it is not loaded."""
        answer = self._launchctl.ask("print", self._target)
        if answer.status:
            return None
        facts: dict[str, str] = {}
        for name, value in _FACT.findall(answer.text):
            facts.setdefault(name, value)
        return facts

    def _job(self) -> dict[str, Any]:
        """Read the plist, which a user may have edited; empty if it is none."""
        try:
            job = plistlib.loads(self._plist.read_bytes())
        except (OSError, plistlib.InvalidFileException, ExpatError, ValueError):
            return {}
        return job if isinstance(job, dict) else {}

    def _last_line(self, pid: str) -> str:
        lines = Program("tail").ask("-n", str(LOG_LINES), str(self._log)).text.splitlines()
        return last_words(lines, pid)

    def follow_log(self) -> int:
        """Show the settings' `log_file`, or the file that launchd writes, until interrupted."""
        return follow_file(log_file() or self._log)


def _owner(*, system: bool) -> tuple[pwd.struct_passwd, Path]:
    """Find the daemon's user and home: of the system's daemon, the user of sudo."""
    name = os.environ.get("SUDO_USER") if system else None
    if name is None:
        return pwd.getpwuid(os.getuid()), Path.home()
    user = pwd.getpwnam(name)
    return user, Path(user.pw_dir)


def _listens_on(job: dict[str, Any]) -> Path | None:
    try:
        return Path(job["Sockets"]["Listeners"]["SockPathName"])
    except (KeyError, TypeError):
        return None


def _reason(facts: dict[str, str], throttle: int) -> str:
    """Say why it does not run, or was restarted; empty if it ended in order.

    Args:
        facts: of launchctl.
        throttle: seconds between two starts, at least.
    """
    code = facts.get("last exit code", "0")
    if (ended := facts.get("last terminating signal")) is not None:
        how = f"was ended by {ended}"
    elif code in ("0", "(never exited)"):
        return ""
    else:
        how = f"ended with status {code}"
    if "pid" in facts:
        return f"the run before this one {how}, and launchd started it again"
    return f"it {how}; launchd starts it again, at most every {throttle} seconds"
