"""Responses that are kept for later requests: by tenant, within a budget of bytes, for a time."""

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .database import ResponseDatabase

MAX_CHAIN = 1000
"""Responses that one may go on with."""

MAX_PAST = 16 * 1024 * 1024
"""Bytes of the items that one may go on with."""

LIFETIME = 30 * 24 * 3600.0
"""Seconds that a response is kept."""

_SECOND_LOOK = 3600.0  # seconds after which old rows are deleted, if they are still old then
_ROW_BYTES = 256  # what a row takes besides its texts


class StoredItem(NamedTuple):
    """An item of a response.

    Attributes:
        id: of the item.
        body: its JSON.
    """

    id: str
    body: bytes


class StoredResponse(NamedTuple):
    """A response as it is kept.

    Attributes:
        id: of the response.
        status: as in its body; not `in_progress`.
        body: the JSON of the response object, but for its output.
        output: its items.
    """

    id: str
    status: str
    body: bytes
    output: list[StoredItem]


class Past(NamedTuple):
    """What a response goes on with.

    Attributes:
        items: the JSON of inputs and outputs, oldest first.
        conversation: under which name the last of them ran.
        nbytes: of the items.
    """

    items: list[bytes]
    conversation: str
    nbytes: int


class NoSuchResponseError(Exception):
    """There is none of that id, for this tenant; or one that it goes on with is gone."""


class UnfinishedResponseError(Exception):
    """It has no answer that one could go on with; the message is its status."""


class PastTooLongError(Exception):
    """It goes on with more than one request may have."""


class ResponseStore:
    """Keeps responses in SQLite: in a file, or in memory. Any thread may call it.

    Over the budget, the tenant that holds most loses what it has not used for longest, so that
    no tenant loses anything to one that has more. All methods that look for something raise
    `UnavailableError` while the disk cannot be read; what cannot be written is lost, and the
    log says so.

    Args:
        folder: where the file is, which belongs to this store alone; None: in memory.
        budget: bytes of all texts and rows; 0 keeps nothing. It may change.
        clock: seconds since 1970. Rows that are too old by it are not found; they are deleted an
            hour later, so that a clock that is ahead for a while loses nothing for good.
        uptime: seconds, never set.
    """

    def __init__(
        self,
        folder: Path | None,
        budget: int,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self._clock, self._uptime = clock, uptime
        self._looked: tuple[float, float] | None = None  # since when, and what was old throughout
        self._database = ResponseDatabase(folder)
        self._database.write(self._collect)

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def put(
        self,
        tenant: str,
        response: StoredResponse,
        *,
        previous: str | None,
        conversation: str,
        inputs: Sequence[StoredItem],
    ) -> None:
        """Keep a response, under the name in which a next one goes on.

        One that exceeds the budget alone is not kept, and removes no other.
        """
        named = tenant, response.id, previous, conversation, response.status
        nbytes = _ROW_BYTES + len(response.body) + _size(inputs) + _size(response.output)
        if nbytes > self.budget:
            return  # there is no room for it, however much else is removed

        def insert(database: sqlite3.Connection) -> None:
            now = self._clock()
            key = database.execute(
                "INSERT INTO responses (tenant, id, previous, conversation, status, created, used,"
                " bytes, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*named, now, now, nbytes, response.body),
            ).lastrowid
            _insert(database, key, inputs, is_output=False)
            _insert(database, key, response.output, is_output=True)
            self._collect(database)

        self._database.write(insert)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; say whether it was there."""

        def delete(database: sqlite3.Connection) -> bool:
            row = _find(database, "key", tenant, response_id, self._oldest)
            if row is not None:
                database.execute("DELETE FROM responses WHERE key = ?", row)
            return row is not None

        return self._database.read(delete)

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Return a response.

        Raises:
            NoSuchResponseError: it is not there.
        """

        def get(database: sqlite3.Connection) -> StoredResponse:
            key, status, body = self._row(database, "key, status, body", tenant, response_id)
            return StoredResponse(response_id, status, body, _items(database, key, outputs=(1,)))

        return self._database.read(get)

    def input_items(self, tenant: str, response_id: str) -> list[StoredItem]:
        """List the items of a response's input, first to last.

        Raises:
            NoSuchResponseError: it is not there.
        """

        def get(database: sqlite3.Connection) -> list[StoredItem]:
            (key,) = self._row(database, "key", tenant, response_id)
            return _items(database, key, outputs=(0,))

        return self._database.read(get)

    def item(self, tenant: str, item_id: str) -> bytes | None:
        """Return the newest item of an id; None if there is none."""

        def get(database: sqlite3.Connection) -> bytes | None:
            row = database.execute(
                "SELECT items.body FROM items JOIN responses ON items.response = responses.key"
                " WHERE items.id = ? AND tenant = ? AND created > ? ORDER BY key DESC LIMIT 1",
                (item_id, tenant, self._oldest),
            ).fetchone()
            return None if row is None else bytes(row[0])

        return self._database.read(get)

    def past(self, tenant: str, response_id: str) -> Past:
        """Put together what a response and those before it have said. All count as used.

        Raises:
            NoSuchResponseError: one of them is not there.
            UnfinishedResponseError: the last one has no whole answer.
            PastTooLongError: they are too many, or have too many bytes.
        """
        keys: list[int] = []

        def walk(database: sqlite3.Connection) -> Past:
            chain = self._chain(database, tenant, response_id)
            keys.extend(key for key, _ in chain)
            items: list[bytes] = []
            nbytes = 0
            for key in reversed(keys):
                bodies = [item.body for item in _items(database, key)]
                nbytes += sum(map(len, bodies))
                if nbytes > MAX_PAST:
                    raise PastTooLongError
                items += bodies
            return Past(items, chain[0][1], nbytes)

        past = self._database.read(walk)
        self._database.write(lambda database: self._touch(database, keys))
        return past

    def total(self) -> int:
        """Count the bytes of all that is kept."""
        return sum(self._database.read(_totals).values())

    def _touch(self, database: sqlite3.Connection, keys: list[int]) -> None:
        now = self._clock()
        used = [(now, key) for key in keys]
        database.executemany("UPDATE responses SET used = ? WHERE key = ?", used)

    def _chain(
        self, database: sqlite3.Connection, tenant: str, response_id: str
    ) -> list[tuple[int, str]]:
        """Walk from a response to the first one: their keys and conversations."""
        chain: list[tuple[int, str]] = []
        named: str | None = response_id
        columns = "key, conversation, status, previous"
        while named is not None:
            key, conversation, status, named = self._row(database, columns, tenant, named)
            if status not in ("completed", "incomplete"):
                raise UnfinishedResponseError(status)
            chain.append((key, conversation))
            if len(chain) > MAX_CHAIN:
                raise PastTooLongError
        return chain

    def _row(
        self, database: sqlite3.Connection, columns: str, tenant: str, response_id: str
    ) -> tuple[Any, ...]:
        row = _find(database, columns, tenant, response_id, self._oldest)
        if row is None:
            raise NoSuchResponseError(response_id)
        return row

    @property
    def _oldest(self) -> float:
        return self._clock() - LIFETIME

    def _collect(self, database: sqlite3.Connection) -> None:
        """Remove what is too old, and then what the budget has no room for."""
        self._remove_old(database)
        totals = _totals(database)
        while sum(totals.values()) > self.budget:
            tenant = max(totals, key=lambda name: totals[name])
            key, nbytes = database.execute(
                "SELECT key, bytes FROM responses WHERE tenant = ? ORDER BY used, key LIMIT 1",
                (tenant,),
            ).fetchone()
            database.execute("DELETE FROM responses WHERE key = ?", (key,))
            totals[tenant] -= nbytes

    def _remove_old(self, database: sqlite3.Connection) -> None:
        """Remove what has been too old at each look of an hour."""
        now, oldest = self._uptime(), self._oldest
        since, before = self._looked or (now, oldest)
        self._looked = since, min(before, oldest)
        if now - since >= _SECOND_LOOK:
            database.execute("DELETE FROM responses WHERE created <= ?", self._looked[1:])
            self._looked = now, oldest


def _find(
    database: sqlite3.Connection, columns: str, tenant: str, response_id: str, oldest: float
) -> tuple[Any, ...] | None:
    """Find a row that is not too old."""
    statement = f"SELECT {columns} FROM responses WHERE tenant = ? AND id = ? AND created > ?"  # noqa: S608
    row: tuple[Any, ...] | None = database.execute(
        statement, (tenant, response_id, oldest)
    ).fetchone()
    return row


def _items(
    database: sqlite3.Connection, key: int, *, outputs: tuple[int, ...] = (0, 1)
) -> list[StoredItem]:
    rows = database.execute(
        "SELECT id, body FROM items WHERE response = ? AND is_output IN (?, ?)"
        " ORDER BY is_output, place",
        (key, outputs[0], outputs[-1]),
    )
    return [StoredItem(item_id, bytes(body)) for item_id, body in rows]


def _insert(
    database: sqlite3.Connection, key: int | None, items: Sequence[StoredItem], *, is_output: bool
) -> None:
    database.executemany(
        "INSERT INTO items (response, is_output, place, id, body) VALUES (?, ?, ?, ?, ?)",
        [(key, is_output, place, item.id, item.body) for place, item in enumerate(items)],
    )


def _size(items: Sequence[StoredItem]) -> int:
    return sum(_ROW_BYTES + len(item.body) for item in items)


def _totals(database: sqlite3.Connection) -> dict[str, int]:
    rows = database.execute("SELECT tenant, sum(bytes) FROM responses GROUP BY tenant")
    return dict(rows.fetchall())
