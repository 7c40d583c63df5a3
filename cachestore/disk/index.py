"""Index of the disk tier: the file that holds each record, and the pins. SQLite, one connection.

A row is written after its file and removed before it. An index that cannot be read is replaced:
only the tier's contents are lost. Disk damage may have changed a row, and SQLite keeps any type in
any column: rows are checked when read.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import structlog

from ..errors import DiskTierError
from ..record import Pin, Record, RecordKind, digest_of
from .files import INDEX, is_file_name, is_temporary

# In the order of the fields of `Record`.
_COLUMNS = "id, kind, tenant, start, end, prefix, digest, tokens, name, nbytes, checksum, used"

_RECORD = (int, str, str, int, int, bytes, bytes, bytes, str, int, bytes, int)
_PIN = (str, str, bytes, bytes)
_LATEST = 1 << 62  # a recency counter counts on from what is read, and must not overflow


def _record_of(row: tuple[Any, ...]) -> Record:
    """Read a row of `_COLUMNS`; a ValueError if `add` did not write it."""
    _check_types(row, _RECORD)
    row_id, kind, *rest = row
    record = Record(row_id, RecordKind(kind), *rest)
    if not is_file_name(record.name) or is_temporary(record.name):
        raise ValueError(f"{record.name!r} is no name of a file of the cache")
    if not (0 <= record.start <= record.end and record.nbytes >= 0 <= record.used < _LATEST):
        raise ValueError(f"the numbers of {record.name} make no sense")
    return record


def _check_types(row: tuple[Any, ...], types: tuple[type, ...]) -> None:
    if tuple(map(type, row)) != types:
        raise ValueError("a row has values of other types than were written")


FORMAT = 3  # of the index and of the files' contents; raised when either changes

_BUSY_SECONDS = 5.0  # someone else looks at the index, with sqlite3's shell for example
_SCHEMA = (
    """CREATE TABLE records (
        id INTEGER PRIMARY KEY AUTOINCREMENT, fingerprint TEXT NOT NULL, kind TEXT NOT NULL,
        tenant TEXT NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL,
        prefix BLOB NOT NULL, digest BLOB NOT NULL, tokens BLOB NOT NULL,
        name TEXT NOT NULL UNIQUE, nbytes INTEGER NOT NULL, checksum BLOB NOT NULL,
        used INTEGER NOT NULL)""",
    """CREATE TABLE pins (
        fingerprint TEXT NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL,
        tokens BLOB NOT NULL, digest BLOB NOT NULL,
        PRIMARY KEY (fingerprint, tenant, name))""",
    f"PRAGMA user_version = {FORMAT}",
)
# Codes of SQLite for a file that is damaged, or none of its own, also in the middle of its use.
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT})
# And for one of no use from the start: it lacks our tables, or has values that make no sense.
_CORRUPT = _DAMAGED | {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH}
_HEADER = 20  # bytes of SQLite's header that are read here
_WRITE_VERSION, _NEWEST = 18, 2  # the byte with the version of the format; the newest version

log = structlog.get_logger()


class UnusableIndexError(Exception):
    """The index is damaged or of an older format: start without it."""


class DiskIndex:
    """An open index, for the records and pins of one model. Belongs to one thread at a time.

    Raises:
        UnusableIndexError: it is damaged or of an older format. Methods that read raise it too.
        DiskTierError: a newer umbel made it.
        sqlite3.Error, OSError: it cannot be opened or written.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        path = folder / INDEX
        # SQLite would make it readable for all, and follow a link.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            header = os.pread(fd, _HEADER, 0)
        finally:
            os.close(fd)
        if header[_WRITE_VERSION:][:1] > bytes([_NEWEST]):
            # SQLite would only read it, and say no more than a disk that may not be written.
            raise UnusableIndexError("its header says that it cannot be written")
        # The tier opens it on the thread that wants the records, then gives it to the writer.
        self._database = sqlite3.connect(
            path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            with _damage():
                self._prepare(folder)
        except BaseException:
            self._database.close()
            raise

    def _prepare(self, folder: Path) -> None:
        # There is no second connection. Exclusive, SQLite keeps its shared memory to itself
        # and not in a mapped file, which a full disk could turn into a SIGBUS.
        self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
        version = self._value("PRAGMA user_version")
        if version > FORMAT:
            raise DiskTierError(
                f"a newer umbel wrote the cache folder {folder} (format {version}, this one "
                f"knows {FORMAT}): update umbel, or give it another folder"
            )
        fresh = not self._value("SELECT count(*) FROM sqlite_master")
        if not fresh and version < FORMAT:
            raise UnusableIndexError(f"it is of format {version}, and {FORMAT} is written now")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        if fresh:
            with self._transaction():
                for statement in _SCHEMA:
                    self._database.execute(statement)
        if verdict := self._fault():
            raise UnusableIndexError(verdict)

    def add(self, record: Record) -> Record:
        """Insert a record, in a transaction of its own; return it with its id."""
        values = (self._fingerprint, record.kind.value, *astuple(record)[2:])
        places = ", ".join("?" * len(values))
        columns = _COLUMNS.removeprefix("id, ")
        statement = f"INSERT INTO records (fingerprint, {columns}) VALUES ({places})"  # noqa: S608
        with self._transaction():
            row_id = self._database.execute(statement, values).lastrowid
        assert row_id is not None  # noqa: S101  (it was an INSERT)
        return replace(record, id=row_id)

    def remove(self, ids: Iterable[int]) -> None:
        """Remove records, all in one transaction; unknown ones are ignored."""
        self._write("DELETE FROM records WHERE id = ?", ((row_id,) for row_id in ids))

    def touch(self, used: dict[int, int]) -> None:
        """Set recency counters by id, all in one transaction; unknown ones are ignored."""
        values = ((counter, row_id) for row_id, counter in used.items())
        self._write("UPDATE records SET used = ? WHERE id = ?", values)

    def records(self, *, others: bool = False) -> list[Record]:
        """List the records of the model, or of all others, ascending by start."""
        comparison = "!=" if others else "="
        query = (
            f"SELECT {_COLUMNS} FROM records WHERE fingerprint {comparison} ? "  # noqa: S608
            "ORDER BY start, id"
        )
        with _damage():
            return [_record_of(row) for row in self._database.execute(query, (self._fingerprint,))]

    def largest_model(self) -> str | None:
        """Fingerprint of the model with most bytes in it; None if it has no rows."""
        query = (
            "SELECT fingerprint FROM (SELECT fingerprint, nbytes FROM records UNION ALL "
            "SELECT fingerprint, 0 FROM pins) GROUP BY fingerprint ORDER BY sum(nbytes) DESC"
        )
        with _damage():
            row = self._database.execute(query).fetchone()
        return None if row is None else str(row[0])

    def pin(self, pin: Pin) -> None:
        """Keep a pin, in place of the tenant's older one of that name."""
        values = (self._fingerprint, pin.tenant, pin.name, pin.tokens, self._digest(pin))
        statement = (
            "INSERT OR REPLACE INTO pins (fingerprint, tenant, name, tokens, digest) "
            "VALUES (?, ?, ?, ?, ?)"
        )
        self._write(statement, [values])

    def unpin(self, name: str, tenant: str) -> None:
        """Forget a pin; an unknown one is ignored."""
        statement = "DELETE FROM pins WHERE fingerprint = ? AND tenant = ? AND name = ?"
        self._write(statement, [(self._fingerprint, tenant, name)])

    def pins(self) -> list[Pin]:
        """List the model's pins; one whose digest differs is removed. Other models' pins stay."""
        query = (
            "SELECT name, tenant, tokens, digest FROM pins WHERE fingerprint = ? "
            "ORDER BY tenant, name"
        )
        sound = []
        with _damage():
            for row in self._database.execute(query, (self._fingerprint,)).fetchall():
                _check_types(row, _PIN)
                pin = Pin(*row[:3])
                if self._digest(pin) == row[3]:
                    sound.append(pin)
                    continue
                log.warning("a pin is damaged and is forgotten: pin it again", pin=pin.name)
                self.unpin(pin.name, pin.tenant)
        return sound

    def _digest(self, pin: Pin) -> bytes:
        return digest_of(self._fingerprint, pin.tenant, pin.name, pin.tokens)

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # some errors have rolled it back already
                self._database.execute("ROLLBACK")
            raise

    def _write(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        with self._transaction():
            self._database.executemany(statement, rows)

    def _fault(self) -> str:
        """Damage of SQLite's own structure, or of our tables; empty if there is none."""
        # `quick_check` does not find a row missing in the index of names, which never goes.
        with closing(self._database.execute("PRAGMA integrity_check(1)")) as cursor:
            verdict = str(cursor.fetchone()[0])
        if verdict != "ok":
            return verdict
        return "" if _tables() <= _tables_of(self._database) else "its tables are not ours"

    def _value(self, query: str) -> int:
        with closing(self._database.execute(query)) as cursor:
            value: int = cursor.fetchone()[0]
        return value


def is_damage(error: sqlite3.Error) -> bool:
    """True if an error of a write shows that the index is damaged."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF in _DAMAGED


@cache
def _tables() -> frozenset[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as database:
        for statement in _SCHEMA:
            database.execute(statement)
        return _tables_of(database)


def _tables_of(database: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    return frozenset(database.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


@contextmanager
def _damage() -> Iterator[None]:
    """Raise an UnusableIndexError for damage, and no other fault of a full disk or a lock."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UnusableIndexError(str(error)) from error
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code & 0xFF in _CORRUPT or code == sqlite3.SQLITE_IOERR_SHORT_READ:
            raise UnusableIndexError(str(error)) from error
        raise
