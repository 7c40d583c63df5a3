"""Slots of a batch: what stays of who had one, and what coming and going costs."""

import gc
import weakref
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.errors import StateLostError
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.recurrent import BatchedRecurrentLayer
from umbel.models.kv.spans import PackedSpan, Storage

from ..placement_check import problems
from .batch_fixture import NAMES, Agent, BatchFixture, Branch


def overwrite(fixture: BatchFixture, row: int, value: float) -> None:
    """Set all that a row holds, in every layer."""
    rows = fixture.placement.own
    for tensor in [t for buffer in fixture.batch.windows.values() for t in buffer.tensors]:
        assert tensor is not None
        tensor[row] = value
    if rows is not None:
        seat = rows.seats.get(row)
        (buffer,) = [members.buffer for members in rows.members]
        for tensor in buffer.tensors:
            assert tensor is not None
            tensor[row if seat is None else seat.row] = value
    for layer in fixture.batch._non_trimmable:
        if isinstance(layer, BatchedRecurrentLayer):
            for array in layer.arrays():
                array[row] = value


@pytest.mark.parametrize("successor", ["new", "neighbour"])
@pytest.mark.parametrize("value", [1e4, float("nan")])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", "deepseek_v3", "gemma2"])
def test_one_rows_numbers_are_its_own(name: str, value: float, successor: str) -> None:
    """A sequence whose numbers went wild changes no neighbour, nor who takes its slot later."""
    fixture = BatchFixture(name)
    for prompt in (20, 3, 30):
        fixture.come(prompt=prompt)
    fixture.decode(steps=2)
    fixture.check()
    first = fixture.placement.sequences[0]
    (wild,) = [agent for agent in fixture.agents if agent.cache is first]
    fixture.agents.remove(wild)
    overwrite(fixture, 0, value)
    fixture.decode([*fixture.agents, wild])
    fixture.check()
    fixture.placement.close(wild.cache)
    if successor == "new":
        fixture.come(prompt=2)
    fixture.decode(steps=3)
    assert 0 in fixture.placement.sequences
    fixture.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_is_empty_for_who_comes(name: str) -> None:
    """A sequence without own tokens reads none of the row's previous sequence."""
    fixture = BatchFixture(name)
    branch = fixture.branch(300)
    for prompt in (9, 20, 30):
        fixture.come(prompt=prompt)
    fixture.decode(steps=2)
    for start in (None, branch):
        fixture.leave(fixture.agents[0])
        fixture.come(start)
        fixture.decode(steps=3)
    fixture.check()


@pytest.mark.parametrize("name", NAMES)
def test_free_rows_do_not_matter(name: str) -> None:
    """The content of a free row is not read, not even NaNs."""
    fixture = BatchFixture(name)
    for prompt in (20, 3, 30, 1, 9):
        fixture.come(prompt=prompt)
    fixture.decode(steps=2)
    assert fixture.batch.rows == 8
    overwrite(fixture, 5, float("nan"))
    fixture.decode(steps=3)
    fixture.check()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_after_everybody_left(name: str) -> None:
    """An empty batch holds no arrays, and nothing of what its rows leased."""
    fixture = BatchFixture(name)
    branch = fixture.branch(60)
    for _ in range(2):
        fixture.come(branch, 5)
    for _ in range(2):
        fixture.come(fixture.branch(70, branch), 5)
    fixture.decode(steps=3)
    refs = [weakref.ref(span) for agent in fixture.agents for span in agent.cache.leased]
    for agent in list(fixture.agents):
        fixture.leave(agent)
    assert (len(fixture.placement.sequences), fixture.batch.shape[0]) == (0, 0)
    assert fixture.batch.arrays() == []
    assert fixture.placement.own is None or fixture.placement.own.shapes == {}
    del agent, branch
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def fail_once(fixture: BatchFixture, patch: pytest.MonkeyPatch) -> None:
    """Make one layer of the model fail, after those before it have written their tokens."""
    kind = type(fixture.model.layers[1])
    real, calls = kind.__call__, 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the model failed")
        return real(*args, **kwargs)

    patch.setattr(kind, "__call__", call)


def failed_batch(name: str, patch: pytest.MonkeyPatch) -> tuple[BatchFixture, list[Agent]]:
    """A fixture whose model failed; three agents not entered, and the failed."""
    fixture = BatchFixture(name)
    branch = fixture.branch(40)
    for prompt in (3, 20, 7):
        fixture.come(branch, prompt)
    fixture.decode(steps=2)
    fail_once(fixture, patch)
    with pytest.raises(RuntimeError, match="the model failed"):
        fixture.decode()
    assert fixture.batch.arrays() == []
    failed, fixture.agents = fixture.agents, []
    for prompt in (1, 0, 30):
        fixture.come(branch, prompt)
    return fixture, failed


@pytest.mark.parametrize("name", NAMES)
def test_after_the_model_failed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the model fails within a step, its sequences are lost, and a new batch works."""
    fixture, failed = failed_batch(name, monkeypatch)
    for agent in failed:
        fixture.placement.close(agent.cache)
    fixture.decode(steps=3)
    assert len(fixture.placement.sequences) == 3
    fixture.check()


def test_who_fails_to_leave_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gets no caches of its own has no state that could be read by mistake."""
    fixture = BatchFixture("llama")
    for prompt in (3, 20, 7):
        fixture.come(prompt=prompt)
    fixture.decode()
    leaver = fixture.agents.pop()

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(CacheLayout, "layers", fail)
        with pytest.raises(MemoryError):
            fixture.decode()
    with pytest.raises(StateLostError):
        fixture.placement.suffix_span(leaver.cache)


def test_closing_late_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed sequence that is closed later takes no slot of the new batch away."""
    fixture, failed = failed_batch("llama", monkeypatch)
    fixture.decode()
    for agent in failed:
        fixture.placement.close(agent.cache)
    fixture.decode(steps=3)
    assert len(fixture.placement.sequences) == 3
    fixture.check()


def long_prefix(fixture: BatchFixture) -> tuple[Branch, int]:
    """A branch of 32,000 tokens without their computation, and its bytes."""
    shape = (2 * fixture.batch.token_layers, 2, 32000, 32)
    keys = mx.random.normal(shape)
    mx.eval(keys)
    places = tuple(((0, 2 * i), (0, 2 * i + 1)) for i in range(fixture.batch.token_layers))
    span = PackedSpan(Storage([keys], places))
    return Branch([0] * 32000, [span]), span.nbytes


def settled() -> int:
    """Start measuring the peak, from the bytes that are active now."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def test_entering_copies_nothing_that_is_shared() -> None:
    """Entering, leaving and decoding over 32,000 tokens that others read, too, copies none."""
    fixture = BatchFixture("llama")
    branch, size = long_prefix(fixture)
    for _ in range(2):
        fixture.come(branch, 1)
    fixture.decode()
    for _ in range(2):
        fixture.come(branch, 1)
        active = settled()
        fixture.decode()
        mx.eval(fixture.batch.arrays())
        assert mx.get_peak_memory() - active < size / 12
    fixture.leave_batch(fixture.agents[-1])
    fixture.decode(fixture.agents[:-1])
    assert mx.get_peak_memory() - active < size / 12


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_steps_that_are_not_awaited_copy_no_row(name: str) -> None:
    """Steps launched one after the other write into the rows, and do not copy them."""
    fixture = BatchFixture(name, hidden_size=32)
    for _ in range(6):
        fixture.come(prompt=200)
    fixture.decode(steps=2)
    mx.eval(fixture.batch.arrays())
    size = sum(array.nbytes for array in fixture.batch.arrays())
    active = settled()
    fixture.decode(steps=6)
    mx.eval(fixture.batch.arrays())
    assert mx.get_peak_memory() - active < size / 4


def test_a_token_in_two_places_is_found() -> None:
    """Whatever is wrong with where tokens lie is said."""
    fixture = BatchFixture("llama", least_class=16)
    branch = fixture.branch(60)
    for prompt in (3, 20, 7):
        fixture.come(branch, prompt)
    fixture.decode(steps=2)
    rows, caches = fixture.placement.own, [agent.cache for agent in fixture.agents]
    assert rows is not None
    assert problems(fixture.placement, caches) == []
    first, second, third = (cache.slot for cache in caches)
    assert first is not None
    assert second is not None
    assert third is not None
    rows.shorten(first, rows.length(first) - 1)
    assert problems(fixture.placement, caches[:1]) == [
        f"sequence {caches[0].number} has 4 tokens in its row, and 5 to have there",
        f"sequence {caches[0].number} reads 60 tokens and has 4 in its row, of 65",
    ]
    rows.shorten(first, 66)
    assert "has 66 tokens in its row" in problems(fixture.placement, caches[:1])[0]
    rows.shorten(first, 5)
    seat = rows.seats[second]
    rows.seats[second] = rows.seats[third]
    assert "two rows have one seat" in problems(fixture.placement, [])
    rows.seats[second] = seat
    caches[0].leased = [*caches[0].leased, *caches[0].leased]
    assert "leases 55 tokens more than it has" in problems(fixture.placement, caches)[0]
