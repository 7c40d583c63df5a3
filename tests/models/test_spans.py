"""Spans as views: cutting copies nothing, neighbours are read as one, and closing frees bytes."""

import gc
import random
import weakref

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.kv.batch_cache import aligned
from umbel.models.kv.spans import PackedSpan, Storage, runs_between, runs_of
from umbel.models.kv.token_layer import LayerPrefix

PLACES = (((0, 0), (1, 0)), ((0, 1), (1, 1)))
"""Two layers of keys and values, of two sizes."""
PER_TOKEN = 4 * 2 * (4 + 3) * 2


def stored(first: int, count: int) -> PackedSpan:
    """A span whose elements name their tokens."""
    ramp = mx.arange(first, first + count, dtype=mx.float32)[None, None, :, None]
    arrays = [mx.contiguous(mx.broadcast_to(ramp, (2, 2, count, size))) for size in (4, 3)]
    mx.eval(arrays)
    return PackedSpan(Storage(arrays, PLACES))


def tokens(span: PackedSpan) -> list[int]:
    """Read a span back through both of its layers."""
    found = [np.array(t)[0, 0, :, 0].astype(int).tolist() for i in (0, 1) for t in span.layer(i)]
    assert all(one == found[0] for one in found)
    return list(found[0])


def test_a_cut_copies_nothing() -> None:
    """Both parts lie in the storage that was there, and their bytes are those of the whole."""
    span = stored(0, 10)
    storage, nbytes = span.storage, span.nbytes
    assert (nbytes, span.buffers) == (10 * PER_TOKEN, 2)
    left, right = span.split(4)
    assert left.storage is right.storage is storage
    assert (tokens(left), tokens(right)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert left.nbytes + right.nbytes == nbytes
    assert left.buffers + right.buffers == 2
    assert left.adjoins(right)
    assert not right.adjoins(left)
    with pytest.raises(ValueError, match="given away"):
        span.layer(0)


def test_neighbours_are_read_as_one() -> None:
    """A run of neighbours is one segment, the same object at every call."""
    first, second = stored(0, 10).split(4)
    third = stored(10, 3)
    runs = runs_of([first, second, third])
    assert [run.length for run in runs] == [10, 3]
    keys, _ = runs[0].layer(1)
    assert np.array(keys)[0, 0, :, 0].tolist() == list(range(10))
    assert runs_of([first, second])[0].layer(1) is runs[0].layer(1)
    assert [run.length for run in runs_of([second, first])] == [6, 4]


def test_what_stays_is_read_where_it_lies_now() -> None:
    """When the storage of a run is trimmed, the run's readers hold nothing of the old one."""
    front, back = stored(0, 10).split(8)
    first, second = front.split(3)
    prefix = LayerPrefix(runs_of([first, second]), 0)
    assert len(prefix) == 1
    before, old = prefix[0], weakref.ref(first.storage)
    assert prefix[0] is before
    del before
    back.close()
    gc.collect()
    assert old() is None
    assert first.storage is second.storage
    assert (first.storage.length, first.start, second.start) == (8, 0, 3)
    assert np.array(prefix[0][0])[0, 0, :, 0].tolist() == list(range(8))


def test_a_run_outlives_cuts_and_no_state() -> None:
    """A span that is cut is read on; a run of which some is gone says so, and holds nothing."""
    front, back = stored(0, 9).split(6)
    (run,) = runs_of([front, back])
    parts = front.split(3)
    assert np.array(run.layer(0)[0])[0, 0, :, 0].tolist() == list(range(9))
    storage = weakref.ref(run.layer(0)[0])
    parts[1].close()
    assert storage() is None
    with pytest.raises(ValueError, match="was freed"):
        run.layer(0)


def test_a_dropped_storage_is_in_no_cycle() -> None:
    """Spans that are not closed are freed with the last reference, without the collector."""
    gc.disable()
    try:
        left, right = stored(0, 10).split(5)
        left.layer(0)
        storage = weakref.ref(left.storage)
        del left, right
        assert storage() is None
    finally:
        gc.enable()


@given(st.lists(st.tuples(st.sampled_from("scm"), st.integers(0, 99)), max_size=30))
def test_bytes_are_those_of_the_storages(steps: list[tuple[str, int]]) -> None:
    """After any cuts, joins and closings each storage is viewed wholly, and counted once."""
    spans = [(0, stored(0, 40)), (40, stored(40, 24))]
    for step, number in steps:
        if not spans:
            return
        at, span = spans[number % len(spans)]
        if step == "s" and span.length > 1:
            cut = 1 + number % (span.length - 1)
            left, right = span.split(cut)
            spans[spans.index((at, span))] = at, left
            spans.append((at + cut, right))
        elif step == "c":
            spans.remove((at, span))
            span.close()
        elif step == "m":
            follows = [other for other in spans if other[0] == at + span.length]
            for other in follows[:1]:
                spans.remove(other)
                spans[spans.index((at, span))] = at, span.merge(other[1])
        assert all(tokens(s) == list(range(a, a + s.length)) for a, s in spans)
        storages = {id(s.storage): s.storage for _, s in spans}.values()
        assert sum(s.nbytes for _, s in spans) == PER_TOKEN * sum(s.length for s in storages)
        assert sum(s.buffers for _, s in spans) == 2 * len(storages)


def test_closing_frees_what_it_counted() -> None:
    """The allocator has what the spans that are left say, whichever went."""
    rng = random.Random(0)  # noqa: S311  (not a secret)
    mx.synchronize()
    base = mx.get_active_memory()
    spans = [stored(0, 20_000)]
    for _ in range(7):
        span = spans.pop(rng.randrange(len(spans)))
        spans += span.split(rng.randrange(1, span.length))
    while spans:
        spans.pop(rng.randrange(len(spans))).close()
        held = sum(span.nbytes for span in spans)
        assert abs(mx.get_active_memory() - base - held) < 2 * 16 * 1024 * (len(spans) + 1)


def test_a_part_that_is_joined_with_nothing_is_copied() -> None:
    """It lies apart from the rest, which is freed when it is closed."""
    mx.synchronize()
    base = mx.get_active_memory()
    front, back = stored(0, 20_000).split(5000)
    front.join([])
    assert front.length == front.storage.length
    assert tokens(front)[:3] == [0, 1, 2]
    back.close()
    assert mx.get_active_memory() - base <= front.nbytes + 2 * 16 * 1024


@pytest.mark.parametrize(
    ("length", "stays", "rest"),
    [(5, [], [5]), (64, [64], []), (65, [64], [1]), (72, [72], []), (133, [128], [5])],
)
def test_runs_are_cut_where_products_are_fast(
    length: int, stays: list[int], rest: list[int]
) -> None:
    """The first part is a multiple, and no token is lost."""
    span = stored(0, length)
    (run,) = runs_of([span])
    whole, rests = aligned([run], 64 if length < 72 else 8)
    assert [part.length for part in whole] == stays
    assert [part.length for part in rests] == rest
    assert aligned([run], 1) == ([run], [])
    read = mx.concatenate([part.layer(1)[0] for part in [*whole, *rests]], axis=2)
    assert mx.array_equal(read, run.layer(1)[0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_runs_between(lengths: list[int], data: st.DataObject) -> None:
    """Any part of consecutive spans is found, wherever these are cut."""
    spans, total = [], 0
    for length in lengths:
        spans.append(stored(total, length))
        total += length
    spans[:1] = spans[0].split(1) if lengths[0] > 1 else spans[:1]
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    runs = runs_between(spans, start, stop)
    found = [int(x) for run in runs for x in np.array(run.layer(0)[0])[0, 0, :, 0]]
    assert found == list(range(start, stop))
