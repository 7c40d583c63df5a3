"""The index of the disk tier: which file holds what. SQLite, one connection.

It is written after the file and removed before it, so that a row always had its file. Losing
it loses the tier's contents and nothing else: an index that cannot be read is started anew.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from .disk_files import INDEX, is_file_name, is_temporary
from .errors import DiskTierError

FORMAT = 1  # of the index and of the files' contents; raised when either changes

_BUSY_SECONDS = 5.0  # someone else looks at the index, with sqlite3's shell for example
_COLUMNS = "id, kind, tenant, start, end, prefix, tokens, name, nbytes, checksum, used"
_SCHEMA = (
    """CREATE TABLE records (
        id INTEGER PRIMARY KEY AUTOINCREMENT, fingerprint TEXT NOT NULL, kind TEXT NOT NULL,
        tenant TEXT NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL,
        prefix BLOB NOT NULL, tokens BLOB NOT NULL, name TEXT NOT NULL UNIQUE,
        nbytes INTEGER NOT NULL, checksum BLOB NOT NULL, used INTEGER NOT NULL)""",
    """CREATE TABLE pins (
        fingerprint TEXT NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL,
        tokens BLOB NOT NULL, PRIMARY KEY (fingerprint, tenant, name))""",
    f"PRAGMA user_version = {FORMAT}",
)
# What SQLite says of a file that is none of its own, or damaged, or lacks our tables.
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})


class RecordKind(Enum):
    """What a file holds: the state of consecutive tokens, or all state at one offset."""

    SPAN = "span"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Record:
    """One file, as the index knows it.

    Attributes:
        id: unique for ever in its index.
        kind: what the file holds.
        tenant: whose it is.
        start: offset in the token path where it begins.
        end: offset where it ends; a checkpoint's is its start.
        prefix: the owner's digest, 16 bytes, of the path's tokens before `start`.
        tokens: its own tokens [start, end), int32 little-endian; empty for a checkpoint.
        name: the file's name in the folder.
        nbytes: the file's size.
        checksum: xxh3_128 of the file, 16 bytes.
        used: the owner's recency counter; larger is newer.
    """

    id: int
    kind: RecordKind
    tenant: str
    start: int
    end: int
    prefix: bytes
    tokens: bytes
    name: str
    nbytes: int
    checksum: bytes
    used: int


class Pin(NamedTuple):
    """A path that a user wants kept. Tokens are int32 little-endian."""

    name: str
    tenant: str
    tokens: bytes


class UnusableIndexError(Exception):
    """The index is damaged or of an older format: start anew."""


class OutdatedIndexError(UnusableIndexError):
    """The index is of an older format."""


class DiskIndex:
    """An open index. Belongs to one thread at a time.

    Raises:
        UnusableIndexError: it is damaged or of an older format.
        DiskTierError: a newer umbel made it.
        sqlite3.Error: it cannot be opened or written.
        OSError: likewise.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / INDEX
        # SQLite would make it readable for all, and follow a link.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
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
            raise OutdatedIndexError(f"it is of format {version}, and {FORMAT} is written now")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        if fresh:
            self._transact(_SCHEMA)
        elif verdict := self._fault():
            raise UnusableIndexError(verdict)

    def add(self, fingerprint: str, record: Record) -> Record:
        """Insert a record, in a transaction of its own; return it with its id."""
        values = (fingerprint, *_row(record))
        places = ", ".join("?" * len(values))
        columns = _COLUMNS.removeprefix("id, ")
        statement = f"INSERT INTO records (fingerprint, {columns}) VALUES ({places})"  # noqa: S608
        with self._transaction():
            row_id = self._database.execute(statement, values).lastrowid
        assert row_id is not None  # noqa: S101  (it was an INSERT)
        return replace(record, id=row_id)

    def remove(self, ids: Iterable[int]) -> None:
        """Remove records, all in one transaction; unknown ones are ignored."""
        with self._transaction():
            self._database.executemany("DELETE FROM records WHERE id = ?", ((i,) for i in ids))

    def touch(self, used: dict[int, int]) -> None:
        """Set recency counters by id, all in one transaction; unknown ones are ignored."""
        values = ((counter, row_id) for row_id, counter in used.items())
        with self._transaction():
            self._database.executemany("UPDATE records SET used = ? WHERE id = ?", values)

    def records(self, fingerprint: str, *, others: bool = False) -> list[Record]:
        """List the records of a model, or of all others, ascending by start.

        Raises:
            UnusableIndexError: the index is damaged.
        """
        comparison = "!=" if others else "="
        query = (
            f"SELECT {_COLUMNS} FROM records WHERE fingerprint {comparison} ? "  # noqa: S608
            "ORDER BY start, id"
        )
        with _damage():
            return [_record(*row) for row in self._database.execute(query, (fingerprint,))]

    def pin(self, fingerprint: str, pin: Pin) -> None:
        """Keep a pin, in place of the tenant's older one of that name."""
        with self._transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO pins (fingerprint, tenant, name, tokens) "
                "VALUES (?, ?, ?, ?)",
                (fingerprint, pin.tenant, pin.name, pin.tokens),
            )

    def unpin(self, fingerprint: str, name: str, tenant: str) -> None:
        """Forget a pin; an unknown one is ignored."""
        with self._transaction():
            self._database.execute(
                "DELETE FROM pins WHERE fingerprint = ? AND tenant = ? AND name = ?",
                (fingerprint, tenant, name),
            )

    def pins(self, fingerprint: str) -> list[Pin]:
        """List a model's pins. Those of other models stay: a user asked for them.

        Raises:
            UnusableIndexError: the index is damaged.
        """
        query = "SELECT name, tenant, tokens FROM pins WHERE fingerprint = ? ORDER BY tenant, name"
        with _damage():
            return [Pin(*row) for row in self._database.execute(query, (fingerprint,))]

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

    def _transact(self, statements: Iterable[str]) -> None:
        with self._transaction():
            for statement in statements:
                self._database.execute(statement)

    def _fault(self) -> str:
        """What SQLite finds damaged in its own structure; empty if nothing."""
        with closing(self._database.execute("PRAGMA quick_check(1)")) as cursor:
            verdict = str(cursor.fetchone()[0])
        return "" if verdict == "ok" else verdict

    def _value(self, query: str) -> int:
        with closing(self._database.execute(query)) as cursor:
            value: int = cursor.fetchone()[0]
        return value


@contextmanager
def _damage() -> Iterator[None]:
    """Tell damage from what a full disk or a lock makes SQLite say."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UnusableIndexError(str(error)) from error
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code & 0xFF in _CORRUPT or code == sqlite3.SQLITE_IOERR_SHORT_READ:
            raise UnusableIndexError(str(error)) from error
        raise


def _row(record: Record) -> tuple[object, ...]:
    """What the table holds of a record, in the order of `_COLUMNS`, without the id."""
    return (
        record.kind.value,
        record.tenant,
        record.start,
        record.end,
        record.prefix,
        record.tokens,
        record.name,
        record.nbytes,
        record.checksum,
        record.used,
    )


def _record(
    row_id: int, kind: str, tenant: str, start: int, end: int, *rest: bytes | str | int
) -> Record:
    """Read a row.

    Raises:
        ValueError: it is none that `add` wrote; above all, no path that leads elsewhere.
    """
    record = Record(row_id, RecordKind(kind), tenant, start, end, *rest)  # type: ignore[arg-type]
    if not is_file_name(record.name) or is_temporary(record.name):
        raise ValueError(f"{record.name!r} is no name of a file of the cache")
    return record
