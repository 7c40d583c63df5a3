"""Records and pins as rows of the index, and back. What is read back is checked.

A row may have been changed by whatever damages a file; SQLite keeps values of any type in any
column.
"""

from typing import Any

from ..digests import digest_of
from ..record import Pin, Record, RecordKind
from .files import is_file_name, is_temporary

COLUMNS = "id, kind, tenant, start, end, prefix, digest, tokens, name, nbytes, checksum, used"

_RECORD = (int, str, str, int, int, bytes, bytes, bytes, str, int, bytes, int)
_PIN = (str, str, bytes, bytes)
_LATEST = 1 << 62  # a recency counter counts on from what is read, and must not overflow


def row_of(record: Record) -> tuple[object, ...]:
    """What the table holds of a record, in the order of `COLUMNS`, without the id."""
    return (
        record.kind.value,
        record.tenant,
        record.start,
        record.end,
        record.prefix,
        record.digest,
        record.tokens,
        record.name,
        record.nbytes,
        record.checksum,
        record.used,
    )


def record_of(row: tuple[Any, ...]) -> Record:
    """Read a row of `COLUMNS`.

    Raises:
        ValueError: it is none that `add` wrote; above all, no path that leads elsewhere.
    """
    _check_types(row, _RECORD)
    row_id, kind, *rest = row
    record = Record(row_id, RecordKind(kind), *rest)
    if not is_file_name(record.name) or is_temporary(record.name):
        raise ValueError(f"{record.name!r} is no name of a file of the cache")
    if not (0 <= record.start <= record.end and record.nbytes >= 0 <= record.used < _LATEST):
        raise ValueError(f"the numbers of {record.name} make no sense")
    return record


def pin_of(row: tuple[Any, ...]) -> tuple[Pin, bytes]:
    """Read a row of a pin: its name, tenant, tokens and digest.

    Raises:
        ValueError: its values are of other types than were written.
    """
    _check_types(row, _PIN)
    *fields, digest = row
    return Pin(*fields), digest


def pin_digest(fingerprint: str, pin: Pin) -> bytes:
    """Name all that makes a pin the one that was pinned."""
    return digest_of(fingerprint, pin.tenant, pin.name, pin.tokens)


def _check_types(row: tuple[Any, ...], types: tuple[type, ...]) -> None:
    if tuple(map(type, row)) != types:
        raise ValueError("a row has values of other types than were written")
