"""A service, whichever program manages it: the umbel that it runs, its status and its log."""

import asyncio
import re
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from ..cli.client import Client
from ..config import load
from ..errors import ClientError, ServiceError
from .steps import Program

LOG_LINES = 400
"""Lines at the end of a log in which the reason of an end is looked for: a run's refusals, or a
traceback, may follow it."""

_PACKAGE = __package__.partition(".")[0]
_ANSWERS_WITHIN = 5.0  # seconds
_BEGIN = re.compile(r"""\bevent(=|": ?")listening\b""")
_ERRORS = re.compile(
    r"""^umbel:\ | ^(\w+\.)*\w*(Error|Exception)\b | ^Fatal\ Python\ error | ^libc\+\+abi:\ |
    \blevel(=|":\ ?")(error|critical)\b""",
    re.VERBOSE,
)


class Umbel(NamedTuple):
    """An installed umbel.

    Attributes:
        command: starts the daemon; the program is an absolute path.
        folders: of its code and of Python's.
    """

    command: list[str]
    folders: list[Path]


def running_umbel(called: str = sys.argv[0]) -> Umbel:
    """Find the umbel that runs now.

    Args:
        called: how this process's program was called.
    """
    program = shutil.which(called)
    if Path(called).name == "umbel" and program is not None:
        path = Path(program)
        # The last link stays: it is what an update of umbel moves.
        command = [str(path.parent.resolve() / path.name), "serve"]
    else:
        command = [sys.executable, "-m", _PACKAGE, "serve"]
    folders = [Path(command[0]), Path(sys.prefix), Path(sys.base_prefix)]
    return Umbel(command, [folder.resolve() for folder in folders])


def shipped(*names: str) -> str:
    """Read a file that umbel ships, such as a unit file."""
    return files(_PACKAGE).joinpath(*names).read_text(encoding="utf-8")


def not_installed() -> ServiceError:
    """Make the error for a service that is not there."""
    return ServiceError("umbel is not installed as a service here; try --system, or --user")


def not_root() -> ServiceError:
    """Make the error for a user who asks for the system's service."""
    return ServiceError("the system's services are root's: use sudo, or --user")


class ServiceStatus(NamedTuple):
    """A service as its manager knows it.

    Attributes:
        state: in the manager's words.
        runs: there is a process.
        pid: of the process; empty without one.
        since: time of the last change of state; empty if the manager does not know.
        restarts: their number; empty if the manager does not know.
        reason: of a failure or a restart; empty without either.
        last_line: of its log, which says more; looked up if there is a reason.
        socket: of the daemon; None if that is not known.
    """

    state: str
    runs: bool
    pid: str = ""
    since: str = ""
    restarts: str = ""
    reason: str = ""
    last_line: str = ""
    socket: Path | None = None


async def report(status: ServiceStatus) -> list[str]:
    """Write the status as lines, with the daemon's own state if it runs."""
    facts = {"pid ": status.pid, "since ": status.since, "restarts: ": status.restarts}
    words = ", ".join([status.state, *(f"{name}{fact}" for name, fact in facts.items() if fact)])
    lines = [f"{'service':8} {words}"]
    if status.reason:
        lines.append(f"{'reason':8} {status.reason}")
    if status.last_line:
        lines.append(f"{'log':8} {status.last_line}")
    # A socket without a daemon must not be asked: the manager would start one to answer.
    if status.runs and status.socket is not None:
        lines.append(f"{'daemon':8} {await _daemon_at(status.socket)}")
    return lines


async def _daemon_at(path: Path) -> str:
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN), Client(path) as client:
            status = await client.get("/status")
    except TimeoutError:
        return f"does not answer on {path} within {_ANSWERS_WITHIN:g} seconds"
    except ClientError as error:
        return str(error)
    state = status.get("phase") or status.get("state")
    name = (status.get("model") or {}).get("name", "no model yet")
    return f"{state}: {name} on {path}"


def log_file(settings: Path | None = None) -> Path | None:
    """Find the `log_file` of a service; None if it logs to standard error.

    Args:
        settings: the configuration file that it reads; None for this user's.

    Raises:
        ConfigError: that file has a fault.
    """
    if settings is not None and not settings.exists():
        return None
    return load({}, file=settings, environment={}, serves=False).log_path


def follow_file(path: Path) -> int:
    """Show the end of a log file and new lines, also if the file is rotated.

    Returns:
        The exit status.

    Raises:
        ServiceError: there is no `tail`.
    """
    return Program("tail").show("-n", "20", "-F", str(path))


def last_words(lines: list[str], pid: str = "") -> str:
    """Find why the daemon ended: its last run's last error, else that run's last line.

    Args:
        lines: of the log, in umbel's formats for services.
        pid: of the daemon that runs now, which has not ended; empty without one.
    """
    begins = [number for number, line in enumerate(lines) if _BEGIN.search(line)]
    if pid and begins and re.search(rf"""\bpid(=|": ?"?){pid}\b""", lines[begins[-1]]):
        del lines[begins.pop() :]
    run = lines[begins[-1] :] if begins else lines
    errors = [line for line in run if _ERRORS.search(line)]
    return next(reversed(errors or run), "")
