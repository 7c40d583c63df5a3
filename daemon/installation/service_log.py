"""The log of a service: where it is, and its end, in which several runs follow each other."""

import re
from pathlib import Path

from ..config import load
from .program import Program

LINES = 400
"""As many are looked at: a run's refusals, or a traceback, may stand behind what ended it."""

_BEGIN = re.compile(r"""\bevent(=|": ?")listening\b""")
_ERRORS = re.compile(
    r"""^umbel:\ | ^(\w+\.)*\w*(Error|Exception)\b | ^Fatal\ Python\ error | ^libc\+\+abi:\ |
    \blevel(=|":\ ?")(error|critical)\b""",
    re.VERBOSE,
)


def log_file(settings: Path | None = None) -> Path | None:
    """Find the `log_file` that a service has; None where it logs to standard error.

    Args:
        settings: the file that it reads; None for this user's.

    Raises:
        ConfigError: that is at fault.
    """
    if settings is not None and not settings.exists():
        return None
    return load({}, file=settings, environment={}, serves=False).log_path


def follow(path: Path) -> int:
    """Show the end of a log file, and what comes, also under a new file of its name.

    Returns:
        The exit status.

    Raises:
        ServiceError: there is no `tail`.
    """
    return Program("tail").show("-n", "20", "-F", str(path))


def last_words(lines: list[str], pid: str = "") -> str:
    """Find what says why the daemon ended: its last run's last error, else that run's last line.

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
