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
from .program import Program
from .refusals import not_installed, not_root
from .service_file import ServiceFile, seal
from .service_log import LINES, follow, last_words, log_file
from .service_status import ServiceStatus
from .step import Step, command, folder, remove, write
from .umbel import Umbel, shipped

LABEL = "org.umbel.daemon"
_FILE = f"{LABEL}.plist"
_THROTTLE = 10  # seconds between two starts, where a plist says nothing
_POLL = 0.5  # seconds between two looks at a job that ends
_FACT = re.compile(r"^\t(\w[\w ]*) = (.*)$", re.MULTILINE)
"""A line of `launchctl print` about the job itself; what is below it is indented further."""


class Launchctl(Program):
    """launchctl, for one job.

    Args:
        domain: where the job is: `system`, or a user's session.
    """

    def __init__(self, domain: str) -> None:
        super().__init__("launchctl")
        self.domain = domain
        self.target = f"{domain}/{LABEL}"

    def facts(self) -> dict[str, str] | None:
        """Ask what it knows of the job; None if that is not loaded."""
        answer = self.ask("print", self.target)
        if answer.status:
            return None
        facts: dict[str, str] = {}
        for name, value in _FACT.findall(answer.text):
            facts.setdefault(name, value)
        return facts

    def end(self, within: float) -> None:
        """Unload the job, and wait until it has ended.

        Raises:
            ServiceError: it has not, in this time.
        """
        deadline = time.monotonic() + within
        self.ask("bootout", self.target)  # which fails while the job takes its time to end
        while self.facts() is not None:
            if time.monotonic() > deadline:
                raise ServiceError(f"{self.target} does not end within {within:g} seconds")
            time.sleep(_POLL)


class Launchd:
    """umbel's job.

    Args:
        umbel: what it runs.
        system: it is the system's, and starts before anybody logs in.
        folder: where its plist is.
    """

    def __init__(self, umbel: Umbel, *, system: bool, folder: Path | None = None) -> None:
        self._umbel, self._is_system = umbel, system
        self._owner, home = _owner(system=system)
        library = home / "Library"
        # Where clients of this user look (`default_socket`).
        self._socket = library / "Caches" / "TemporaryItems" / "umbel" / "umbel.sock"
        self._log = library / "Logs" / "umbel" / "umbel.log"
        self._kept = [library / "Application Support" / "umbel", library / "Caches" / "umbel"]
        place = Path("/Library/LaunchDaemons") if system else library / "LaunchAgents"
        self._plist = (folder or place) / _FILE
        self._launchctl = Launchctl("system" if system else f"gui/{os.getuid()}")

    def require(self) -> None:
        """Refuse where there is no launchd, or this user may not."""
        self._require_launchd()
        if self._is_system and os.geteuid() != 0:
            raise not_root()
        if self._is_system and self._owner.pw_uid == 0:
            raise ServiceError("umbel does not run as root: use sudo as the user it is to run as")

    def _require_launchd(self) -> None:
        if not self._launchctl.is_there():
            raise ServiceError("there is no launchd here: launchctl is not in PATH")

    def files(self) -> list[ServiceFile]:
        """Take the plist that umbel ships, with the paths of this machine."""
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
        """Read it as launchd does."""
        for file in files:
            plistlib.loads(file.text.encode())
        return []

    def paths(self) -> list[Path]:
        """List the plist if it is there."""
        return [self._plist] if self._plist.exists() else []

    def to_install(self, files: list[ServiceFile]) -> list[Step]:
        """Write, load and start; a job that is loaded ends first."""
        ctl = self._launchctl
        steps = [folder(self._log.parent, self._owner), folder(self._socket.parent, self._owner)]
        if ctl.is_there() and ctl.facts() is not None:
            steps.append(self._end("the one before ends"))
        steps += [write(file) for file in files]
        when = "the system does" if self._is_system else "you log in"
        return [
            *steps,
            command(ctl, "enable", ctl.target, why="it may start"),
            command(
                ctl, "bootstrap", ctl.domain, str(self._plist), why=f"it starts whenever {when}"
            ),
            command(ctl, "kickstart", ctl.target, why="it starts now"),
        ]

    def to_uninstall(self, paths: list[Path]) -> list[Step]:
        """End it, and remove its plist."""
        return [self._end("it ends, and starts no more"), *(remove(path) for path in paths)]

    def _end(self, why: str) -> Step:
        job = plistlib.loads(shipped("launchd", _FILE).encode())
        ctl = self._launchctl
        what = f"{ctl.line('bootout', ctl.target)}: {why}"
        return Step(("run", "ran"), what, lambda: ctl.end(job["ExitTimeOut"] + 10))

    def leftovers(self) -> list[str]:
        """Name the folders of the daemon, and its log."""
        return [f"{path} stays" for path in (*self._kept, self._log) if path.exists()]

    def status(self) -> ServiceStatus:
        """Ask launchd, and the log for what it says of an end that was none in order.

        launchd starts such a daemon again and again: also of one that runs it is told how the one
        before ended.
        """
        self._require_launchd()
        if not self._plist.exists():
            raise not_installed()
        facts = self._launchctl.facts()
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
            last_line=_last_words(self._log, pid) if reason else "",
            socket=_listens_on(job),
        )

    def _job(self) -> dict[str, Any]:
        """Read the plist, which may be somebody's own; nothing where it is none."""
        try:
            job = plistlib.loads(self._plist.read_bytes())
        except (OSError, plistlib.InvalidFileException, ExpatError, ValueError):
            return {}
        return job if isinstance(job, dict) else {}

    def follow_log(self) -> int:
        """Have tail show it: the settings' `log_file`, or what launchd writes."""
        return follow(log_file() or self._log)


def _owner(*, system: bool) -> tuple[pwd.struct_passwd, Path]:
    """Find whose daemon it is, and that user's home: of sudo's, the one who used it."""
    name = os.environ.get("SUDO_USER") if system else None
    if name is None:
        return pwd.getpwuid(os.getuid()), Path.home()
    user = pwd.getpwnam(name)
    return user, Path(user.pw_dir)


def _listens_on(job: dict[str, Any]) -> Path | None:
    """Say where the job's socket is."""
    try:
        return Path(job["Sockets"]["Listeners"]["SockPathName"])
    except (KeyError, TypeError):
        return None


def _reason(facts: dict[str, str], throttle: int) -> str:
    """Say why it does not run, or had to be started anew; nothing where it ended in order.

    Args:
        facts: what launchd knows.
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
        return f"the one before {how}, and launchd started it anew"
    return f"it {how}; launchd starts it anew, at most every {throttle} seconds"


def _last_words(log: Path, pid: str) -> str:
    lines = Program("tail").ask("-n", str(LINES), str(log)).text.splitlines()
    return last_words(lines, pid)
