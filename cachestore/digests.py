"""Digests that tell which tokens, of whom, state on disk belongs to."""

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SIZE = 16  # bytes of a digest


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
    """Name all that decides whether a file's state is the right one.

    Args:
        fingerprint: of the model that computed it.
        tenant: whose it is.
        kind: a `RecordKind`'s value.
        start: offset of the first token whose state the file has.
        end: offset after the last one.
        path: `digest` of all tokens `[0, end)`.
    """
    return digest_of(fingerprint, tenant, kind, start, end, path)
