"""Checks that each token of each running sequence is in one place."""

from collections.abc import Iterable, Iterator

from umbel.models.kv.length_classes import LengthClasses
from umbel.models.kv.placement import Placement
from umbel.models.kv.sequence_cache import SequenceCache


def problems(placement: Placement, caches: Iterable[SequenceCache]) -> list[str]:
    """Describe every token that is in no place, or in two; empty when there is none."""
    found = [problem for cache in caches for problem in _problems_of(placement, cache)]
    if placement.own is not None:
        found += _seat_problems(placement.own, set(placement.sequences))
    return found


def _problems_of(placement: Placement, cache: SequenceCache) -> Iterator[str]:
    name = f"sequence {cache.number}"
    if cache.is_lost:
        return
    if cache.suffix_length < 0:
        yield f"{name} leases {-cache.suffix_length} tokens more than it has"
    if cache.slot is None:
        for number, layer in enumerate(cache.token_layers):
            if layer.offset != cache.offset:
                yield f"{name} has {layer.offset} of {cache.offset} tokens in layer {number}"
    elif placement.sequences.get(cache.slot) is not cache:
        yield f"{name} has the slot of another one"
    elif placement.own is not None:
        yield from _row_problems(name, placement, cache, placement.own.length(cache.slot))


def _row_problems(name: str, placement: Placement, cache: SequenceCache, own: int) -> Iterator[str]:
    if not cache.suffix_length <= own <= cache.offset:
        yield f"{name} has {own} tokens in its row, and {cache.suffix_length} to have there"
    if placement.groups is None:  # they are found again before the next step
        return
    groups = [group for group in placement.groups if cache.slot in group.slots]
    spans = [n for group in groups for n in range(group.start, group.stop)]
    read = sum(cache.leased[n].length for n in spans)
    if spans != list(range(len(spans))) or read + own != cache.offset:
        yield f"{name} reads {read} tokens and has {own} in its row, of {cache.offset}"


def _seat_problems(own: LengthClasses, slots: set[int]) -> Iterator[str]:
    if set(own.seats) != slots:
        yield f"the slots {sorted(slots)} have seats {sorted(own.seats)}"
    if len(set(own.seats.values())) < len(own.seats):
        yield "two rows have one seat"
    shapes = own.shapes
    for slot, seat in own.seats.items():
        rows, positions = shapes.get(seat.limit, (0, 0))
        if seat.row >= rows or not own.length(slot) <= positions <= seat.limit:
            yield f"slot {slot} has {own.length(slot)} tokens in {positions} positions of {seat}"
    if used := shapes.keys() - {seat.limit for seat in own.seats.values()}:
        yield f"no row has a seat in the classes {sorted(used)}"
