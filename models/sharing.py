"""Who shares what in a batch: a pure function of the rows' trunks."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TypeVar

S = TypeVar("S")


def runs(
    trunks: Mapping[int, Sequence[S]],
) -> tuple[list[tuple[list[S], list[int]]], dict[int, list[S]]]:
    """Find the runs of spans that the same rows read.

    Rows lease paths of one trie, so those who share a span share all before it.

    Args:
        trunks: for each row its spans, oldest first. Spans are compared by identity.

    Returns:
        Runs that several rows read, each with the numbers of these rows, ascending; and for
        rows that read something alone, what that is.
    """
    readers: dict[int, list[int]] = {}
    for number, spans in sorted(trunks.items()):
        for span in spans:
            readers.setdefault(id(span), []).append(number)
    shared: dict[int, tuple[list[S], list[int]]] = {}
    private: dict[int, list[S]] = {}
    for number, spans in sorted(trunks.items()):
        for members, run in groupby(spans, lambda span: readers[id(span)]):
            together = list(run)
            if len(members) > 1:
                shared[id(together[0])] = together, members
            else:
                private[number] = together
    return list(shared.values()), private
