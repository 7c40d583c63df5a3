"""Requests that wait, in order within each conversation. Safe to call from any thread."""

import threading

from .errors import QueueFullError, UnavailableError
from .sequence import Sequence

RETRY_AFTER = 2
"""Seconds that a refused client is asked to wait."""


def queue_full(limit: int) -> QueueFullError:
    """Make the error of a request for which there is no room."""
    message = f"{limit} requests are waiting already; try again later"
    return QueueFullError(message, retry_after=RETRY_AFTER)


class ConversationQueue:
    """A bounded queue that never lets two requests of one conversation run at once.

    Args:
        limit: the most requests that may wait. It may change.

    Nothing is done under the lock but taking and giving.

    Invariants: a conversation is busy from `claim` to `release`; a waiting request of a
    busy conversation is no candidate; requests of one conversation are candidates in the
    order they were put.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._waiting: dict[str, Sequence] = {}
        self._busy: set[tuple[str, str]] = set()
        self._closed = False

    def put(self, sequence: Sequence) -> None:
        """Add a sequence at the end.

        Raises:
            QueueFullError: as many wait as may wait.
            UnavailableError: the queue was closed.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)
            if len(self._waiting) >= self.limit:
                raise queue_full(self.limit)
            self._waiting[sequence.request.id] = sequence

    def candidates(self) -> list[Sequence]:
        """List the sequences that may be claimed now: the first of each idle conversation.

        Returns:
            Oldest first. Whoever looks at them holds no lock, and some may leave meanwhile.
        """
        with self._lock:
            passed = set(self._busy)
            first = []
            for sequence in self._waiting.values():
                key = _key(sequence)
                if key not in passed:
                    first.append(sequence)
                    passed.add(key)  # none overtakes the first of its conversation
            return first

    def claim(self, sequence: Sequence) -> bool:
        """Take a candidate out and make its conversation busy; False if it is none any more."""
        with self._lock:
            if sequence.request.id not in self._waiting or _key(sequence) in self._busy:
                return False
            del self._waiting[sequence.request.id]
            self._busy.add(_key(sequence))
            return True

    def release(self, sequence: Sequence) -> None:
        """Let the next request of this sequence's conversation run."""
        with self._lock:
            self._busy.discard(_key(sequence))

    def remove(self, request_id: str) -> Sequence | None:
        """Take one waiting sequence out; None when it does not wait (any more)."""
        with self._lock:
            return self._waiting.pop(request_id, None)

    def expired(self, now: float) -> list[Sequence]:
        """Take out the waiting sequences whose deadline has passed."""
        with self._lock:
            late = [s for s in self._waiting.values() if s.request.deadline <= now]
            for sequence in late:
                del self._waiting[sequence.request.id]
            return late

    def close(self) -> list[Sequence]:
        """Refuse new sequences from now on, and hand out those that wait."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
            return waiting

    def __len__(self) -> int:
        return len(self._waiting)


def _key(sequence: Sequence) -> tuple[str, str]:
    """Conversations are named by clients, so a name means something to its tenant only."""
    return sequence.request.tenant, sequence.request.conversation
