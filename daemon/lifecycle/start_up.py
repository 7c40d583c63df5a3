"""What start-up does, told to the service manager, to the log and to whoever watches."""

import time

import structlog

from ...models.load.watch import Progress
from ..models.assembly import Phase
from .display import Display
from .service_manager import ServiceManager

_PHASE = 900.0  # seconds that a phase without progress of its own may take
_OFTEN = 5.0  # seconds between two messages to the service manager
_LINES = 30.0  # seconds between two lines of the log
_GIB = 1 << 30

log = structlog.get_logger()


class StartUp:
    """Tells how start-up gets on. Any thread may call.

    While bytes arrive the service manager is asked for more time, so that a download takes as long
    as it takes; when none do, it is not, and ends a start that hangs.

    Args:
        manager: of services.
        stalled_after: seconds without a byte, after which a download is given up.
        display: shows it to a person.
    """

    def __init__(self, manager: ServiceManager, stalled_after: float, display: Display) -> None:
        self._manager = manager
        self._display = display
        self._grace = stalled_after + _PHASE
        self._done = 0
        self._told = self._logged = float("-inf")

    def begin(self, phase: Phase) -> None:
        """Say what comes next."""
        self._manager.status(phase)
        self._manager.extend(_PHASE)
        self._display.begin(phase)

    def downloaded(self, progress: Progress) -> None:
        """Say how far the download is."""
        done, total = progress
        self._display.advance(done, total)
        now, arrived, self._done = time.monotonic(), done > self._done, done
        if now - self._told >= _OFTEN or done == total:
            self._told = now
            self._manager.status(f"downloading: {done / _GIB:.2f} of {total / _GIB:.2f} GiB")
            if arrived:
                self._manager.extend(self._grace)
        if now - self._logged >= _LINES or done == total:
            self._logged = now
            log.info("downloading", bytes=done, total=total)
