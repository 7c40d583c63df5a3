"""Records of the disk tier, pins, and digests that name the owner and tokens of state on disk."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray


class RecordKind(Enum):
    """Contents of a file: the state of consecutive tokens, or the whole state at one offset."""

    SPAN = "span"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Record:
    """One file, as the index knows it. Digests and checksum have 16 bytes."""

    id: int  # unique for ever in its index
    kind: RecordKind
    tenant: str
    start: int  # offset in the token path where it begins
    end: int  # offset where it ends; a checkpoint's is its start
    prefix: bytes  # digest of the path's tokens before `start`
    digest: bytes  # `record_digest` of it, which stands in the file too
    tokens: bytes  # of [start, end), int32 little-endian; empty for a checkpoint
    name: str = ""
    nbytes: int = 0
    checksum: bytes = b""  # xxh3_128 of the file
    used: int = 0  # the owner's recency counter; larger is newer


@dataclass(frozen=True)
class Pin:
    """A path that a user wants kept. Tokens are int32 little-endian."""

    name: str
    tenant: str
    tokens: bytes


_SIZE = 16  # bytes of a digest
TOKEN_BYTES = 4
T = TypeVar("T")


def hasher() -> Any:
    """Start a digest of tokens: `update` takes their bytes, `copy` goes on two ways."""
    return blake2b(digest_size=_SIZE)


def digest(tokens: NDArray[np.integer[Any]]) -> bytes:
    """Name a path of tokens."""
    return blake2b(tokens.tobytes(), digest_size=_SIZE).digest()


def digest_of(*fields: str | bytes | int) -> bytes:
    """Digest fields in their order, each with its length: no two lists of them look alike."""
    made = hasher()
    for field in fields:
        data = field if isinstance(field, bytes) else str(field).encode()
        made.update(len(data).to_bytes(8, "little"))
        made.update(data)
    whole: bytes = made.digest()
    return whole


def record_digest(
    fingerprint: str, tenant: str, kind: str, start: int, end: int, path: bytes
) -> bytes:
    """Digest of all that makes a file the right one; `path` is the digest of tokens `[0, end)`."""
    return digest_of(fingerprint, tenant, kind, start, end, path)


class Paths(Generic[T]):
    """Notes of the places that records start from, by the digest of the tokens before them."""

    def __init__(self, records: Sequence[Record]) -> None:
        starts: dict[str, set[int]] = defaultdict(set)
        for record in records:
            starts[record.tenant].add(record.start)
        self._starts = {tenant: sorted(own) for tenant, own in starts.items()}
        self._wanted = {(record.tenant, record.start, record.prefix) for record in records}
        self._known: dict[tuple[str, int, bytes], tuple[T, Any]] = {}

    def before(self, record: Record) -> tuple[T, Any] | None:
        """The note of the record that has the tokens before this one, and a digest of them all."""
        return self._known.get((record.tenant, record.start, record.prefix))

    def reach(self, record: Record, hashed: Any, note: T) -> None:
        """Note that a record is there to go on from; `hashed` has all tokens before it."""
        own, hashed, done = self._starts[record.tenant], hashed.copy(), 0
        for start in own[bisect_right(own, record.start) : bisect_right(own, record.end)]:
            at = TOKEN_BYTES * (start - record.start)
            hashed.update(record.tokens[done:at])
            done = at
            place = (record.tenant, start, hashed.digest())
            if place in self._wanted:
                self._known.setdefault(place, (note, hashed.copy()))
