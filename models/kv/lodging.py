"""How storages come to lie elsewhere, in a stack or in a sequence's caches, and apart again."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import mlx.core as mx

if TYPE_CHECKING:
    from .span_run import SpanRun
    from .storage import Storage


class Host(Protocol):
    """In whose arrays a storage's tokens lie among others, and of which no slice must be held."""

    def tensor(self, storage: "Storage", number: int, row: int) -> mx.array:
        """One row of a packed array, `[1, heads, tokens, size]`, without a copy."""
        ...


class Hosted(NamedTuple):
    """One packed array of a storage that a host has.

    Attributes:
        host: who is asked for it.
        rows: of it.
        nbytes: of it.
    """

    host: Host
    rows: int
    nbytes: int


def divided(run: "SpanRun") -> list["Storage"]:
    """Have a run's tokens be a storage; return those that have what was beside them."""
    storage, start, rests = run.storage, run.start, list["Storage"]()
    if run.stop < storage.length:
        rests.append(storage.divide(run.stop))
    if start:
        storage.divide(start)
        rests.append(storage)
    return rests


def apart(storages: Iterable["Storage"], number: int) -> None:
    """Have one array of each of some storages be a buffer of its own."""
    own = [(each, mx.contiguous(each.part(number, 0, each.length))) for each in storages]
    mx.eval([array for _, array in own])
    for storage, array in own:
        storage.replace(number, array)
