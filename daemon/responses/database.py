"""The SQLite database of stored responses: a file, made again when damaged, or memory."""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import structlog

from ...scheduler.errors import UnavailableError
from ...scheduler.limits import RETRY_AFTER

T = TypeVar("T")

FILE = "responses.sqlite"
_FILES = (FILE, f"{FILE}-wal", f"{FILE}-shm", f"{FILE}-journal")
_FORMAT = 1
_LARGEST_LOG = 16 * 1024 * 1024  # bytes of SQLite's log that stay when it has been emptied

_SCHEMA = f"""
BEGIN;
CREATE TABLE responses (
    key INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, previous TEXT,
    conversation TEXT NOT NULL, status TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    bytes INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (tenant, id)
);
CREATE TABLE items (
    response INTEGER NOT NULL REFERENCES responses (key) ON DELETE CASCADE,
    is_output INTEGER NOT NULL, place INTEGER NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (response, is_output, place)
) WITHOUT ROWID;
CREATE INDEX items_by_id ON items (id);
CREATE INDEX responses_by_use ON responses (tenant, used, bytes);
CREATE INDEX responses_by_age ON responses (created);
PRAGMA user_version = {_FORMAT};
COMMIT;
"""

log = structlog.get_logger()


class ResponseDatabase:
    """Runs transactions, one at a time, on any thread.

    Damage is a loss of the stored responses, and no more: the file is made again, with a warning.
    A disk that cannot be used at all is replaced by memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        try:
            self._database = _connect(folder)
        except (sqlite3.DatabaseError, OSError) as error:
            self._database = self._reopen(error)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a transaction; raises UnavailableError while the disk cannot be read."""
        try:
            return self._run(work)
        except sqlite3.OperationalError as error:
            log.warning("stored responses cannot be read", reason=str(error))
            message = "stored responses cannot be read at present; try again later"
            raise UnavailableError(message, retry_after=RETRY_AFTER) from error

    def write(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Run a transaction; if the disk cannot be written, the log says so."""
        try:
            self._run(work)
        except sqlite3.OperationalError as error:
            log.warning("a response is not stored", reason=str(error))

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                with _transaction(self._database):
                    return work(self._database)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                with suppress(sqlite3.Error):
                    self._database.close()
                self._database = self._reopen(error)
                with _transaction(self._database):
                    return work(self._database)

    def _reopen(self, error: Exception) -> sqlite3.Connection:
        """Make a damaged file again; use memory if that, or the disk, fails."""
        if _is_damage(error):
            log.warning("the stored responses start empty", reason=str(error))
            try:
                if self._folder is not None:
                    for name in _FILES:
                        (self._folder / name).unlink(missing_ok=True)
                return _connect(self._folder)
            except (OSError, sqlite3.Error) as again:
                error = again
        log.warning("responses are stored in memory only", reason=str(error))
        self._folder = None
        return _connect(None)


def _is_damage(error: Exception) -> bool:
    """Return True for a file that is broken or no database; subclasses mean something else."""
    return type(error) is sqlite3.DatabaseError


def _connect(folder: Path | None) -> sqlite3.Connection:
    path = ":memory:"
    if folder is not None:
        path = str(folder / FILE)
        # SQLite would make a file that all users may read, and follow a link.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        _prepare(database)
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection) -> None:
    # There is no second connection; so SQLite needs no mapped file, which a full disk could
    # turn into a SIGBUS.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA foreign_keys = ON")
    database.execute(f"PRAGMA journal_size_limit = {_LARGEST_LOG}")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and version != _FORMAT:
        raise sqlite3.DatabaseError(f"it is of format {version}, and {_FORMAT} is written now")
    if not tables:
        database.executescript(_SCHEMA)
    (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise
