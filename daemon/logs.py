"""Log lines: key=value for people and tools, JSON where asked for, on standard error."""

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor

from .config import LogFormat
from .quoting import printable


def configure(log_format: LogFormat) -> None:
    """Set up structlog for this process."""
    # What is not HTTP gets a 400; a traceback of aiohttp's for each would flood the log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL + 1)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _escape_controls,
            _renderer(log_format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
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
