"""umbel as a service of systemd: units of the system, or of one user's manager."""

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import platformdirs

from ..errors import ServiceError
from .service import ServiceStatus, Umbel, follow_file, log_file, not_installed, not_root, shipped
from .steps import Program, ServiceFile, Step, command, remove, seal, write

_SERVICE, _SOCKET = _UNITS = ("umbel.service", "umbel.socket")
_NVIDIA = "umbel.service.d/nvidia.conf"
_DEVICE = Path("/dev/nvidiactl")
_NOT_RUNNING = ("offline", "unknown", "")
"""Answers of a systemd that manages nothing."""
_HIDDEN = [Path("/home"), Path("/root"), Path("/run/user")]
"""Folders that ProtectHome hides from a service."""
_BASES = {"Configuration": "/etc", "Cache": "/var/cache", "State": "/var/lib"}
_PROPERTIES = (
    "LoadState,ActiveState,SubState,MainPID,StateChangeTimestamp,NRestarts,Result,ExecMainStatus"
)
_REASONS = {
    "exit-code": "it ended with status {ExecMainStatus}",
    "signal": "signal {ExecMainStatus} ended it",
    "core-dump": "signal {ExecMainStatus} ended it",
    "watchdog": "its engine stalled, and systemd ended it",
    "timeout": "it did not start or stop in time",
    "oom-kill": "the system was short of memory",
    "start-limit-hit": "it failed too often",
}


class Systemd:
    """umbel's units.

    Args:
        umbel: that they run.
        system: they are the system's, and not this user's.
        folder: of the units.
        device: a file that a machine with NVIDIA GPUs has.
    """

    def __init__(
        self,
        umbel: Umbel,
        *,
        system: bool,
        folder: Path | None = None,
        device: Path = _DEVICE,
    ) -> None:
        self._umbel, self._is_system, self._device = umbel, system, device
        own = platformdirs.user_config_path("systemd") / "user"
        self._folder = folder or (Path("/etc/systemd/system") if system else own)
        self._scope = () if system else ("--user",)
        self._systemctl = Program("systemctl", *self._scope)

    def require(self) -> None:
        """Refuse a system without systemd, or a user that may not install.

        Raises:
            ServiceError: it names the fault.
        """
        if self._is_system and os.geteuid() != 0:
            raise not_root()
        self._require_systemd()

    def _require_systemd(self) -> None:
        otherwise = "start `umbel serve` from this machine's own init system"
        if not self._systemctl.is_there():
            raise ServiceError(f"there is no systemd here: systemctl is not in PATH; {otherwise}")
        state = self._systemctl.ask("is-system-running").text.strip()
        if state in _NOT_RUNNING:
            where = "here" if self._is_system else "for this user"
            asked = self._systemctl.line("is-system-running")
            raise ServiceError(
                f"systemd does not run {where}: `{asked}` says {state or 'nothing'}; {otherwise}"
            )

    def files(self) -> list[ServiceFile]:
        """Make the units that umbel ships, with the path of this umbel.

        Raises:
            ServiceError: the service could not run this umbel.
        """
        folder = ("systemd",) if self._is_system else ("systemd", "user")
        service = shipped(*folder, _SERVICE)
        if self._is_system:
            self._refuse_hidden(service)
        start = " ".join(_quoted(word) for word in self._umbel.command)
        line = re.compile(r"^ExecStart=.*$", re.MULTILINE)
        service, count = line.subn(lambda _: f"ExecStart={start}", service)
        if count != 1:
            raise RuntimeError(f"{_SERVICE} has {count} lines ExecStart")
        texts = {_SERVICE: service, _SOCKET: shipped(*folder, _SOCKET)}
        if self._is_system and self._device.exists():
            texts[_NVIDIA] = shipped("systemd", _NVIDIA)
        return [ServiceFile(self._folder / name, seal(text)) for name, text in texts.items()]

    def _refuse_hidden(self, service: str) -> None:
        """Refuse an umbel in a user's home, which ProtectHome hides."""
        if "ProtectHome=yes" not in service.splitlines():
            return
        for folder in self._umbel.folders:
            if any(folder.is_relative_to(hidden) for hidden in _HIDDEN):
                raise ServiceError(
                    f"{folder} is in a home, which the system's service does not see; "
                    "install umbel, and its Python, elsewhere, such as in /opt, or use --user"
                )

    def check(self, files: list[ServiceFile]) -> list[str]:
        """Verify the files with systemd-analyze, and return its remarks.

        Raises:
            ServiceError: it refuses them.
        """
        analyze = Program("systemd-analyze", *self._scope)
        runs = self._is_system or "XDG_RUNTIME_DIR" in os.environ  # or it finds no user's manager
        if not (analyze.is_there() and runs):
            return []
        with TemporaryDirectory() as scratch:
            for file in files:
                path = scratch / file.path.relative_to(self._folder)
                path.parent.mkdir(exist_ok=True)
                path.write_text(file.text, encoding="utf-8")
            answer = analyze.ask("verify", *(f"{scratch}/{unit}" for unit in _UNITS))
            remarks = answer.errors.replace(f"{scratch}/", "").strip().splitlines()
        if answer.status:
            raise ServiceError(f"systemd-analyze refuses the units: {' '.join(remarks)}")
        return [f"systemd-analyze: {line}" for line in remarks if "umbel" in line]

    def paths(self) -> list[Path]:
        """List the units, and the drop-in for GPUs, that are there."""
        paths = [self._folder / name for name in (*_UNITS, _NVIDIA)]
        return [path for path in paths if path.exists()]

    def to_install(self, files: list[ServiceFile]) -> list[Step]:
        """List the steps: write, load, enable and start."""
        steps: list[Step] = []
        if any(file.is_outdated() for file in files):
            steps.append(command(self._systemctl, "stop", *_UNITS, why="the old service ends"))
        steps += [write(file) for file in files]
        steps.append(command(self._systemctl, "daemon-reload", why="systemd reads the new units"))
        if failed := self._failed():  # systemd would refuse to start them
            why = "systemd forgets how often they failed"
            steps.append(command(self._systemctl, "reset-failed", *failed, why=why))
        # --no-block: a first start may download a model.
        words = ("enable", "--now", "--no-block", _SOCKET, _SERVICE)
        when = "the system does" if self._is_system else "you log in"
        why = f"they start now, and whenever {when}"
        return [*steps, command(self._systemctl, *words, why=why)]

    def _failed(self) -> list[str]:
        if not self._systemctl.is_there():
            return []
        states = self._systemctl.ask("is-failed", *_UNITS).text.split()
        return [unit for unit, state in zip(_UNITS, states, strict=False) if state == "failed"]

    def to_uninstall(self, paths: list[Path]) -> list[Step]:
        """List the steps: stop, disable, remove and load."""
        words = ("disable", "--now", _SOCKET, _SERVICE)
        stop = command(self._systemctl, *words, why="they are stopped, and start no more")
        load = command(self._systemctl, "daemon-reload", why="systemd forgets the units")
        return [stop, *(remove(path) for path in paths), load]

    def leftovers(self) -> list[str]:
        """Name the folders of the daemon that stay, as its unit has them."""
        if self._is_system:
            unit = shipped("systemd", _SERVICE)
            named = re.findall(r"^(\w+)Directory=(\S+)$", unit, re.MULTILINE)
            folders = [Path(_BASES[kind], name) for kind, name in named if kind in _BASES]
        else:
            folders = [
                platformdirs.user_config_path("umbel"),
                platformdirs.user_cache_path("umbel"),
                platformdirs.user_data_path("umbel"),
            ]
        there = [f"{path} stays" for path in folders if path.exists()]
        drop_ins = [self._folder / f"{unit}.d" for unit in _UNITS]
        there += [f"{path} stays: it is not from umbel" for path in drop_ins if path.exists()]
        return [*there, "its log stays in the journal"]

    def status(self) -> ServiceStatus:
        """Ask systemd, and the journal for the last line of a service that failed.

        Raises:
            ServiceError: it is not installed.
        """
        self._require_systemd()
        facts = self._properties(_SERVICE, _PROPERTIES)
        if facts.get("LoadState") == "not-found":
            raise not_installed()
        pid = facts.get("MainPID", "0")
        reason = self._reason(facts)
        return ServiceStatus(
            state=f"{facts.get('ActiveState', '')} ({facts.get('SubState', '')})",
            runs=pid != "0",
            pid="" if pid == "0" else pid,
            since=facts.get("StateChangeTimestamp", ""),
            restarts=facts.get("NRestarts", ""),
            reason=reason,
            last_line=self._last_line() if reason else "",
            socket=self._listens_on(),
        )

    def _properties(self, unit: str, names: str) -> dict[str, str]:
        words = ("show", unit, f"--property={names}")
        answer = self._systemctl.ask(*words)
        if answer.status:
            raise ServiceError(f"`{self._systemctl.line(*words)}` failed: {answer.errors.strip()}")
        pairs = (line.partition("=") for line in answer.text.splitlines())
        return {name: value for name, _, value in pairs}

    def _reason(self, facts: dict[str, str]) -> str:
        result = facts.get("Result", "")
        if result in ("success", "") or facts.get("ActiveState") == "active":
            return ""
        words = _REASONS.get(result, "systemd says {Result}").format_map(facts)
        if facts.get("ActiveState") != "failed":
            return words
        again = [self._systemctl.line(word, *_UNITS) for word in ("reset-failed", "start")]
        return f"{words}, and systemd starts it no more until `{again[0]}` and `{again[1]}`"

    def _last_line(self) -> str:
        field = "_SYSTEMD_UNIT" if self._is_system else "_SYSTEMD_USER_UNIT"
        words = (f"{field}={_SERVICE}", "--lines=1", "--output=cat", "--no-pager", "--quiet")
        return Program("journalctl", *self._scope).ask(*words).text.strip()

    def _listens_on(self) -> Path | None:
        listen = self._properties(_SOCKET, "Listen").get("Listen", "")
        path = listen.removesuffix(" (Stream)")
        return Path(path) if path.startswith("/") else None

    def follow_log(self) -> int:
        """Show the settings' `log_file`, or the journal, until interrupted."""
        settings = Path(_BASES["Configuration"], "umbel", "umbel.toml") if self._is_system else None
        if (path := log_file(settings)) is not None:
            return follow_file(path)
        self._require_systemd()
        return Program("journalctl", *self._scope).show("-u", "umbel", "-f")


def _quoted(word: str) -> str:
    """Quote a word for ExecStart, which then neither splits nor replaces it."""
    for special, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, written)
    return f'"{word}"' if re.search(r"[\s'\";\\]", word) else word
