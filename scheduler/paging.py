"""The disk as the engine uses it: in the background, and never in the way."""

import structlog

from ..cachestore.paging.pager import Pager
from ..cachestore.pins import Pins
from ..cachestore.tries import Namespace
from .sequence import Sequence

log = structlog.get_logger()


class Paging:
    """Moves state to and from the disk. A fault there turns the disk off and ends no request.

    State is written when the engine is idle, when a sequence waits for memory, or when more than a
    sixteenth of the memory budget is dirty. Beside running sequences the writer would make steps
    longer: it shares the interpreter with the MLX thread, on CUDA also the driver and the
    allocator.

    Args:
        pager: of the cache, if there is a disk tier.
        pins: paths whose state is read back at the start.
    """

    def __init__(self, pager: Pager | None, pins: Pins) -> None:
        self._pager = pager
        self._pins = pins
        self._page_ins = 0

    @property
    def page_ins(self) -> int:
        """Number of states that were read back from disk."""
        if self._pager is not None:
            self._page_ins = self._pager.page_ins
        return self._page_ins

    @property
    def writes(self) -> int:
        """Number of states that were written to disk."""
        return 0 if self._pager is None else self._pager.statistics().writes

    @property
    def writing(self) -> bool:
        """True if a write is under way."""
        return self._pager is not None and self._pager.writing

    @property
    def unwritten(self) -> bool:
        """True if state is dirty and no write is under way: a step would begin one."""
        return self._pager is not None and self._pager.unwritten

    def step(self, *, busy: bool = False) -> bool:
        """Advance reads and writes; return True if there is more to do at once.

        Args:
            busy: sequences run, and none waits for memory.
        """
        if self._pager is None:
            return False
        try:
            self._pager.step(busy=busy)
            self._pins.restore(self._pager)
        except BaseException as error:  # noqa: BLE001  (a request must not pay for it)
            self._give_up(error)
            return False
        return self._pager.ready

    def is_on_disk(self, sequence: Sequence, namespace: Namespace) -> bool:
        """Return True if a sequence shall wait for state that is, or will be, read from disk."""
        if self._pager is None:
            return False
        try:
            tokens = sequence.tokens
            awaited = self._pins.is_awaited(namespace, tokens)
            return awaited or self._pager.awaits(sequence, namespace, tokens)
        except BaseException as error:  # noqa: BLE001  (as in `step`)
            self._give_up(error)
            return False

    def wait_for(self, sequence: Sequence, namespace: Namespace) -> bool:
        """Have stored state of a sequence's tokens read from disk; return True to wait for it."""
        if self._pager is None:
            return False
        try:
            return self._ask(self._pager, sequence, namespace)
        except BaseException as error:  # noqa: BLE001  (as in `step`)
            self._give_up(error)
            return False

    def _ask(self, pager: Pager, sequence: Sequence, namespace: Namespace) -> bool:
        if self._pins.is_awaited(namespace, sequence.tokens):
            return True
        before = pager.asked_bytes
        waits = pager.wait_for(sequence, namespace, sequence.tokens)
        sequence.num_restored_bytes += pager.asked_bytes - before
        return waits

    def _give_up(self, error: BaseException) -> None:
        log.error("the disk tier failed and is not used any more", exc_info=error)
        if self._pager is not None:
            self._page_ins = self._pager.page_ins
            self._pager.give_up(f"it failed: {type(error).__name__}: {error}")
        self._pager = None
