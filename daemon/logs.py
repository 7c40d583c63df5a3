"""Log lines on standard error: key=value, JSON where asked for, or a terminal's."""

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
from structlog.typing import EventDict, Processor

from .config import LogFormat
from .quoting import printable

if TYPE_CHECKING:
    from rich.console import Console


def configure(log_format: LogFormat) -> None:
    """Set up structlog for this process."""
    _configure(
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _renderer(log_format),
        structlog.PrintLoggerFactory(sys.stderr),
    )


def configure_terminal(console: "Console") -> None:
    """Set up structlog for a person who reads it as it comes."""
    from .terminal import log_lines  # noqa: PLC0415  (imports rich)

    _configure(
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        log_lines.render,
        lambda *_: log_lines.ConsoleLogger(console),
    )


def _configure(stamp: Processor, render: Processor, make_logger: Callable[..., Any]) -> None:
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
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
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
