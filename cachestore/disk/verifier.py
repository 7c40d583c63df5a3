"""The thread of the disk tier that verifies files before the owner reads them."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import structlog

from ..errors import DamagedFileError, DiskTierError, UnreadableFileError
from ..record import Record
from .files import DIGEST, verify_file

log = structlog.get_logger()


class Verified(NamedTuple):
    """Records whose files are damaged (missing, different, of another path) or unreadable now."""

    damaged: list[Record]
    unreadable: list[Record]


class DiskVerifier:
    """Verifies files in the order they were asked for. Callbacks run on its thread."""

    def __init__(
        self,
        folder: Path,
        wake: Callable[[], None],
        on_damage: Callable[[], object],
        on_unreadable: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._wake = wake
        self._on_damage = on_damage
        self._on_unreadable = on_unreadable
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: deque[tuple[Future[Verified], list[Record]]] = deque()
        self._closed = self._abandoned = False
        self.thread = threading.Thread(target=self._run, name="umbel-disk-verifier", daemon=True)

    def verify(self, records: Sequence[Record]) -> Future[Verified]:
        """Read files and compare them with what was written; a DiskTierError if closed first."""
        future: Future[Verified] = Future()
        with self._changed:
            if self._closed:
                _fail(future)
            else:
                self._waiting.append((future, list(records)))
                self._changed.notify_all()
        return future

    def end(self, *, abandon: bool = False) -> None:
        """Take nothing more; with `abandon`, give up what waits and what is being read."""
        with self._changed:
            self._closed = True
            self._abandoned = self._abandoned or abandon
            waiting = list(self._waiting) if abandon else []
            if abandon:
                self._waiting.clear()
            self._changed.notify_all()
        for future, _ in waiting:
            _fail(future)

    # -- on the thread -------------------------------------------------------------------

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return False
            future, records = self._waiting.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._verify(records))
            except Exception as error:  # noqa: BLE001  (it belongs to whoever waits for it)
                future.set_exception(error)
            self._call_wake()
        return True

    def _verify(self, records: list[Record]) -> Verified:
        verified = Verified([], [])
        for record in records:
            try:
                self._compare(record)
            except DamagedFileError as error:
                log.warning("a file of the disk cache is damaged", reason=str(error))
                self._on_damage()
                verified.damaged.append(record)
            except UnreadableFileError as error:
                self._on_unreadable(str(error))
                verified.unreadable.append(record)
        return verified

    def _compare(self, record: Record) -> None:
        path = self._folder / record.name
        metadata = verify_file(path, record.nbytes, record.checksum, lambda: self._abandoned)
        if metadata.get(DIGEST) != record.digest.hex():
            raise DamagedFileError(f"{path} holds the state of another path")

    def _call_wake(self) -> None:
        try:
            self._wake()
        except Exception:
            log.exception("the disk cache's owner cannot be woken")


def _fail(future: Future[Verified]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(DiskTierError("the disk cache was closed"))
