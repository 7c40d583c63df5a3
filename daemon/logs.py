"""Log lines: key=value for people and tools, JSON where asked for, on standard error."""

import logging
import sys

import structlog

from .config import LogFormat


def configure(log_format: LogFormat) -> None:
    """Set up structlog for this process."""
    # What is not HTTP gets a 400; a traceback of aiohttp's for each would flood the log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL + 1)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _renderer(log_format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _renderer(log_format: LogFormat) -> structlog.typing.Processor:
    if log_format == "json":
        return structlog.processors.JSONRenderer()
    return structlog.processors.LogfmtRenderer(
        key_order=["timestamp", "level", "event"], drop_missing=True
    )
