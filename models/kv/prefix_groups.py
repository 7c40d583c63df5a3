"""Which rows of a batch read the same spans: a pure function of their prefixes."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple


class PrefixGroup(NamedTuple):
    """Rows that read the same spans.

    Attributes:
        slots: of these rows, ascending.
        start: the first of these spans, as a number in each row's prefix.
        stop: one after the last.
    """

    slots: tuple[int, ...]
    start: int
    stop: int


def prefix_groups(prefixes: Mapping[int, Sequence[object]]) -> tuple[PrefixGroup, ...]:
    """Find the runs of spans that the same rows read.

    Rows lease paths of one trie, so those who share a span share all before it.

    Args:
        prefixes: for each slot the spans that its row reads, oldest first. Spans are compared by
            identity.

    Returns:
        A group for each run, those of several rows and those of one; each run once.
    """
    readers: dict[int, list[int]] = {}
    for slot, spans in sorted(prefixes.items()):
        for span in spans:
            readers.setdefault(id(span), []).append(slot)
    groups: dict[PrefixGroup, None] = {}
    for _, spans in sorted(prefixes.items()):
        start = 0
        for slots, run in groupby(spans, lambda span: readers[id(span)]):
            stop = start + len(list(run))
            groups[PrefixGroup(tuple(slots), start, stop)] = None
            start = stop
    return tuple(groups)
