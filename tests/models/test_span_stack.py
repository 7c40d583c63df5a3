"""Stacks are the only place of what lies in them, by the allocator's own count."""

from dataclasses import dataclass

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from umbel.models.kv.packed import PackedSpan, runs_of
from umbel.models.kv.span_stack import SpanStack
from umbel.models.kv.span_stacks import SpanStacks
from umbel.models.kv.stacking import Run, Stack, moved, runs_in, stacks_of
from umbel.models.kv.storage import Storage

PARTS, TENSORS, HEADS, SIZE = 6, 2, 2, 32
PER_TOKEN = PARTS * TENSORS * HEADS * SIZE * 4
PART = PER_TOKEN // PARTS
PLACES = tuple(((n, 0), (n, 1)) for n in range(PARTS))
SLACK = PARTS * 16 * 1024
"""Bytes by which buffers may be larger than what is in them before MLX copies."""


def stored(first: int, count: int) -> PackedSpan:
    """A span whose elements name their tokens."""
    ramp = mx.arange(first, first + count, dtype=mx.float32)[None, None, :, None]
    shape = (TENSORS, HEADS, count, SIZE)
    arrays = [mx.contiguous(mx.broadcast_to(ramp, shape)) for _ in range(PARTS)]
    mx.eval(arrays)
    return PackedSpan(Storage(arrays, PLACES))


def tokens(span: PackedSpan) -> list[int]:
    """Read a span back."""
    found = [np.array(t)[0, 1, :, 3].astype(int).tolist() for t in span.layer(PARTS - 1)]
    assert found[0] == found[1]
    return list(found[0])


@dataclass
class Alone:
    """Spans that rows alone read, and what of memory is over what was there before them."""

    spans: dict[int, list[PackedSpan]]
    base: int

    @property
    def active(self) -> int:
        """Bytes."""
        mx.synchronize()
        return mx.get_active_memory() - self.base

    @property
    def nbytes(self) -> int:
        """What the tokens take."""
        return PER_TOKEN * sum(s.length for spans in self.spans.values() for s in spans)

    @property
    def runs(self) -> dict[int, tuple[Run, ...]]:
        """What is planned for."""
        return {slot: runs_in(spans) for slot, spans in self.spans.items()}

    def check(self) -> None:
        """All is read as it was stored."""
        for slot, spans in self.spans.items():
            read = [token for span in spans for token in tokens(span)]
            assert read == list(range(10_000 * slot, 10_000 * slot + len(read)))

    def make(self, stacks: SpanStacks, **how: bool) -> tuple[Stack, ...]:
        """Plan stacks, and make them; hold that to its price."""
        before = self.active
        plan = stacks_of(self.runs, stacks.plan, **how)
        made = sum(stack.capacity for stack in plan if stack.made)
        kept = {stack.kept for stack in plan}
        gone = sum(stack.capacity for at, stack in enumerate(stacks.plan) if at not in kept)
        beside = sum(stack.beside for stack in plan if stack.made)
        price = PER_TOKEN * (made - moved(plan)) + PART * (made + gone + beside)
        mx.reset_peak_memory()
        stacks.make(plan, self.spans)
        assert mx.get_peak_memory() - self.base - before <= price + SLACK
        return plan


def rows_of(first: int, *rest: int) -> Alone:
    """Rows of two spans each, the first of which are as long."""
    mx.synchronize()
    mx.clear_cache()
    base = mx.get_active_memory()
    spans = {
        slot: [stored(10_000 * slot, first), stored(10_000 * slot + first, length)]
        for slot, length in enumerate(rest)
    }
    return Alone(spans, base)


@pytest.fixture(name="alone")
def five_rows() -> Alone:
    """Five rows of about 1,000 tokens."""
    return rows_of(600, 300, 330, 360, 390, 420)


def check_held(alone: Alone, stacks: SpanStacks) -> None:
    """What is active is what is booked."""
    assert abs(alone.active - alone.nbytes - stacks.held().nbytes) <= SLACK


def test_tokens_are_held_once(alone: Alone) -> None:
    """What is held is what lies there, and padding; given up, it is what it was."""
    stacks = SpanStacks()
    (stack,) = alone.make(stacks)
    assert stack.capacity * PER_TOKEN <= 1.1 * alone.nbytes
    assert alone.active <= stack.capacity * PER_TOKEN + SLACK
    assert all(span.storage.lodged for spans in alone.spans.values() for span in spans)
    check_held(alone, stacks)
    alone.check()
    mx.reset_peak_memory()
    before = alone.active
    stacks.clear()
    assert mx.get_peak_memory() - alone.base - before <= PART * stack.capacity + SLACK
    assert abs(alone.active - alone.nbytes) <= SLACK
    assert not any(span.storage.lodged for spans in alone.spans.values() for span in spans)
    alone.check()


def test_who_reads_it_elsewhere_holds_nothing_of_where_it_was(alone: Alone) -> None:
    """A run that was read before is read where it lies now."""
    runs = {slot: runs_of(spans) for slot, spans in alone.spans.items()}
    before = [run.layer(0) for run in runs[0]]
    mx.eval(before)
    del before
    stacks = SpanStacks()
    for change in (lambda: alone.make(stacks), stacks.clear):
        change()
        assert [run.layer(0)[0].shape[2] for run in runs[0]] == [600, 300]
        check_held(alone, stacks)


def test_other_stacks_take_over(alone: Alone) -> None:
    """What moves from a stack into another is in one place for the most part; so is the rest."""
    stacks = SpanStacks()
    alone.make(stacks)
    away = {slot: alone.spans.pop(slot) for slot in (3, 4)}
    idle = Alone(away, alone.base)
    (stack,) = alone.make(stacks)
    assert stack.made
    assert stack.slots == (0, 1, 2)
    assert not any(span.storage.lodged for spans in away.values() for span in spans)
    assert abs(alone.active - alone.nbytes - idle.nbytes - stacks.held().nbytes) <= SLACK
    alone.check()
    idle.check()


def test_what_went_leaves_a_gap_that_is_counted(alone: Alone) -> None:
    """Closed, joined or cut off under a stack, tokens are not free before the stack is."""
    stacks = SpanStacks()
    alone.make(stacks)
    before = alone.active
    gone = alone.spans[4].pop()
    gone.close()
    first, last = alone.spans[3].pop().split(100)
    alone.spans[3].append(first)
    last.close()
    joined, following = alone.spans[2]
    joined.join([following])
    assert not joined.storage.lodged
    check_held(alone, stacks)
    assert alone.active >= before
    alone.check()
    assert [row.held for row in stacks.plan[0].rows] == [900, 930, 0, 600, 600]
    stacks.clear()
    assert abs(alone.active - alone.nbytes) <= SLACK
    alone.check()


def test_what_lies_beside_it_has_a_place_of_its_own(alone: Alone) -> None:
    """What others read of the same storage before it, and what nobody reads after it."""
    begin, own, end = [], [], []
    for slot in (1, 2, 3):
        whole = alone.spans[slot].pop(0)
        before, rest = whole.split(200)
        private, after = rest.split(350)
        begin.append(before)
        own.append(private)
        end.append(after)
        alone.spans[slot] = [private]
    counted = sum(span.buffers for span in (*begin, *own, *end))
    stacks = SpanStacks()
    shared = [runs_of([span])[0] for span in begin]
    alone.make(stacks)
    assert all(span.storage.lodged for span in own)
    assert not any(span.storage.lodged for span in (*begin, *end))
    assert sum(span.buffers for span in (*begin, *own, *end)) == counted
    apart = sum(span.nbytes for span in (*begin, *end))
    assert abs(alone.active - alone.nbytes - apart - stacks.held().nbytes) <= SLACK
    assert alone.make(stacks)[0].kept == 0
    for slot, (one, two, three) in enumerate(zip(begin, own, end, strict=True), 1):
        first = 10_000 * slot
        assert tokens(one) == list(range(first, first + 200))
        assert tokens(two) == list(range(first + 200, first + 550))
        assert tokens(three) == list(range(first + 550, first + 600))
    assert [run.layer(0)[0].shape[2] for run in shared] == [200] * 3
    stacks.clear()
    for span in (*begin, *end):
        span.close()
    assert abs(alone.active - alone.nbytes) <= SLACK


def test_what_somebody_reads_as_one_is_not_divided(alone: Alone) -> None:
    """A copy of it is read side by side, and counted."""
    whole = alone.spans[0].pop(0)
    (run,) = runs_of([whole])
    front, back = whole.split(200)
    alone.spans[0] = [back]
    stacks = SpanStacks()
    alone.make(stacks)
    assert not back.storage.lodged
    assert run.layer(0)[0].shape[2] == 600
    assert front.storage is back.storage
    assert abs(alone.active - alone.nbytes - front.nbytes - stacks.held().nbytes) <= SLACK


def test_idle_state_is_given_up_apart_from_the_rest(alone: Alone) -> None:
    """Stacks in which all is read stay."""
    for slot in range(5, 8):
        alone.spans[slot] = [stored(10_000 * slot, 3000)]
    stacks = SpanStacks()
    assert len(alone.make(stacks)) == 2
    assert not stacks.idle
    away = alone.spans.pop(6)
    alone.make(stacks)
    assert stacks.idle
    stacks.release()
    assert not stacks.idle
    assert [stack.slots for stack in stacks.plan] == [(0, 1, 2, 3, 4)]
    assert not away[0].storage.lodged
    alone.check()


@pytest.mark.parametrize("number", range(PARTS))
@pytest.mark.parametrize("how", ["fill", "empty"])
def test_one_that_fails_midway_loses_nothing(
    alone: Alone, how: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was in stacks has places of its own again when they are cleared."""
    stacks = SpanStacks()
    alone.make(stacks)
    away = Alone({slot: alone.spans.pop(slot) for slot in (3, 4)}, alone.base)
    real = getattr(SpanStack, how)

    def fails(stack: SpanStack, part: int) -> None:
        if part == number:
            raise MemoryError
        real(stack, part)

    with monkeypatch.context() as patch:
        patch.setattr(SpanStack, how, fails)
        with pytest.raises(MemoryError):
            alone.make(stacks)
    alone.check()
    away.check()
    assert stacks.plan == ()
    stacks.clear()
    alone.check()
    away.check()
    assert abs(alone.active - alone.nbytes - away.nbytes) <= SLACK
    assert stacks.held() == (0, 0)
