"""The disk as the engine uses it: in the background, and never in the way."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from ..cachestore.paging.pager import Pager
from ..cachestore.tries import Namespace
from .sequence import Sequence

log = structlog.get_logger()


class Paging:
    """Moves state to and from the disk. A fault there turns the disk off and ends no request.

    State is written when the engine is idle, when a sequence waits for memory, or when more than a
    sixteenth of the memory budget is dirty: the writer makes steps of running sequences longer.
    """

    def __init__(self, pager: Pager | None) -> None:
        self._pager = pager
        self._page_ins = 0

    @property
    def page_ins(self) -> int:
        """Number of states that were read back from disk."""
        if self._pager is not None:
            self._page_ins = self._pager.page_in.page_ins
        return self._page_ins

    @property
    def writes(self) -> int:
        """Number of states that were written to disk."""
        return 0 if self._pager is None else self._pager.tier.statistics().writes

    @property
    def writing(self) -> bool:
        """True if a write is under way."""
        return self._pager is not None and self._pager.page_out.writing

    @property
    def unwritten(self) -> bool:
        """True if state is dirty and no write is under way: a step would begin one."""
        return self._pager is not None and self._pager.page_out.unwritten

    def step(self, *, busy: bool = False) -> bool:
        """Advance reads and writes; return True if there is more to do at once.

        It is `busy` while sequences run, and none waits for memory.
        """
        with self._guard():
            if self._pager is not None:
                self._pager.step(busy=busy)
                return self._pager.page_in.ready
        return False

    def is_on_disk(self, sequence: Sequence) -> bool:
        """Return True if a sequence shall wait for state that is, or will be, read from disk."""
        with self._guard():
            if self._pager is not None:
                namespace = Namespace(sequence.request.tenant)
                return self._pager.page_in.awaits(sequence, namespace, sequence.tokens)
        return False

    def page_in(self, sequence: Sequence) -> bool:
        """Ask for stored state of a sequence to be read from disk; return True to wait for it."""
        with self._guard():
            if self._pager is not None:
                page_in, namespace = self._pager.page_in, Namespace(sequence.request.tenant)
                before = page_in.asked_bytes
                waits = page_in.wait_for(sequence, namespace, sequence.tokens)
                sequence.bill.restored_bytes += page_in.asked_bytes - before
                return waits
        return False

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn the disk off if the block raises: a request must not pay for it."""
        try:
            yield
        except BaseException as error:
            log.exception("the disk tier failed and is not used any more")
            if self._pager is not None:
                self._page_ins = self._pager.page_in.page_ins
                self._pager.give_up(f"it failed: {type(error).__name__}: {error}")
            self._pager = None
