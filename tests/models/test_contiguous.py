"""Keys of a single sequence in one piece, as on a GPU: the only place of what it reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np

from umbel.models.kv import contiguous, lodging
from umbel.models.kv.packed import PackedSpan
from umbel.models.kv.sequence_cache import flat_arrays
from umbel.models.kv.stored import DiskCodec
from umbel.models.load.device import GPU
from umbel.models.planner import _SINGLE_STEPS
from umbel.models.runtime import resident_bytes

from .batch_fixture import STACKED, Agent, BatchFixture, Branch
from .test_plan_cost import Accountant

DEVICE = replace(GPU, fp32=True, compiles=False, warms_up=False)
PREFIX = 600
SMALL = 20_000  # bytes


def alone(world: BatchFixture, branch: Branch, prompt: int = 3) -> Agent:
    """Have one agent decode alone until its keys are in one piece."""
    agent = world.come(branch, prompt)
    world.decode([agent], steps=_SINGLE_STEPS)
    assert agent.cache.is_contiguous
    return agent


def snapshot(span: PackedSpan) -> list[bytes]:
    """What a span holds, byte for byte."""
    return [np.asarray(mx.contiguous(array)).tobytes() for array in span.arrays]


def lies_apart(span: PackedSpan) -> bool:
    """Whether a span lies in arrays of its own."""
    return not span.storage.lodged and not span.storage.asks


@pytest.mark.parametrize("name", STACKED)
def test_what_one_reads_alone_is_held_once(name: str) -> None:
    """In one piece while it decodes, growing in place, and byte for byte the same afterwards."""
    world = BatchFixture(name, device=DEVICE)
    branch = world.branch(PREFIX)
    (span,) = branch.spans
    before, size = snapshot(span), span.nbytes
    apart = resident_bytes()
    agent = alone(world, branch)
    assert agent.cache.lodged == PREFIX
    assert span.storage.lodged
    assert span.nbytes == size
    room = size // PREFIX * (256 + 16)
    agent.logits.clear()
    assert resident_bytes() <= apart + room + agent.cache.held().nbytes // 4
    world.decode([agent], steps=_SINGLE_STEPS)
    assert agent.cache.held().nbytes <= room + sum(a.nbytes for a in non_trimmable(agent))
    assert snapshot(span) == before
    world.leave(agent)
    assert lies_apart(span)
    assert snapshot(span) == before


def non_trimmable(agent: Agent) -> list[mx.array]:
    """Arrays of layers whose state is no tokens."""
    return [array for layer in agent.cache.non_trimmable for array in flat_arrays(layer.state)]


@pytest.mark.parametrize("name", STACKED)
def test_others_read_it_where_it_lies(name: str) -> None:
    """A prompt over it is computed meanwhile, a branch is cut, and all then decode together."""
    world = BatchFixture(name, device=DEVICE, own=8)
    branch = world.branch(90)
    agent = alone(world, branch, 40)
    world.cut([branch])
    others = [world.come(branch, count) for count in (5, 21)]
    world.decode([agent], steps=3)  # in place still
    assert agent.cache.lodged == 90
    world.decode(steps=4)
    assert all(lies_apart(span) for span in branch.spans)
    for other in others:
        world.leave(other)
    world.decode(steps=2 * _SINGLE_STEPS)
    assert agent.cache.lodged >= 90  # and what was packed of its own
    stored = world.store(agent)
    assert all(lies_apart(span) for span in stored.spans)
    world.decode(steps=2)
    world.check()


@pytest.mark.parametrize("how", ["handed over", "closed"])
def test_to_give_it_back_takes_a_part_of_it(how: str) -> None:
    """What is lodged is in two places for the time of one packed array."""
    world = BatchFixture("llama", device=DEVICE, num_hidden_layers=8)
    branch = world.branch(4 * PREFIX)
    agent = alone(world, branch)
    assert agent.cache.lodged == 4 * PREFIX
    (span,) = branch.spans
    before = resident_bytes()
    mx.reset_peak_memory()
    if how == "handed over":
        world.placement.take_packed(agent.cache)
    world.placement.close(agent.cache)
    assert lies_apart(span)
    assert mx.get_peak_memory() <= before + span.nbytes // span.storage.parts * 3 // 2
    world.agents.clear()


def test_what_was_being_written_moves_afterwards() -> None:
    """What the disk's thread reads is copied, and lies in one piece alone when it has ended."""
    world = BatchFixture("llama", device=DEVICE)
    branch = world.branch(PREFIX)
    (span,) = branch.spans
    span.storage.loan = object()
    agent = alone(world, branch)
    assert agent.cache.lodged == 0
    world.decode([agent], steps=2)
    held = resident_bytes()
    span.storage.loan = None
    world.decode([agent])
    assert agent.cache.lodged == PREFIX
    assert resident_bytes() <= held - span.nbytes + SMALL
    world.leave(agent)
    assert lies_apart(span)


def test_a_part_of_a_storage_moves_and_the_rest_stays() -> None:
    """What nobody here reads lies apart from then on, and is not kept twice either."""
    world = BatchFixture("llama", device=DEVICE)
    whole = world.branch(PREFIX)
    (span,) = whole.spans
    before = snapshot(span)
    first, rest = span.split(400)
    begin = replace(whole, tokens=whole.tokens[:400], spans=[first])
    held = resident_bytes()
    agent = alone(world, begin)
    assert agent.cache.lodged == 400
    assert lies_apart(rest)
    assert resident_bytes() <= held + 300 * (first.nbytes // 400)
    other = world.come(replace(whole, spans=[first, rest]), 3)
    world.decode([agent], steps=2)
    world.leave(agent)
    world.decode([other], steps=2)
    world.check()
    joined = first.merge(rest)
    assert snapshot(joined) == before


def test_no_more_moves_than_can_be_given_back() -> None:
    """What is longer is read from a copy."""
    world = BatchFixture("llama", device=DEVICE)
    world.runner.use(replace(world.runner.rules, stack_limit=100))
    begin = world.branch(80)
    end = world.branch(50, begin)
    agent = alone(world, end)
    assert agent.cache.lodged == 80
    assert lies_apart(end.spans[-1])
    world.decode(steps=3)
    world.check()


def test_who_reads_the_same_alone_meanwhile_has_a_copy() -> None:
    """What somebody has as its own it does not give to another."""
    world = BatchFixture("llama", device=DEVICE)
    branch = world.branch(80)
    agent, other = alone(world, branch), alone(world, branch)
    assert (agent.cache.lodged, other.cache.lodged) == (80, 0)
    for _ in range(3):
        world.decode([agent])
        world.decode([other])
    world.leave(agent)
    world.decode([other], steps=2)
    assert other.cache.lodged == 80  # now it can
    world.leave(other)
    assert lies_apart(branch.spans[0])


def test_what_is_written_is_a_copy_that_keeps_nothing() -> None:
    """The disk's thread gets the tokens it asks for, and the next step writes in place."""
    world = BatchFixture("llama", device=DEVICE)
    branch = world.branch(300)
    (span,) = branch.spans
    expected = [np.asarray(mx.contiguous(a[..., 100:250, :])) for a in span.arrays]
    agent = alone(world, branch)
    held = resident_bytes()
    exported = DiskCodec(host_reads=True).export_span(span, 100, 250, copy=True)
    world.decode([agent], steps=2)
    agent.logits.clear()
    assert resident_bytes() <= held + span.nbytes // 2 + SMALL
    got = [
        np.concatenate([np.asarray(part).reshape(-1) for part in array.parts])
        for array in exported.tensors.values()
    ]
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other.reshape(-1))


@contextmanager
def memory_lacks(after: int) -> Iterator[None]:
    """Have it fail that an array is put apart, after so many."""
    real, calls = lodging.apart, list[object]()

    def failing(*given: object) -> None:
        calls.append(given)
        if len(calls) > after:
            raise MemoryError("no memory")
        real(*given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contiguous, "apart", failing)
        yield


@pytest.mark.parametrize("after", range(4))
def test_a_failure_half_way_loses_nothing(after: int) -> None:
    """The sequence fails, and what it had moved lies apart again, byte for byte."""
    world = BatchFixture("llama", device=DEVICE)
    branch = world.branch(70)
    (span,) = branch.spans
    before = snapshot(span)
    agent = world.come(branch, 3)
    world.decode([agent], steps=_SINGLE_STEPS - 1)
    with memory_lacks(after), pytest.raises(MemoryError):
        agent.cache.make_contiguous([span.storage.number])
    assert snapshot(span) == before  # also while a part of it has moved
    world.placement.close(agent.cache)
    world.agents.remove(agent)
    assert lies_apart(span)
    assert snapshot(span) == before
    world.come(branch, 2)
    world.decode(steps=2 * _SINGLE_STEPS)
    world.check()


@pytest.mark.parametrize("after", range(4))
def test_what_could_not_be_given_back_is_given_back_later(after: int) -> None:
    """Where memory lacked half way: nothing is lost, and it can be tried again."""
    world = BatchFixture("llama", device=DEVICE)
    branch = world.branch(70)
    (span,) = branch.spans
    before = snapshot(span)
    agent = alone(world, branch)
    with memory_lacks(after), pytest.raises(MemoryError):
        world.placement.close(agent.cache)
    assert snapshot(span) == before
    world.placement.close(agent.cache)
    world.agents.remove(agent)
    assert lies_apart(span)
    assert snapshot(span) == before


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_it_takes_no_more_than_its_price(name: str) -> None:
    """Made, grown, packed, joined by others and given back."""
    world = Accountant(name, device=DEVICE, own=24)
    agent = alone(world, world.branch(PREFIX), 40)
    world.decode(steps=300)
    world.come(world.branch(60), 3)
    world.decode(steps=4)
    world.leave(world.agents[1])
    world.decode(steps=2 * _SINGLE_STEPS)
    assert agent.cache.lodged >= PREFIX
