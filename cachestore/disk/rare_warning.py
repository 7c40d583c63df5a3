"""Warnings of what may happen thousands of times."""

import threading
import time

import structlog

log = structlog.get_logger()

_clock = time.monotonic


class RareWarning:
    """Logs one line for the first of many, and one for those since, at most once in a while.

    Safe to use from any thread.

    Args:
        event: what the lines say.
        every: seconds from one line to the next.
    """

    def __init__(self, event: str, every: float = 60.0) -> None:
        self._event = event
        self._every = every
        self._guard = threading.Lock()
        self._count = 0
        self._silent_until = 0.0

    def __call__(self, reason: str) -> None:
        """It has happened, for a reason."""
        with self._guard:
            self._count += 1
            now = _clock()
            if now < self._silent_until:
                return
            count, self._count = self._count, 0
            self._silent_until = now + self._every
        log.warning(self._event, reason=reason, count=count)
