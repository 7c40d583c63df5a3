"""What the disk tier knows of a file, and of a pin."""

from dataclasses import dataclass
from enum import Enum


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
        digest: the owner's, 16 bytes, of all that makes this the right state for a path. It
            stands in the file too.
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
    digest: bytes
    tokens: bytes
    name: str
    nbytes: int
    checksum: bytes
    used: int


@dataclass(frozen=True)
class Pin:
    """A path that a user wants kept. Tokens are int32 little-endian."""

    name: str
    tenant: str
    tokens: bytes
