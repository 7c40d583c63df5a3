"""Stored responses: in SQLite, by tenant, within a budget of bytes, for a limited time."""

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .database import ResponseDatabase

MAX_CHAIN = 1000
"""Responses that a request's previous response and those before it may be."""

MAX_PAST = 16 * 1024 * 1024
"""Bytes of their items."""

LIFETIME = 30 * 24 * 3600.0
"""Seconds that a response is kept."""

_SECOND_LOOK = 3600.0  # seconds after which expired rows are deleted, if they still are expired
_ROW_BYTES = 256  # of a row, besides its texts


class StoredItem(NamedTuple):
    """An item of a response: its id, and its JSON."""

    id: str
    body: bytes


class StoredResponse(NamedTuple):
    """A response as it is kept."""

    id: str
    status: str  # as in its body; not `in_progress`
    body: bytes  # the JSON of the response object, with an empty output
    output: list[StoredItem]


class Past(NamedTuple):
    """A response and those before it."""

    items: list[bytes]  # the JSON of inputs and outputs, oldest first
    conversation: str  # in which the last of them ran
    nbytes: int  # of the items


class NoSuchResponseError(Exception):
    """The tenant has no response of that id, or an earlier one of its chain is gone."""


class UnfinishedResponseError(Exception):
    """The response has no whole answer; the message is its status."""


class PastTooLongError(Exception):
    """The response has more before it than one request may have."""


class ResponseStore:
    """Keeps responses in a file, or in memory. Any thread may call it.

    Over the budget, the tenant that holds most loses its least recently used responses, so that
    no tenant loses any to one that has more. All methods that look for something raise
    `UnavailableError` while the disk cannot be read; a response that cannot be written is lost,
    and the log says so. Expired rows are not found; they are deleted an hour later, so that a
    clock that is ahead for a while loses nothing for good.
    """

    def __init__(
        self,
        folder: Path | None,  # of the file, for this store alone; None: in memory
        budget: int,  # bytes of all texts and rows; 0 keeps nothing. It may change
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self._clock, self._uptime = clock, uptime
        # when the last look began, and which age was expired ever since
        self._looked: tuple[float, float] | None = None
        self._database = ResponseDatabase(folder)
        self._database.write(self._collect)

    def close(self) -> None:
        """Close the file."""
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
        """Keep a response; `conversation` is the one in which a next one goes on.

        One that exceeds the budget alone is not kept, and removes no other.
        """
        named = tenant, response.id, previous, conversation, response.status
        nbytes = _ROW_BYTES + len(response.body)
        nbytes += sum(_ROW_BYTES + len(item.body) for item in (*inputs, *response.output))
        if nbytes > self.budget:
            return

        def insert(database: sqlite3.Connection) -> None:
            now = self._clock()
            key = database.execute(
                "INSERT INTO responses (tenant, id, previous, conversation, status, created, used,"
                " bytes, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*named, now, now, nbytes, response.body),
            ).lastrowid
            rows = [(key, False, n, *item) for n, item in enumerate(inputs)]
            rows += [(key, True, n, *item) for n, item in enumerate(response.output)]
            columns = "response, is_output, place, id, body"
            database.executemany(f"INSERT INTO items ({columns}) VALUES (?, ?, ?, ?, ?)", rows)  # noqa: S608
            self._collect(database)

        self._database.write(insert)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; False if it was not there."""

        def delete(database: sqlite3.Connection) -> bool:
            row = self._find(database, "key", tenant, response_id)
            if row is not None:
                database.execute("DELETE FROM responses WHERE key = ?", row)
            return row is not None

        return self._database.read(delete)

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Return a response; raises NoSuchResponseError."""

        def get(database: sqlite3.Connection) -> StoredResponse:
            key, status, body = self._row(database, "key, status, body", tenant, response_id)
            return StoredResponse(response_id, status, body, _items(database, key, outputs=(1,)))

        return self._database.read(get)

    def input_items(self, tenant: str, response_id: str) -> list[StoredItem]:
        """List the items of a response's input, first to last; raises NoSuchResponseError."""

        def get(database: sqlite3.Connection) -> list[StoredItem]:
            (key,) = self._row(database, "key", tenant, response_id)
            return _items(database, key, outputs=(0,))

        return self._database.read(get)

    def item(self, tenant: str, item_id: str) -> bytes | None:
        """Return the newest item of an id; None if there is none."""
        statement = (
            "SELECT items.body FROM items JOIN responses ON items.response = responses.key"
            " WHERE items.id = ? AND tenant = ? AND created > ? ORDER BY key DESC LIMIT 1"
        )
        wanted = item_id, tenant, self._oldest
        row = self._database.read(lambda database: database.execute(statement, wanted).fetchone())
        return None if row is None else bytes(row[0])

    def past(self, tenant: str, response_id: str) -> Past:
        """Put together a response and those before it. All count as used.

        Raises:
            NoSuchResponseError: one of them is not there.
            UnfinishedResponseError: one has no whole answer.
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

        def touch(database: sqlite3.Connection) -> None:
            now = self._clock()
            used = [(now, key) for key in keys]
            database.executemany("UPDATE responses SET used = ? WHERE key = ?", used)

        past = self._database.read(walk)
        self._database.write(touch)
        return past

    def total(self) -> int:
        """Count the bytes of all responses."""
        return sum(self._database.read(_totals).values())

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
        row = self._find(database, columns, tenant, response_id)
        if row is None:
            raise NoSuchResponseError(response_id)
        return row

    def _find(
        self, database: sqlite3.Connection, columns: str, tenant: str, response_id: str
    ) -> tuple[Any, ...] | None:
        statement = f"SELECT {columns} FROM responses WHERE tenant = ? AND id = ? AND created > ?"  # noqa: S608
        found = database.execute(statement, (tenant, response_id, self._oldest))
        row: tuple[Any, ...] | None = found.fetchone()
        return row

    @property
    def _oldest(self) -> float:
        return self._clock() - LIFETIME

    def _collect(self, database: sqlite3.Connection) -> None:
        """Remove expired responses, and then those that the budget has no room for."""
        now, oldest = self._uptime(), self._oldest
        since, before = self._looked or (now, oldest)
        self._looked = since, min(before, oldest)
        if now - since >= _SECOND_LOOK:
            database.execute("DELETE FROM responses WHERE created <= ?", self._looked[1:])
            self._looked = now, oldest
        totals = _totals(database)
        while sum(totals.values()) > self.budget:
            tenant = max(totals, key=lambda name: totals[name])
            key, nbytes = database.execute(
                "SELECT key, bytes FROM responses WHERE tenant = ? ORDER BY used, key LIMIT 1",
                (tenant,),
            ).fetchone()
            database.execute("DELETE FROM responses WHERE key = ?", (key,))
            totals[tenant] -= nbytes


def _items(
    database: sqlite3.Connection, key: int, *, outputs: tuple[int, ...] = (0, 1)
) -> list[StoredItem]:
    rows = database.execute(
        "SELECT id, body FROM items WHERE response = ? AND is_output IN (?, ?)"
        " ORDER BY is_output, place",
        (key, outputs[0], outputs[-1]),
    )
    return [StoredItem(item_id, bytes(body)) for item_id, body in rows]


def _totals(database: sqlite3.Connection) -> dict[str, int]:
    rows = database.execute("SELECT tenant, sum(bytes) FROM responses GROUP BY tenant")
    return dict(rows.fetchall())
