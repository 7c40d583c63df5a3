"""Log lines: key=value, JSON where asked for, or a terminal's; on standard error, or in a file."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from structlog.typing import EventDict, Processor

from ..config import LogFormat, LogLevel
from ..quoting import printable
from .log_file import LogFile

if TYPE_CHECKING:
    from rich.console import Console

_LEVELS: dict[LogLevel, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure(
    log_format: LogFormat, log_level: LogLevel = "info", path: Path | None = None
) -> None:
    """Set up structlog for this process.

    Args:
        log_format: of the lines.
        log_level: the least one that is written.
        path: of the file that they go to; None for standard error.

    Raises:
        ConfigError: the file cannot be written; what was set up before stays.
    """
    make: Callable[..., Any] = structlog.PrintLoggerFactory(sys.stderr)
    if path is not None:
        file = LogFile(path)
        make = lambda *_: file  # noqa: E731  (structlog asks for each line)
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    _configure(stamp, _renderer(log_format), make, log_level)


def configure_terminal(console: "Console", log_level: LogLevel = "info") -> None:
    """Set up structlog for a person who reads it as it comes."""
    from ..terminal import log_lines  # noqa: PLC0415  (imports rich)

    _configure(
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        log_lines.render,
        lambda *_: log_lines.ConsoleLogger(console),
        log_level,
    )


def _configure(
    stamp: Processor, render: Processor, make_logger: Callable[..., Any], level: LogLevel
) -> None:
    # What is not HTTP gets a 400; a traceback of aiohttp's for each would flood the log.
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
    """Escape what does not print in all values: a terminal would obey it.

    The lines of a traceback stay lines; the renderers write them in their own way.
    """
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "\n".join(map(printable, value.split("\n")))
    return event


def _renderer(log_format: LogFormat) -> Processor:
    if log_format == "json":
        return structlog.processors.JSONRenderer()
    return structlog.processors.LogfmtRenderer(
        key_order=["timestamp", "level", "event"], drop_missing=True, bool_as_flag=False
    )
