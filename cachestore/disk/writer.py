"""Writer of the disk tier: the queue of its jobs, their results, the tier's state, and the thread.

No failure of a disk ends the thread. States: "on"; "suspended" after a write failed, until one
succeeds again, tried at most every `retry_after` seconds; "off" once the folder is gone or the tier
is closed.
"""

import errno
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import structlog

from ..errors import DiskTierError
from ..record import Pin, Record, RecordKind
from .files import DIGEST, Payload, identity, new_name, write_file
from .index import is_damage
from .recovery import Opened, reason_of

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

    `limit` is in bytes of waiting write jobs; a larger job is taken when none waits.
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
        """Set recency counters, in no order with the jobs: an id is never reused. So few wait."""
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
        """Become suspended, or off, and refuse waiting writes; True if state or reason changed."""
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


log = structlog.get_logger()


class DiskWriter:
    """Does the queue's jobs, and gives up the folder, which it owns, when it ends.

    `wake` is called after a write was answered.
    """

    def __init__(
        self, opened: Opened, queue: WriteQueue, fingerprint: str, wake: Callable[[], None]
    ) -> None:
        self._folder = opened.folder
        self._index = opened.index
        self._lock_fd = opened.lock_fd
        self._identity = opened.identity
        self._queue = queue
        self._fingerprint = fingerprint
        self._wake = wake
        self._unremoved: set[int] = set()  # rows that could not be removed with their files
        self.thread = threading.Thread(target=self._run, name="umbel-disk-writer", daemon=True)

    def delete(self, records: Iterable[Record]) -> None:
        """Queue the removal of records and their files."""
        if found := list(records):
            self._queue.call(partial(self._delete, found))

    def pin(self, pin: Pin) -> None:
        """Queue the keeping of a pin."""
        self._queue.call(lambda: self._transact(lambda: self._index.pin(self._fingerprint, pin)))

    def unpin(self, name: str, tenant: str) -> None:
        """Queue the forgetting of a pin."""
        forget = partial(self._index.unpin, self._fingerprint, name, tenant)
        self._queue.call(lambda: self._transact(forget))

    def folder_is_there(self) -> bool:
        """True if folder, lock and index are still those that were opened; else the tier is off.

        Its rows would describe files that are elsewhere, and another tier may have the folder.
        """
        try:
            if identity(self._folder) == self._identity is not None:
                return True
        except OSError:
            return True  # as far as can be told
        reason = f"{self._folder} was removed or replaced: restart umbel to use it again"
        self._leave("off", reason)
        return False

    # -- on the thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step(self._queue.take()):
                pass
        finally:
            self._index.close()
            os.close(self._lock_fd)

    def _step(self, work: Work | None) -> bool:
        if work is None:
            return False
        try:
            if work.touched:
                self._transact(lambda: self._index.touch(work.touched))
            if isinstance(work.job, WriteJob):
                self._answer(work.job)
            elif work.job is not None:
                work.job()
        except Exception:
            log.exception("a job of the disk cache failed")
            self._queue.fail()
        finally:
            self._queue.done(work)
        return True

    def _answer(self, job: WriteJob) -> None:
        record, failure = None, None
        try:
            record = self._write(job)
        except (OSError, sqlite3.Error) as error:
            failure = _meaning(error)  # not the error: its traceback would keep the payload
        except DiskTierError:  # the tier is being closed
            pass
        except Exception:
            log.exception("a payload cannot be written")
            self._queue.fail()
        self._queue.answer(job, record)
        if failure is not None:
            self._suspend(*failure)
        elif record is not None and self._unremoved:  # now there is room for that
            self._transact(self._remove_rows)
        self._wake()

    def _write(self, job: WriteJob) -> Record:
        if identity(self._folder) != self._identity:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder))
        name = new_name()
        metadata = job.payload.metadata | {DIGEST: job.digest.hex()}
        nbytes, checksum = write_file(
            self._folder,
            name,
            job.payload._replace(metadata=metadata),
            self._queue.is_abandoned,
        )
        # The index gives the record its id.
        record = Record(0, *job[1:8], name, nbytes, checksum, job.used)
        try:
            return self._index.add(self._fingerprint, record)
        except BaseException:
            (self._folder / name).unlink(missing_ok=True)
            raise

    def _delete(self, records: list[Record]) -> None:
        """Remove the rows, then the files.

        The files go even if the rows cannot: a full disk has no room for the transaction, and
        could otherwise never be freed. A row without its file is collected at the next start.
        """
        self._unremoved.update(record.id for record in records)
        self._transact(self._remove_rows)
        for record in records:
            try:
                (self._folder / record.name).unlink(missing_ok=True)
            except OSError as error:
                self._queue.fail()
                log.warning("a file of the disk cache stays", reason=reason_of(error))
        self._queue.removed(records)

    def _remove_rows(self) -> None:
        self._index.remove(self._unremoved)
        self._unremoved.clear()

    def _transact(self, transaction: Callable[[], None]) -> None:
        try:
            transaction()
        except sqlite3.Error as error:
            self._suspend(*_meaning(error))

    def _suspend(self, state: State, reason: str) -> None:
        self._queue.fail()
        if self.folder_is_there():
            self._leave(state, reason)

    def _leave(self, state: State, reason: str) -> None:
        if self._queue.leave(state, reason):
            log.warning("the disk cache takes nothing more", state=state, reason=reason)
        self._wake()  # what waited was refused


def _meaning(error: OSError | sqlite3.Error) -> tuple[State, str]:
    """Return the state after a failure, and why: a damaged index is never written to."""
    if isinstance(error, sqlite3.Error) and is_damage(error):
        return "off", f"its index is damaged ({error}): restart umbel to begin anew"
    return "suspended", reason_of(error)
