"""The disk tier: state that outlives memory and restarts, in files that an index describes.

The owner, one thread, decides about writes and removals. One thread of the tier does them, one
verifies files before they are read. Neither blocks the owner, and no disk failure reaches it as an
exception. State reported as written survives the death of the process at any moment.
"""

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from ..errors import DamagedFileError, DiskTierError, UnreadableFileError
from ..record import Pin, Record
from .files import DIGEST, identity, new_name, verify_file, write_file
from .index import is_damage
from .queue import DiskStatistics, State, Worker, WriteJob, Written
from .recovery import open_folder, reason_of

log = structlog.get_logger()

_clock = time.monotonic

_GRACE = 2.0  # seconds that the threads get to notice that they shall give up
_WARN_EVERY = 60.0  # seconds between warnings of what may happen thousands of times


class Verified(NamedTuple):
    """Records whose files are damaged (missing, different, of another path) or unreadable now."""

    damaged: list[Record]
    unreadable: list[Record]


class DiskTier(Worker):
    """An open folder: the queue of its writes, and the threads that serve it.

    Its methods are the owner's, except `statistics`, which is anyone's. Only `flush` and `close`
    wait for a disk. `records` (ascending by start) and `pins` are those found at the start, when
    `collected` was removed (see `open_folder`). The state is "on"; "suspended" after a write
    failed, until one succeeds again; "off" for good once the folder is gone.

    Args:
        folder: created if need be, private to the user.
        fingerprint: of the loaded model. Records of others are collected at the start.
        queue_bytes: limit of waiting writes; a larger job is taken when nothing waits.
        wake: called on the tier's threads when `completed` or a future has something new.
        retry_after: seconds until a write is tried again after one failed.

    Raises:
        FolderInUseError: another tier holds the folder.
        DiskTierError: the folder cannot be used. The message says why, and what to do.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        queue_bytes: int,
        wake: Callable[[], None] = lambda: None,
        retry_after: float = 60.0,
    ) -> None:
        super().__init__("umbel-disk-writer")
        self.folder = folder.absolute()
        self.fingerprint = fingerprint
        self.queue_bytes = queue_bytes
        opened = open_folder(self.folder, fingerprint)
        self.records = opened.records
        self.pins = opened.pins
        self.collected = opened.collected
        self._index = opened.index
        self._lock_fd = opened.lock_fd
        self._identity = opened.identity
        self._wake = wake
        self._retry_after = retry_after
        self._unremoved: set[int] = set()  # rows that could not be removed with their files
        # `changed` guards the rest.
        self._completed: list[Written] = []
        self._sizes = {record.id: record.nbytes for record in opened.records}
        self._state: State = "on"
        self._reason = ""
        self._retry_at = 0.0  # of the monotonic clock: the other one jumps
        self._queued = self._writes = self._failures = self._unread = 0
        self._silent_until = 0.0
        self._verifier = Worker("umbel-disk-verifier")
        self.thread.start()
        self._verifier.thread.start()

    def path(self, record: Record) -> Path:
        """Where a record's file is."""
        return self.folder / record.name

    def write(self, job: WriteJob) -> bool:
        """Queue a write; False if too much waits, or nothing is written at present.

        True promises one `Written` for it. The payload is released on the writer's thread.
        """
        with self.changed:
            full = self._queued > 0 and self._queued + job.nbytes > self.queue_bytes
            resting = self._state == "suspended" and _clock() < self._retry_at
            if full or resting or self.closed or self._state == "off":
                return False
            self._queued += job.nbytes
            return self.add(partial(self._keep, job), partial(self._answer, job, None))

    def completed(self) -> list[Written]:
        """Take the results since the last call, in the order of the jobs."""
        with self.changed:
            results, self._completed = self._completed, []
        return results

    def delete(self, records: Iterable[Record]) -> None:
        """Remove records and their files, after what was queued before."""
        if found := list(records):
            self._call(partial(self._delete, found))

    def touch(self, used: dict[int, int]) -> None:
        """Set the recency counters of records by their ids; unknown ones are ignored."""
        if used:
            self._call(partial(self._transact, partial(self._index.touch, used)))

    def pin(self, pin: Pin) -> None:
        """Keep a pin in the index, in place of the tenant's older one of that name."""
        self._call(partial(self._transact, partial(self._index.pin, pin)))

    def unpin(self, name: str, tenant: str) -> None:
        """Remove a pin from the index."""
        self._call(partial(self._transact, partial(self._index.unpin, name, tenant)))

    def verify(self, records: Sequence[Record]) -> Future[Verified]:
        """Read files and compare them with what was written; a DiskTierError if closed first."""
        future: Future[Verified] = Future()
        refuse = partial(_refuse, future)
        if not self._verifier.add(partial(self._verify, list(records), future), refuse):
            refuse()
        return future

    def cannot_read(self, reason: str) -> None:
        """Note that a file cannot be read at present. Safe to call from any thread."""
        with self.changed:
            self.failed()
            self._unread += 1
            now = _clock()
            if now < self._silent_until:
                return
            count, self._unread = self._unread, 0
            self._silent_until = now + _WARN_EVERY
        log.warning("state on disk cannot be read at present", reason=reason, count=count)

    def leave(self, state: State, reason: str) -> bool:
        """Become suspended, or off, and refuse waiting writes; True if state or reason changed."""
        with self.changed:
            if self._state == "off":
                return False
            is_new = (self._state, self._reason) != (state, reason)
            # Other failures during a suspension must not prolong it for ever.
            if self._state != "suspended" or _clock() >= self._retry_at:
                self._retry_at = _clock() + self._retry_after
            self._state, self._reason = state, reason
            self.refuse()
        if is_new:
            log.warning("the disk cache takes nothing more", state=state, reason=reason)
        self._wake()  # for the writes that were refused
        return is_new

    def statistics(self) -> DiskStatistics:
        """Describe the queue and what is on disk."""
        with self.changed:
            return DiskStatistics(
                state="off" if self.closed else self._state,
                reason="closed" if self.closed else self._reason,
                nbytes=sum(self._sizes.values()),
                records=len(self._sizes),
                queued_bytes=self._queued,
                writes=self._writes,
                failures=self._failures,
            )

    def flush(self, timeout: float) -> bool:
        """Wait until all that was asked for is done; False when that takes over `timeout` s."""
        deadline = time.monotonic() + timeout
        if not super().flush(timeout):
            return False
        return self._verifier.flush(max(0.0, deadline - time.monotonic()))

    def close(self, timeout: float) -> None:
        """Finish the queue, but give up after `timeout` s, and return two seconds later at most.

        Idempotent. The writer gives the folder up when it ends: perhaps with the process only.
        """
        workers: tuple[Worker, ...] = (self, self._verifier)
        for abandon, seconds in ((False, timeout), (True, _GRACE)):
            deadline = time.monotonic() + seconds
            for worker in workers:
                worker.end(abandon=abandon)
            for worker in workers:
                worker.thread.join(max(0.0, deadline - time.monotonic()))
        if any(worker.thread.is_alive() for worker in workers):
            log.warning("disk threads did not stop: the disk does not answer")

    # -- on the verifier's thread ----------------------------------------------------------

    def _verify(self, records: list[Record], future: Future[Verified]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        verified = Verified([], [])
        try:
            for record in records:
                self._compare(record, verified)
            future.set_result(verified)
        except Exception as error:  # noqa: BLE001  (it belongs to the future's owner)
            future.set_exception(error)
        self._wake()

    def _compare(self, record: Record, verified: Verified) -> None:
        path, stopped = self.path(record), self._verifier.is_abandoned
        try:
            metadata = verify_file(path, record.nbytes, record.checksum, stopped)
            if metadata.get(DIGEST) != record.digest.hex():
                raise DamagedFileError(f"{path} holds the state of another path")  # noqa: TRY301
        except DamagedFileError as error:
            log.warning("a file of the disk cache is damaged", reason=str(error))
            self._folder_is_there()
            verified.damaged.append(record)
        except UnreadableFileError as error:
            self.cannot_read(str(error))
            verified.unreadable.append(record)

    # -- on the writer's thread ------------------------------------------------------------

    def failed(self) -> None:
        """Count a failure."""
        with self.changed:
            self._failures += 1

    def ended(self) -> None:
        """Give the folder up."""
        self._index.close()
        os.close(self._lock_fd)

    def _call(self, job: Callable[[], None]) -> None:
        """Queue a job other than a write. Forgotten once the tier is off."""
        with self.changed:
            if self._state != "off":
                self.add(job)

    def _keep(self, job: WriteJob) -> None:
        record, failure = None, None
        try:
            record = self._write(job)
        except (OSError, sqlite3.Error) as error:
            failure = _meaning(error)  # not the error: its traceback would keep the payload
        except DiskTierError:  # the tier is being closed
            pass
        except Exception:
            log.exception("a payload cannot be written")
            self.failed()
        self._answer(job, record)
        if failure is not None:
            self._suspend(*failure)
        elif record is not None and self._unremoved:  # now there is room for that
            self._transact(self._remove_rows)
        self._wake()

    def _answer(self, job: WriteJob, record: Record | None) -> None:
        """Note the result of a write. One that was kept ends a suspension."""
        nbytes = job.nbytes
        job.payload.release()  # first: the owner counts on its memory
        with self.changed:
            self._completed.append(Written(job.token, record))
            self._queued -= nbytes
            if record is not None:
                self._sizes[record.id] = record.nbytes
                self._writes += 1
                if self._state == "suspended":
                    self._state, self._reason = "on", ""

    def _write(self, job: WriteJob) -> Record:
        if identity(self.folder) != self._identity:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
        name = new_name()
        metadata = job.payload.metadata | {DIGEST: job.record.digest.hex()}
        payload = job.payload._replace(metadata=metadata)
        nbytes, checksum = write_file(self.folder, name, payload, self.is_abandoned)
        try:
            return self._index.add(replace(job.record, name=name, nbytes=nbytes, checksum=checksum))
        except BaseException:
            (self.folder / name).unlink(missing_ok=True)
            raise

    def _delete(self, records: list[Record]) -> None:
        """Remove the rows, then the files, even if a full disk has no room for the transaction."""
        self._unremoved.update(record.id for record in records)
        self._transact(self._remove_rows)
        for record in records:
            try:
                self.path(record).unlink(missing_ok=True)
            except OSError as error:
                self.failed()
                log.warning("cannot delete disk-cache file", reason=reason_of(error))
        with self.changed:
            for record in records:
                self._sizes.pop(record.id, None)

    def _remove_rows(self) -> None:
        self._index.remove(self._unremoved)
        self._unremoved.clear()

    def _transact(self, transaction: Callable[[], None]) -> None:
        try:
            transaction()
        except sqlite3.Error as error:
            self._suspend(*_meaning(error))

    def _suspend(self, state: State, reason: str) -> None:
        self.failed()
        if self._folder_is_there():
            self.leave(state, reason)

    def _folder_is_there(self) -> bool:
        """True if folder, lock and index are still those that were opened; else the tier is off."""
        try:
            if identity(self.folder) == self._identity is not None:
                return True
        except OSError:
            return True  # as far as can be told
        self.leave("off", f"{self.folder} was removed or replaced: restart umbel to use it again")
        return False


def _meaning(error: OSError | sqlite3.Error) -> tuple[State, str]:
    """Return the state after a failure, and why: a damaged index is never written to."""
    if isinstance(error, sqlite3.Error) and is_damage(error):
        return "off", f"its index is damaged ({error}): restart umbel to begin without it"
    return "suspended", reason_of(error)


def _refuse(future: Future[Verified]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(DiskTierError("the disk cache was closed"))
