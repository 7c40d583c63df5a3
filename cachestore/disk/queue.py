"""Queue of the disk tier's writer: jobs, their results, and the state of the tier.

States: "on"; "suspended" after a write failed, until one succeeds again, tried at most every
`retry_after` seconds; "off" once the folder is gone or the tier is closed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..record import Record
from .files import Payload

State = Literal["on", "suspended", "off"]


class WriteJob(NamedTuple):
    """A write. `token` is the owner's and comes back with the result.

    `record` lacks its id, name, size and checksum: they are known once the file is written.
    """

    token: object
    record: Record
    payload: Payload

    @property
    def nbytes(self) -> int:
        """Bytes in the queue: tensors and tokens."""
        return self.payload.nbytes + len(self.record.tokens)


class Written(NamedTuple):
    """The result of a job; without a record it was not kept."""

    token: object
    record: Record | None


Job = WriteJob | Callable[[], None]


@dataclass(frozen=True)
class DiskStatistics:
    """State of the tier (with a reason if not on), its files and queue, and counts since the start.

    `queued_bytes` includes the write under way. `failures` are of writes, reads, transactions and
    removals.
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

    `queue_bytes` limits the waiting write jobs; a larger job is taken when none waits.
    """

    def __init__(self, queue_bytes: int, retry_after: float, found: Iterable[Record]) -> None:
        self.queue_bytes = queue_bytes
        self._retry_after = retry_after
        self._changed = threading.Condition()  # guards all that follows
        self._jobs: deque[Job] = deque()
        self._added = self._done = 0  # jobs
        self._completed: list[Written] = []
        self._sizes = {record.id: record.nbytes for record in found}
        self._state: State = "on"
        self._reason = ""
        self._retry_at = 0.0  # of the monotonic clock: the other one jumps
        self._queued = self._writes = self._failures = 0
        self._closed = self._abandoned = False

    # -- for the owner -------------------------------------------------------------------

    def write(self, job: WriteJob) -> bool:
        """Queue a write; False if too much waits, or nothing is written at present.

        True promises one `Written` for it. The payload is released on the writer's thread.
        """
        with self._changed:
            full = self._queued > 0 and self._queued + job.nbytes > self.queue_bytes
            resting = self._state == "suspended" and time.monotonic() < self._retry_at
            if full or resting or not self._open():
                return False
            self._queued += job.nbytes
            self._append(job)
        return True

    def call(self, job: Callable[[], None]) -> None:
        """Queue something else than a write. Forgotten once the tier is off."""
        with self._changed:
            if self._open():
                self._append(job)

    def completed(self) -> list[Written]:
        """Take the results since the last call, in the order of the jobs."""
        with self._changed:
            results, self._completed = self._completed, []
        return results

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued is done; False when that takes over `timeout` s."""
        with self._changed:
            last = self._added
            return self._changed.wait_for(lambda: self._done >= last, timeout)

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

    def _open(self) -> bool:
        return not self._closed and self._state != "off"

    def _append(self, job: Job) -> None:
        self._jobs.append(job)
        self._added += 1
        self._changed.notify_all()

    # -- for the thread ------------------------------------------------------------------

    def take(self) -> Job | None:
        """Wait for a job; None when there is none and there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return self._jobs.popleft() if self._jobs else None

    def done(self) -> None:
        """Count a job as done."""
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def answer(self, job: WriteJob, record: Record | None) -> None:
        """Note the result of a write. One that was kept ends a suspension.

        Its payload is released first: the owner counts on its memory.
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

    def removed(self, records: Iterable[Record]) -> None:
        """Note that records are no longer there."""
        with self._changed:
            for record in records:
                self._sizes.pop(record.id, None)

    def fail(self) -> None:
        """Count a failure."""
        with self._changed:
            self._failures += 1

    # -- the end -------------------------------------------------------------------------

    def leave(self, state: State, reason: str) -> bool:
        """Become suspended, or off, and refuse waiting writes; True if state or reason changed."""
        with self._changed:
            if self._state == "off":
                return False
            news = (self._state, self._reason) != (state, reason)
            # Other failures during a suspension must not prolong it for ever.
            if self._state != "suspended" or time.monotonic() >= self._retry_at:
                self._retry_at = time.monotonic() + self._retry_after
            self._state, self._reason = state, reason
            self._refuse(writes_only=True)
            return news

    def end(self, *, abandon: bool = False) -> None:
        """Take nothing more; with `abandon`, forget what waits. Writes are answered."""
        with self._changed:
            self._closed = True
            self._abandoned = self._abandoned or abandon
            if abandon:
                self._refuse(writes_only=False)
            self._changed.notify_all()

    def is_abandoned(self) -> bool:
        """Return True if the file that is being written shall be given up."""
        return self._abandoned

    def _refuse(self, *, writes_only: bool) -> None:
        waiting, self._jobs = self._jobs, deque()
        for job in waiting:
            if isinstance(job, WriteJob):
                self._queued -= job.nbytes
                job.payload.release()
                self._completed.append(Written(job.token, None))
            elif writes_only:
                self._jobs.append(job)
                continue
            self._done += 1
        self._changed.notify_all()
