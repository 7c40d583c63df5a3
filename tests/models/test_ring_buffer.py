"""Ring buffers against lists of tokens, and against the allocator's own counters."""

import itertools
from collections.abc import Iterable

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbel.models.batch_planner import bucket, positions_for, rows_for
from umbel.models.kv.ring_buffer import RingBuffer

SHAPES = ((2, 3), (1, 5), (3, 2))
"""Heads and size of the tensors of a row: layers need not be alike."""


def tensors(tokens: list[int]) -> list[mx.array]:
    """Make what a row of these tokens holds: each tensor's entries name token and place."""
    names = mx.array(tokens, mx.float32)[None, None, :, None]
    return [
        names * (number + 1) + mx.arange(heads * size).reshape(1, heads, 1, size) / 64
        for number, (heads, size) in enumerate(SHAPES)
    ]


def ring_buffer(limit: int, rows: int) -> RingBuffer:
    """Make empty rows for tensors of SHAPES."""
    buffer = RingBuffer(limit)
    assert [buffer.reserve(1), buffer.reserve(len(SHAPES) - 1)] == [0, 1]
    buffer.resize(rows, 0)
    return buffer


def make_room(buffer: RingBuffer, tokens: int) -> None:
    """Make positions for so many tokens in a row, as plans do; fewer where no row has any."""
    positions = min(positions_for(tokens), buffer.limit)
    if not any(buffer.lengths) and positions < buffer.positions:
        rows = buffer.rows
        buffer.clear()
        buffer.resize(rows, positions)
    buffer.resize(buffer.rows, max(positions, buffer.positions))


def put(buffer: RingBuffer, row: int, tokens: list[int], cuts: Iterable[float] = ()) -> None:
    """Write a row of these tokens, after making room for one more; cut at these shares of it."""
    make_room(buffer, len(tokens) + 1)
    ends = sorted({round(cut * len(tokens)) for cut in cuts} | {0, len(tokens)})
    parts = [tensors(tokens[start:stop]) for start, stop in itertools.pairwise(ends)]
    buffer.put(row, list(zip(*parts, strict=True)))


def step(buffer: RingBuffer, tokens: dict[int, int]) -> dict[int, list[int]]:
    """Give some rows a token; return all that each of them saw, in the ring's order."""
    make_room(buffer, max(buffer.lengths) + 1)
    buffer.begin_step()
    written = [
        mx.concatenate([tensors([tokens.get(row, -1)])[index] for row in range(buffer.rows)])
        for index in range(len(SHAPES))
    ]
    held = [buffer.append(index, tensor) for index, tensor in enumerate(written)]
    mask = np.ones((buffer.rows, buffer.positions), bool)
    if buffer.mask is not None:
        assert buffer.mask.shape == (buffer.rows, 1, 1, buffer.positions)
        mask = np.array(buffer.mask)[:, 0, 0]
        assert not mask.all(), "a mask that hides nothing costs for nothing"
    seen = {}
    for row in tokens:
        first = np.array(held[0])[row, 0, mask[row], 0]
        seen[row] = [round(float(name)) for name in first]
        for index, tensor in enumerate(tensors(seen[row])):
            assert np.array_equal(np.array(held[index])[row][:, mask[row]], np.array(tensor)[0])
    buffer.end_step(list(tokens))
    return seen


def content(buffer: RingBuffer, row: int, count: int) -> list[int]:
    """Read a row's newest tokens, and hold all its tensors to them."""
    taken = buffer.take(row, count)
    tokens = [round(name) for name in np.array(taken[0])[0, 0, :, 0].tolist()]
    for tensor, expected in zip(taken, tensors(tokens), strict=True):
        assert np.array_equal(np.array(tensor), np.array(expected))
    return tokens


class Machine(RuleBasedStateMachine):
    """Any sequence of operations leaves in each row what it leaves in a list."""

    buffer: RingBuffer
    model: list[list[int]]

    @initialize(limit=st.sampled_from([1, 2, 7, 32, 64, 65, 96, 100, 130]), rows=st.integers(1, 4))
    def start(self, limit: int, rows: int) -> None:
        """Start with free rows."""
        self.buffer = ring_buffer(limit, rows)
        self.model = [[] for _ in range(rows)]
        self.count = 0

    def fresh(self, count: int) -> list[int]:
        """Make up new tokens."""
        self.count += count
        return list(range(self.count - count, self.count))

    @rule(row=st.integers(0, 9), share=st.floats(0, 1), cuts=st.sets(st.floats(0, 1), max_size=3))
    def put(self, row: int, share: float, cuts: set[float]) -> None:
        """A row holds what was put, in however many parts, and nothing of what it held before."""
        row %= len(self.model)
        self.model[row] = self.fresh(max(1, round(share * self.buffer.limit)))
        put(self.buffer, row, self.model[row], cuts)

    @rule(count=st.sampled_from([1, 2, 5, 33]), used=st.sets(st.integers(0, 3), max_size=4))
    def steps(self, count: int, used: set[int]) -> None:
        """Rows in use gain a token a step, and at the limit lose their oldest; others are free."""
        used = {row for row in used if row < len(self.model)}
        for _ in range(count):
            tokens = dict(zip(used, self.fresh(len(used)), strict=True))
            for row, held in enumerate(self.model):
                held[:] = [*held, tokens[row]][-self.buffer.limit :] if row in tokens else []
            seen = step(self.buffer, tokens)
            for row in used:
                assert sorted(seen[row]) == sorted(self.model[row])

    @precondition(lambda self: len(self.model) > 1)
    @rule(source=st.integers(0, 9), apart=st.integers(1, 9))
    def move(self, source: int, apart: int) -> None:
        """The target is what the source was, and the source is free."""
        source %= len(self.model)
        target = (source + 1 + apart % (len(self.model) - 1)) % len(self.model)
        self.model[source], self.model[target] = [], self.model[source]
        self.buffer.move(source, target)

    @rule(row=st.integers(0, 9))
    def free(self, row: int) -> None:
        """A freed row is empty."""
        row %= len(self.model)
        self.model[row] = []
        self.buffer.free(row)

    @rule(row=st.integers(0, 9), share=st.floats(0, 1))
    def put_before(self, row: int, share: float) -> None:
        """Tokens that come before those of a row do not move these."""
        row %= len(self.model)
        tokens = self.fresh(round(share * (self.buffer.limit - len(self.model[row]))))
        if tokens:
            self.model[row] = tokens + self.model[row]
            make_room(self.buffer, len(self.model[row]))
            self.buffer.put_before(row, [[tensor] for tensor in tensors(tokens)])

    @rule(kept=st.lists(st.integers(0, 5), unique=True, max_size=4), more=st.integers(0, 2))
    def keep(self, kept: list[int], more: int) -> None:
        """Rows that are kept become the first ones, in this order, in as few positions."""
        kept = [row for row in kept if row < len(self.model)]
        self.model = [self.model[row] for row in kept] + [[]] * more
        self.model = [list(row) for row in self.model] or [[]]
        longest = max(map(len, self.model))
        positions = min(positions_for(max(longest, 1)), self.buffer.limit)
        self.buffer.resize(len(self.model), positions, kept)

    @rule(rows=st.integers(1, 6))
    def resize(self, rows: int) -> None:
        """Rows stay as they are, new ones are free."""
        self.model = self.model[:rows] + [[] for _ in range(rows - len(self.model))]
        self.buffer.resize(rows, self.buffer.positions)

    @rule(rows=st.integers(1, 4))
    def clear(self, rows: int) -> None:
        """All is forgotten, tensors too."""
        self.buffer.clear()
        assert (self.buffer.rows, self.buffer.positions, self.buffer.mask) == (0, 0, None)
        assert self.buffer.tensors == [None] * len(SHAPES)
        self.start(self.buffer.limit, rows)

    @invariant()
    def rows_hold_what_lists_hold(self) -> None:
        """Every row's newest tokens, as many as are asked for, are those of its list."""
        assert self.buffer.lengths == [len(row) for row in self.model]
        for number, row in enumerate(self.model):
            for count in {1, len(row) // 2, len(row)} - {0} if row else set():
                assert content(self.buffer, number, count) == row[-count:]

    @invariant()
    def shapes_are_few(self) -> None:
        """Positions are a bucket from 64 on, or the limit."""
        positions, limit = self.buffer.positions, self.buffer.limit
        assert positions in {0, limit, *[size for size in (64, 96, 128) if size < limit]}


Machine.TestCase.settings = settings(stateful_step_count=25)
TestMachine = Machine.TestCase


@given(count=st.integers(0, 10**7))
def test_bucket(count: int) -> None:
    """A bucket has room, wastes at most a third, and is 2^k or 3 * 2^k."""
    size = bucket(count)
    assert size >= max(1, count)
    assert count <= 1 or (size - count) * 3 <= size
    assert size in {factor << shift for factor in (1, 3) for shift in range(25)}
    assert bucket(size) == size
    assert bucket(count + 1) >= size


@given(tokens=st.integers(1, 10**6))
def test_positions(tokens: int) -> None:
    """There is room, from 64 on; at most a third of the positions is over."""
    positions = positions_for(tokens)
    assert positions >= max(64, tokens)
    assert positions % 32 == 0
    assert (positions - max(64, tokens)) * 3 <= positions
    assert positions_for(positions) == positions
    assert positions_for(tokens + 1) >= positions


def test_sizes_of_positions() -> None:
    """They double in two steps."""
    assert sorted({positions_for(tokens) for tokens in range(1, 1025)}) == [
        *(64, 96, 128, 192, 256, 384, 512, 768, 1024)
    ]


@given(count=st.integers(1, 300))
def test_rows_come_in_multiples(count: int) -> None:
    """Where products of so many rows are the fastest; small batches stay small."""
    assert rows_for(count, 1) == bucket(count)
    rows = rows_for(count, 16)
    assert rows >= count
    assert rows == bucket(count) if count <= 8 else rows % 16 == 0
    assert rows < bucket(count) + 16


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(512, [64, 96, 128, 192, 256, 384, 512]), (100, [64, 96, 100]), (32, [32]), (1, [1])],
)
def test_growth(limit: int, sizes: list[int]) -> None:
    """Positions grow by buckets as a row does, up to the limit, and never beyond."""
    buffer = ring_buffer(limit, 1)
    met = list[int]()
    for token in range(limit + 5):
        step(buffer, {0: token})
        if buffer.positions not in met[-1:]:
            met.append(buffer.positions)
    assert met == sizes
    assert content(buffer, 0, limit) == list(range(5, limit + 5))


@pytest.mark.parametrize("limit", [1, 32, 64, 100])
def test_a_full_row_loses_its_oldest(limit: int) -> None:
    """At the limit each step drops one token, through several turns of the ring."""
    buffer, rows = ring_buffer(limit, 2), list[list[int]]([[], []])
    for token in range(3 * limit + 7):
        used = {0: token, 1: -token} if token >= limit // 2 else {0: token}
        seen = step(buffer, used)
        for row, new in used.items():
            rows[row] = [*rows[row], new][-limit:]
            assert sorted(seen[row]) == sorted(rows[row])
    assert buffer.mask is None, "two full rows look everywhere"
    assert [content(buffer, row, limit) for row in (0, 1)] == rows


def test_a_row_that_is_put_does_not_move_others() -> None:
    """A longer newcomer widens the positions; the others keep their tokens across the seam."""
    buffer = ring_buffer(512, 3)
    put(buffer, 0, list(range(60)))
    for token in range(60, 80):
        step(buffer, {0: token})
    put(buffer, 2, list(range(1000, 1300)))
    assert buffer.positions == 384
    assert buffer.lengths == [80, 0, 300]
    assert content(buffer, 0, 80) == list(range(80))
    step(buffer, {0: 80, 1: 7, 2: 1300})
    assert content(buffer, 0, 81) == list(range(81))
    assert content(buffer, 1, 1) == [7]
    assert content(buffer, 2, 301) == list(range(1000, 1301))


def test_positions_shrink_when_nobody_needs_them() -> None:
    """A buffer of long rows that left becomes narrow for a short new row."""
    buffer = ring_buffer(512, 2)
    put(buffer, 0, list(range(400)))
    buffer.free(0)
    put(buffer, 1, [1, 2, 3])
    assert buffer.positions == 64
    assert buffer.rows == 2
    assert content(buffer, 1, 3) == [1, 2, 3]


def large(limit: int = 1024) -> tuple[RingBuffer, int]:
    """Make evaluated rows that are half full; returns the bytes of one tensor as well."""
    buffer = RingBuffer(limit)
    buffer.reserve(2)
    buffer.resize(4, positions_for(limit // 2 + 1))
    for row in range(4):
        buffer.put(row, [[mx.random.normal((1, 2, limit // 2 - row, 64))] for _ in range(2)])
    mx.eval(buffer.tensors)
    held = buffer.tensors[0]
    assert held is not None
    return buffer, held.nbytes


def settled() -> int:
    """Start measuring the peak, from the bytes that are active now."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def large_step(buffer: RingBuffer) -> mx.array:
    """Run a step that reads all it has written; returns what it launched."""
    buffer.begin_step()
    held = [buffer.append(index, mx.ones((4, 2, 1, 64))) for index in range(2)]
    result = mx.ones((4, 2, 1, 64)) @ held[0].swapaxes(-1, -2) @ held[1]
    del held
    buffer.end_step(range(4))
    return result


def test_steps_write_in_place() -> None:
    """Once there is room, a step copies no tensor, and no step leaves more than the last."""
    buffer, size = large(768)
    make_room(buffer, 768)
    mx.eval(large_step(buffer), buffer.tensors)
    active = settled()
    for _ in range(6):
        mx.eval(large_step(buffer), buffer.tensors)
    assert mx.get_peak_memory() - active < size / 2
    assert mx.get_active_memory() - active < size / 8


def test_rows_come_and_go_in_place() -> None:
    """Putting, taking, moving and freeing a row copies that row, and not all of them."""
    buffer, size = large()
    newcomer = [[mx.zeros((1, 2, 50, 64))]] * 2
    mx.eval(newcomer)
    operations = [
        lambda: buffer.put(1, newcomer),
        lambda: mx.eval(buffer.take(1, 50)),
        lambda: buffer.move(1, 3),
        lambda: buffer.free(0),
        lambda: mx.eval(large_step(buffer)),
    ]
    for operation in operations:
        active = settled()
        operation()  # type: ignore[no-untyped-call]
        mx.eval(buffer.tensors)
        assert mx.get_peak_memory() - active < size / 2


def test_dropped_rows_give_their_memory_back() -> None:
    """After most rows were dropped, the next step leaves only what the others take."""
    buffer, size = large()
    mx.eval(large_step(buffer), buffer.tensors)
    before = mx.get_active_memory()
    buffer.resize(1, buffer.positions)
    buffer.begin_step()
    for index in range(2):
        buffer.append(index, mx.ones((1, 2, 1, 64)))
    buffer.end_step([0])
    mx.eval(buffer.tensors)
    assert before - mx.get_active_memory() > 2 * size * 0.7
    assert buffer.lengths == [514]
