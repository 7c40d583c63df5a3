"""What is being written to disk, and what lies in stacks: counted as the allocator counts it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.cachestore.ledger import Kind, Ledger
from umbel.cachestore.loans import Loan, lend
from umbel.cachestore.spans import Spans
from umbel.models.kv.packed import PackedSpan, runs_of
from umbel.models.kv.span_stacks import SpanStacks
from umbel.models.kv.stored import Exported, load_span

from .test_span_stack import PART, PER_TOKEN, SLACK, Alone, rows_of, tokens
from .test_stored import HOST, write

ROWS, TOKENS = 4, 600


@dataclass
class World:
    """A trie's spans, of which rows read two each, and their books.

    Attributes:
        alone: what rows read.
        stacks: where it lies side by side.
        ledger: what the cache counts.
        spans: of the trie.
    """

    alone: Alone
    stacks: SpanStacks = field(default_factory=SpanStacks)
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self.spans = Spans(self.ledger.account(Kind.KV))
        for spans in self.alone.spans.values():
            for span in spans:
                self.spans.add(span)

    def split(self, at: int) -> tuple[PackedSpan, PackedSpan]:
        """Cut the first span of the first row."""
        front, back = self.spans.split(self.alone.spans[0][0], at)
        assert isinstance(front, PackedSpan)
        assert isinstance(back, PackedSpan)
        return front, back

    @property
    def paging(self) -> int:
        """Bytes that only the writer has."""
        return self.ledger.held(Kind.PAGING).nbytes

    def check(self) -> None:
        """What is active is what is booked, and all is read as it was stored."""
        booked = self.ledger.total.nbytes + self.stacks.held().nbytes
        assert abs(self.alone.active - booked) <= SLACK
        self.alone.check()


@pytest.fixture(name="world")
def _world() -> World:
    return World(rows_of(TOKENS, *[300] * ROWS))


@dataclass
class Writer:
    """Who writes a span from where it lies."""

    exported: Exported
    loan: Loan
    whole: list[int]

    def end(self, folder: Path) -> None:
        """Write it, let go of it, and say so; what was written is what was there at first."""
        path = write(folder, "s.safetensors", self.exported)
        assert tokens(load_span([(path, 0, len(self.whole))])) == self.whole
        self.exported.tensors.clear()
        self.loan.give_back()


def lent(world: World, span: PackedSpan) -> Writer:
    """Have a span written."""
    loan = lend(span, world.ledger)
    return Writer(HOST.export_span(span, 0, span.length), loan, tokens(span))


def test_what_is_lent_is_lodged_once_it_is_written(world: World, tmp_path: Path) -> None:
    """Until then a copy of it is read side by side, whose price is in the plan."""
    span = world.alone.spans[0][0]
    writer = lent(world, span)
    world.alone.make(world.stacks)
    others = [each for spans in world.alone.spans.values() for each in spans if each is not span]
    assert all(each.storage.lodged for each in others)
    assert not span.storage.lodged
    assert span.storage.loan is writer.loan
    world.check()
    world.stacks.adopt()
    assert not span.storage.lodged, "the writer still has its own arrays"
    writer.end(tmp_path)
    before = world.alone.active
    mx.reset_peak_memory()
    world.stacks.adopt()
    assert span.storage.lodged
    assert mx.get_peak_memory() <= before + world.alone.base
    assert world.alone.active <= before - span.nbytes + SLACK
    assert [row.held for row in world.stacks.plan[0].rows] == [900] * ROWS
    world.check()
    assert world.alone.make(world.stacks)[0].kept == 0, "nothing else is there to be done"
    world.stacks.clear()
    assert world.stacks.held() == (0, 0)
    world.check()


def _close(world: World) -> None:
    for span in world.alone.spans.pop(0):
        world.spans.close(span)


def _cut(world: World) -> None:
    following = world.alone.spans[0][1]
    first, last = world.split(200)
    world.alone.spans[0] = [first]
    world.spans.close(last)
    world.spans.close(following)
    world.spans.trim()


def _join(world: World) -> None:
    """With what is lodged."""
    world.spans.join(world.alone.spans[0])


@pytest.mark.parametrize("change", [_close, _cut, _join])
@pytest.mark.parametrize("give_up", [False, True])
def test_what_is_given_up_while_it_is_lent_is_counted(
    world: World, change: Callable[[World], None], tmp_path: Path, *, give_up: bool
) -> None:
    """The writer has all of it, beside its copy in a stack and what was made of it."""
    span = world.alone.spans[0][0]
    writer, nbytes, storage = lent(world, span), span.nbytes, span.storage
    world.alone.make(world.stacks)
    change(world)
    assert storage.loan is writer.loan
    assert world.paging == nbytes
    world.check()
    if give_up:
        world.stacks.clear()
        assert world.paging == nbytes
        world.check()
    del span, storage
    writer.end(tmp_path)
    assert world.paging == 0
    world.stacks.adopt()
    world.check()
    world.stacks.clear()
    world.check()


def test_what_is_lent_is_not_divided(world: World, tmp_path: Path) -> None:
    """A row that reads some of it gets a copy of that; it stays one storage."""
    front, back = world.split(200)
    world.alone.spans[0][0] = back
    writer = lent(world, front)
    world.alone.make(world.stacks)
    assert front.storage is back.storage
    assert not back.storage.lodged
    booked = world.ledger.total.nbytes + world.stacks.held().nbytes
    assert abs(world.alone.active - booked) <= SLACK
    writer.end(tmp_path)
    world.stacks.adopt()
    assert not back.storage.lodged, "of a storage no part is adopted"
    assert tokens(front) + tokens(back) == list(range(TOKENS))
    world.spans.close(front)
    world.spans.trim()
    assert tokens(back) == list(range(200, TOKENS))


@pytest.mark.parametrize("how", ["clear", "release", "close", "join"])
def test_a_copy_of_what_is_lodged_stands_alone(world: World, how: str, tmp_path: Path) -> None:
    """It is what was there, and holds nothing of the stack, whatever becomes of that."""
    world.alone.make(world.stacks)
    (first, second), whole = world.alone.spans[0], list(range(100, TOKENS))
    exported = HOST.export_span(first, 100, TOKENS, copy=True)
    if how == "release":
        gone = world.alone.spans.pop(0)
        world.alone.make(world.stacks, may_copy=False)
        assert world.stacks.idle
        world.stacks.release()
        world.alone.spans[0] = gone
    elif how == "clear":
        world.stacks.clear()
    elif how == "close":
        world.spans.close(first)
        world.spans.close(second)
        del world.alone.spans[0]
    else:
        world.spans.join([first, second])
    del first, second
    booked = world.ledger.total.nbytes + world.stacks.held().nbytes
    copies = len(whole) * PER_TOKEN
    assert abs(world.alone.active - booked - copies) <= SLACK
    world.alone.check()
    path = write(tmp_path, "s.safetensors", exported)
    assert tokens(load_span([(path, 0, len(whole))])) == whole
    exported.tensors.clear()
    world.check()


def test_what_is_adopted_is_read_where_it_lies_now(world: World, tmp_path: Path) -> None:
    """Who read it apart holds nothing of where it was; what went meanwhile is not adopted."""
    span, gone = world.alone.spans[0][0], world.alone.spans[1].pop()
    world.alone.spans[1].append(gone)
    (run,) = runs_of([span])
    mx.eval(run.layer(0))
    writers = [lent(world, span), lent(world, gone)]
    world.alone.make(world.stacks)
    world.spans.close(world.alone.spans[1].pop())
    for writer in writers:
        writer.end(tmp_path)
    world.stacks.adopt()
    assert [row.held for row in world.stacks.plan[0].rows] == [900, TOKENS, 900, 900]
    assert run.layer(0)[0].shape[2] == TOKENS
    world.check()
    mx.reset_peak_memory()
    before = world.alone.active
    world.stacks.clear()
    room = PART * ROWS * 960
    assert mx.get_peak_memory() - world.alone.base - before <= room + SLACK
    world.check()
