"""Log lines: key=value, JSON, or in colours on a terminal; on standard error, or in a file."""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from structlog.typing import EventDict, Processor, ProcessorReturnValue

from ..config import LogFormat, LogLevel
from ..errors import ConfigError
from ..quoting import printable, share

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_LEVELS: dict[LogLevel, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_DISPLAYED = frozenset({"downloading", "loading", "ready"})  # as a phase, and as the banner
_STYLES = {"warning": "yellow", "error": "red", "critical": "red"}
_FINISHES = {"cancelled": "yellow", "error": "red"}
_LONGEST_NAME = 32
_REQUEST_NAME = 12  # of a request without a conversation


def configure(
    log_format: LogFormat, log_level: LogLevel = "info", path: Path | None = None
) -> None:
    """Set up structlog for this process.

    Args:
        log_format: of the lines.
        log_level: the least one that is written.
        path: of the log file; None for standard error.

    Raises:
        ConfigError: the file cannot be written; the former setup stays.
    """
    make: Callable[..., Any] = structlog.PrintLoggerFactory(sys.stderr)
    if path is not None:
        file = LogFile(path)
        make = lambda *_: file  # noqa: E731  (structlog asks for each line)
    render: Processor = structlog.processors.LogfmtRenderer(
        key_order=["timestamp", "level", "event"], drop_missing=True, bool_as_flag=False
    )
    if log_format == "json":
        render = structlog.processors.JSONRenderer()
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    _configure(stamp, render, make, log_level)


def configure_terminal(console: "Console", log_level: LogLevel = "info") -> None:
    """Set up structlog for a person at a terminal."""
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    _configure(stamp, _terminal_line, lambda *_: _ConsoleLogger(console), log_level)


def _configure(
    stamp: Processor, render: Processor, make_logger: Callable[..., Any], level: LogLevel
) -> None:
    # Bytes that are no HTTP get a 400; a traceback of aiohttp's for each would flood the log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL + 1)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            stamp,
            structlog.processors.format_exc_info,
            _escape_controls,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=make_logger,
        cache_logger_on_first_use=False,
    )


def _escape_controls(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Escape unprintable characters in all values: a terminal would obey them.

    The lines of a traceback stay lines; the renderers write them in their own way.
    """
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "\n".join(map(printable, value.split("\n")))
    return event


class LogFile:
    """A log file, readable by its owner only. Any thread may write.

    A file that was renamed, as newsyslog and logrotate do, is replaced with the next line. A line
    is lost if the disk is full: no request fails for it.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise ConfigError(f"log_file: cannot write {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)

    def msg(self, line: str) -> None:
        """Write a line."""
        with self._lock, suppress(OSError):
            if not self._has_its_name():
                self._open_again()
            os.write(self._descriptor, f"{line}\n".encode(errors="backslashreplace"))

    debug = info = warning = error = critical = exception = log = msg

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _open_again(self) -> None:
        """Open the file under its name; if that fails, the old one takes the lines."""
        with suppress(OSError):
            opened = _open(self._path)
            os.dup2(opened, self._descriptor, inheritable=False)
            os.close(opened)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
    return os.open(path, flags, 0o600)


class _ConsoleLogger:
    """Writes through a console, which keeps lines apart from a moving display."""

    def __init__(self, console: "Console") -> None:
        self._console = console

    def msg(self, line: "Text") -> None:
        self._console.print(line)

    debug = info = warning = error = critical = exception = log = msg


def _terminal_line(_logger: object, _method: str, event: EventDict) -> ProcessorReturnValue:
    """Make a line of an event; an event that the display shows has none."""
    from rich.text import Text  # noqa: PLC0415  (a service logs without rich)

    name = str(event.pop("event"))
    if name in _DISPLAYED:
        raise structlog.DropEvent
    time, level = event.pop("timestamp", ""), event.pop("level", "info")
    exception = event.pop("exception", None)
    line = Text.assemble((f"{time}  ", "dim"))
    match name:
        case "request":
            line.append_text(Text("  ").join(Text(*part) for part in _request(event)))
        case "refused":
            status = f"refused {event.get('status', '')}  "
            line.append(status, _STYLES.get(level, "yellow")).append(str(event.get("message", "")))
        case _:
            line.append(name, _STYLES.get(level, ""))
            for key, value in event.items():
                line.append(f"  {key}=", "dim").append("" if value is None else str(value))
    if exception is not None:
        line.append(f"\n{exception}")
    return (line,), {}


def _request(event: EventDict) -> Iterator[tuple[str, str]]:
    """Describe a request that ended, as texts and their styles."""
    conversation, request = str(event["conversation"]), str(event["request"])
    unnamed = conversation == request
    yield conversation[: _REQUEST_NAME if unnamed else _LONGEST_NAME], "bold"
    yield f"{event['total']} tokens in, {share(event['cached'], event['total'])} cached", ""
    yield f"{event['out']} out", ""
    if (first := event["ttft_ms"]) is not None:
        yield f"first after {first / 1000:.2f} s", ""
    if gap := event["itl_ms"]:
        yield f"{1000 / gap:.1f} tokens/s", ""
    finish = str(event["finish"])
    yield finish, _FINISHES.get(finish, "green")
    if "error" in event:
        yield f"{event['error']} ({request})", "red"
