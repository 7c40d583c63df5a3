"""How storages come to lie elsewhere, in a stack, and apart again."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from .span_run import SpanRun
    from .storage import Storage


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
