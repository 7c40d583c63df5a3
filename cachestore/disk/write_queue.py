"""Jobs of the disk tier's writer, their results, and the state of the tier.

States: "on"; "suspended" after a write failed, until one succeeds again, tried at most every
`retry_after` seconds; "off" once the folder is gone or the tier closed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..record import Record, RecordKind
from .files import Payload

State = Literal["on", "suspended", "off"]


class WriteJob(NamedTuple):
    """A write. `token` is the owner's: it comes back with the result.

    For the other attributes see `Record` and `Payload`.
    """

    token: object
    kind: RecordKind
    tenant: str
    start: int
    end: int
    prefix: bytes
    digest: bytes
    tokens: bytes
    used: int
    payload: Payload

    @property
    def nbytes(self) -> int:
        """Bytes in the queue: tensors and tokens."""
        return self.payload.nbytes + len(self.tokens)


class Written(NamedTuple):
    """The result of a job; without a record it was not kept."""

    token: object
    record: Record | None


Job = WriteJob | Callable[[], None]


class Work(NamedTuple):
    """The writer's next work: recency counters by id, then a job. Either may be empty."""

    touched: dict[int, int]
    job: Job | None


@dataclass(frozen=True)
class DiskStatistics:
    """How the tier is.

    Attributes:
        state: see this module.
        reason: why it is not on; empty when it is.
        nbytes: bytes of the files that have a record.
        records: how many those are.
        queued_bytes: bytes of tensors and tokens that wait to be written, or are being.
        writes: files written since the start.
        failures: writes, reads, transactions and removals that failed since the start.
    """

    state: State
    reason: str
    nbytes: int
    records: int
    queued_bytes: int
    writes: int
    failures: int


class WriteQueue:
    """Jobs in order, for one thread that does them. All methods are for any thread.

    Args:
        limit: bytes of write jobs that may wait; a larger job is taken when none does.
        retry_after: seconds from a suspension until jobs are taken again.
        found: the records that are there.
    """

    def __init__(self, limit: int, retry_after: float, found: Iterable[Record]) -> None:
        self._limit = limit
        self._retry_after = retry_after
        self._changed = threading.Condition()  # guards all that follows
        self._jobs: deque[Job] = deque()
        self._touched: dict[int, int] = {}
        self._added = self._done = 0  # jobs, and gatherings of touched ids
        self._completed: list[Written] = []
        self._sizes = {record.id: record.nbytes for record in found}
        self._state: State = "on"
        self._reason = ""
        self._retry_at = 0.0  # of the monotonic clock: the other one jumps
        self._queued = self._writes = self._failures = 0
        self._closed = self._abandoned = False

    # -- what is to be done --------------------------------------------------------------

    def write(self, job: WriteJob) -> bool:
        """Add a write; False when it is not taken."""
        with self._changed:
            full = self._queued > 0 and self._queued + job.nbytes > self._limit
            resting = self._state == "suspended" and time.monotonic() < self._retry_at
            if full or resting or not self._open():
                return False
            self._queued += job.nbytes
            self._append(job)
        return True

    def call(self, job: Callable[[], None]) -> None:
        """Add something else than a write. Forgotten once the tier is off."""
        with self._changed:
            if self._open():
                self._append(job)

    def touch(self, ids: Iterable[int], used: int) -> None:
        """Add recency counters.

        Not in order with the jobs: what is touched was added before, and an id is never
        given again. So few wait, however slow the disk.
        """
        with self._changed:
            if self._open() and (fresh := dict.fromkeys(ids, used)):
                self._added += not self._touched
                self._touched.update(fresh)
                self._changed.notify_all()

    def take(self) -> Work | None:
        """Wait for work; None when there is none and there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._touched or self._closed)
            if not self._jobs and not self._touched:
                return None
            touched, self._touched = self._touched, {}
            return Work(touched, self._jobs.popleft() if self._jobs else None)

    def done(self, work: Work) -> None:
        """Count what was taken as done."""
        with self._changed:
            self._done += bool(work.touched) + (work.job is not None)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all that was added so far is done; False when that takes too long."""
        with self._changed:
            last = self._added
            return self._changed.wait_for(lambda: self._done >= last, timeout)

    def close(self) -> None:
        """Take nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Forget what waits. Writes are answered."""
        with self._changed:
            self._closed = self._abandoned = True
            self._done += len(self._jobs) + bool(self._touched)
            self._touched.clear()
            self._refuse(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()

    def is_abandoned(self) -> bool:
        """Return True if the file that is being written shall be given up."""
        return self._abandoned

    def _open(self) -> bool:
        return not self._closed and self._state != "off"

    def _append(self, job: Job) -> None:
        self._jobs.append(job)
        self._added += 1
        self._changed.notify_all()

    # -- what came of it -----------------------------------------------------------------

    def answer(self, job: WriteJob, record: Record | None) -> None:
        """Note the result of a write. One that was kept ends a suspension.

        Its payload is let go of first: who hears of the result counts on its memory.
        """
        nbytes = job.nbytes
        job.payload.release()
        with self._changed:
            self._completed.append(Written(job.token, record))
            self._queued -= nbytes
            if record is not None:
                self._sizes[record.id] = record.nbytes
                self._writes += 1
                if self._state == "suspended":
                    self._state, self._reason = "on", ""

    def completed(self) -> list[Written]:
        """Take the results since the last call."""
        with self._changed:
            results, self._completed = self._completed, []
        return results

    def removed(self, records: Iterable[Record]) -> None:
        """Note that records are no longer there."""
        with self._changed:
            for record in records:
                self._sizes.pop(record.id, None)

    def fail(self) -> None:
        """Count a failure."""
        with self._changed:
            self._failures += 1

    def leave(self, state: State, reason: str) -> bool:
        """Become suspended, or off; refuse the writes that wait.

        Returns:
            True if the state or the reason is another than before.
        """
        with self._changed:
            if self._state == "off":
                return False
            news = (self._state, self._reason) != (state, reason)
            # Other failures during a suspension must not prolong it for ever.
            if self._state != "suspended" or time.monotonic() >= self._retry_at:
                self._retry_at = time.monotonic() + self._retry_after
            self._state, self._reason = state, reason
            writes = [job for job in self._jobs if isinstance(job, WriteJob)]
            self._jobs = deque(job for job in self._jobs if not isinstance(job, WriteJob))
            self._done += len(writes)
            self._refuse(writes)
            self._changed.notify_all()
            return news

    def _refuse(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if isinstance(job, WriteJob):
                self._queued -= job.nbytes
                job.payload.release()
                self._completed.append(Written(job.token, None))

    def statistics(self) -> DiskStatistics:
        """Describe the queue and what is on disk."""
        with self._changed:
            return DiskStatistics(
                state="off" if self._closed else self._state,
                reason="closed" if self._closed else self._reason,
                nbytes=sum(self._sizes.values()),
                records=len(self._sizes),
                queued_bytes=self._queued,
                writes=self._writes,
                failures=self._failures,
            )
