"""Which of those that wait may start, in which order, and what holds up each that was looked at."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ..cachestore.restoration import Known
from .order import Candidate, Priority, rank
from .queue import ConversationQueue
from .selection import WAITS_FOR, Readiness
from .sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from .times import Activity

_LOOKS = 64
"""Sequences that are looked at for one that can start; what comes after them waits till later."""

_WORTH_PASSING = 32
"""Tokens in the cache by which one request passes another; those with less keep their order."""


class PrefixLookup(Protocol):
    """Knows what is in the cache; `KVCacheManager` is the real one."""

    def shall_wait(self, sequence: Sequence, running: Iterable[Sequence], /) -> bool:
        """Whether another's prefill is about to bring much of a prompt into the cache."""
        ...

    def page_in(self, sequence: Sequence, /) -> bool:
        """Whether to wait until what is on disk of a sequence's tokens is read."""
        ...

    def known(self, sequence: Sequence, /) -> Known:
        """How much of a sequence is in the cache."""
        ...


class Room(Protocol):
    """Knows what fits; `MemoryPlanner` is the real one."""

    @property
    def usable(self) -> int:
        """Bytes that may be held."""
        ...

    def needed(self, sequence: Sequence, /) -> int:
        """Bytes that a sequence takes to start alone."""
        ...

    def admits(self, sequence: Sequence, known: Known, running: list[Sequence], /) -> bool:
        """Whether a sequence can start beside those that run."""
        ...


class Candidates:
    """Looks at those that wait for one that can start.

    To look at one reads the cache and starts the disk: the queue is not locked meanwhile.

    Args:
        waiting: the queue.
        kv_cache: knows what is in the cache.
        memory: knows what fits.
        running: all that run; it changes.
    """

    def __init__(
        self,
        waiting: ConversationQueue,
        kv_cache: PrefixLookup,
        memory: Room,
        running: list[Sequence],
    ) -> None:
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._memory = memory
        self._running = running
        self._found: dict[Sequence, Activity] = {}  # of those that did not start when looked at
        self._worths: dict[Sequence, int] | None = None  # as they were first, in `starting`

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Several start in the block: in what order is said of the cache as it is at first.

        For each that starts all those that are left are put in order, and to look up what is
        cached of them takes as long as all else that is done to start one.
        """
        self._worths = {}
        try:
            yield
        finally:
            self._worths = None

    def forget(self) -> None:
        """Look anew: what was found before counts no more."""
        self._found = {}

    def ranked(self, tenant: str | None = None) -> Iterator[Sequence]:
        """Yield those that may start, the first to start first: some of all, or a tenant's.

        What is cached is asked of a window at a time: the next one is made of those that are left.
        """
        passed: set[str] = set()
        while len(passed) < _LOOKS and (offers := self._waiting.offers(passed, tenant)):
            yield from self._in_order(offers)
            passed.update(candidate.entry.id for candidate, _ in offers)

    def interactive(self, tenant: str) -> Iterator[Sequence]:
        """Yield a tenant's interactive sequences that may start: what is due may be of a batch."""
        for sequence in self.ranked(tenant):
            if sequence.request.priority is Priority.INTERACTIVE:
                yield sequence

    def cached(self, sequence: Sequence) -> int:
        """How many of its tokens are in the cache."""
        return self._kv_cache.known(sequence).cached

    def note(self) -> None:
        """Note what waiting sequences wait for, by what was found since `forget`."""
        self._waiting.note(self._found)

    def readiness(self, sequence: Sequence) -> Readiness:
        """Look whether a sequence can start now, which may start the disk."""
        readiness = self._look(sequence)
        if readiness in WAITS_FOR:
            self._found[sequence] = WAITS_FOR[readiness]
        if readiness is Readiness.MEMORY:
            sequence.needs = self._memory.needed(sequence), self._memory.usable
        return readiness

    def _in_order(self, offers: list[tuple[Candidate, Sequence]]) -> list[Sequence]:
        for candidate, sequence in offers:
            sequence.is_due = candidate.due
        found = {candidate.entry.id: sequence for candidate, sequence in offers}
        window = [candidate for candidate, _ in offers]
        ranked = rank(window, lambda entry: self._worth(found[entry.id]))
        return [found[entry.id] for entry in ranked]

    def _look(self, sequence: Sequence) -> Readiness:
        if self._kv_cache.shall_wait(sequence, self._running):
            return Readiness.PREFIX
        if self._kv_cache.page_in(sequence):
            return Readiness.DISK
        if self._memory.admits(sequence, self._kv_cache.known(sequence), self._running):
            return Readiness.READY
        return Readiness.MEMORY

    def _worth(self, sequence: Sequence) -> int:
        """How much is gained if a sequence goes first; one that has yielded is in its answer."""
        if sequence.status is SequenceStatus.PREEMPTED:
            return 1 << 62
        known = {} if self._worths is None else self._worths
        if sequence not in known:
            known[sequence] = self.cached(sequence) // _WORTH_PASSING
        return known[sequence]
