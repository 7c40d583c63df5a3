"""Slots of a batch: what stays of who had one, and what coming and going costs."""

import gc
import weakref
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.errors import StateLostError
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.packed import PackedSpan
from umbel.models.kv.recurrent import BatchedRecurrentLayer
from umbel.models.planned_for import Rules

from .batch_fixture import NAMES, Agent, BatchFixture, Branch


def overwrite(party: BatchFixture, row: int, value: float) -> None:
    """Set all that a row holds, in every layer."""
    for buffer in party.batch._buffers:
        for tensor in buffer.tensors:
            assert tensor is not None
            tensor[row] = value
    for layer in party.batch._non_trimmable:
        if isinstance(layer, BatchedRecurrentLayer):
            for array in layer.arrays():
                array[row] = value


@pytest.mark.parametrize("successor", ["newcomer", "neighbour"])
@pytest.mark.parametrize("value", [1e4, float("nan")])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", "deepseek_v3", "gemma2"])
def test_one_rows_numbers_are_its_own(name: str, value: float, successor: str) -> None:
    """A sequence whose numbers went wild changes no neighbour, nor who takes its seat later."""
    party = BatchFixture(name)
    for prompt in (20, 3, 30):
        party.come(prompt=prompt)
    party.feed(steps=2)
    party.check()
    first = party.placement.sequences[0]
    (wild,) = [agent for agent in party.agents if agent.cache is first]
    party.agents.remove(wild)
    overwrite(party, 0, value)
    party.feed([*party.agents, wild])
    party.check()
    party.placement.close(wild.cache)
    if successor == "newcomer":
        party.come(prompt=2)
    party.feed(steps=3)
    assert 0 in party.placement.sequences
    party.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_is_empty_for_who_comes(name: str) -> None:
    """Who brings nothing of its own has nothing of who sat there until a moment ago."""
    party = BatchFixture(name)
    branch = party.branch(300)
    for prompt in (9, 20, 30):
        party.come(prompt=prompt)
    party.feed(steps=2)
    for start in (None, branch):
        party.leave(party.agents[0])
        party.come(start)
        party.feed(steps=3)
    party.check()


@pytest.mark.parametrize("name", NAMES)
def test_free_rows_do_not_matter(name: str) -> None:
    """What a free row holds is not seen, not even if it is no number."""
    party = BatchFixture(name)
    for prompt in (20, 3, 30, 1, 9):
        party.come(prompt=prompt)
    party.feed(steps=2)
    assert party.batch.rows == 6
    overwrite(party, 5, float("nan"))
    party.feed(steps=3)
    party.check()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_after_everybody_left(name: str) -> None:
    """An empty batch holds no arrays, and nothing of what its rows leased."""
    party = BatchFixture(name)
    branch = party.branch(60)
    for _ in range(2):
        party.come(branch, 5)
    for _ in range(2):
        party.come(party.branch(Rules().own, branch), 5)
    party.feed(steps=3)
    refs = [weakref.ref(span) for agent in party.agents for span in agent.cache.prefix]
    for agent in list(party.agents):
        party.leave(agent)
    assert (len(party.placement.sequences), party.batch.shape[0]) == (0, 0)
    assert party.batch.arrays() == []
    assert [buffer.positions for buffer in party.batch._buffers if buffer.positions] == []
    del agent, branch
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def fail_once(party: BatchFixture, patch: pytest.MonkeyPatch) -> None:
    """Have one layer of the model fail, when those before it have written their tokens."""
    kind = type(party.model.layers[1])
    real, calls = kind.__call__, 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the model failed")
        return real(*args, **kwargs)

    patch.setattr(kind, "__call__", call)


def failed_batch(name: str, patch: pytest.MonkeyPatch) -> tuple[BatchFixture, list[Agent]]:
    """A party whose model failed; three new agents, that have not sat, and the failed ones."""
    party = BatchFixture(name)
    branch = party.branch(40)
    for prompt in (3, 20, 7):
        party.come(branch, prompt)
    party.feed(steps=2)
    fail_once(party, patch)
    with pytest.raises(RuntimeError, match="the model failed"):
        party.feed()
    assert party.batch.arrays() == []
    failed, party.agents = party.agents, []
    for prompt in (1, 0, 30):
        party.come(branch, prompt)
    return party, failed


@pytest.mark.parametrize("name", NAMES)
def test_after_the_model_failed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the model fails within a step, those who ran are lost, and a fresh batch works."""
    party, failed = failed_batch(name, monkeypatch)
    for agent in failed:
        party.placement.close(agent.cache)
    party.feed(steps=3)
    assert len(party.placement.sequences) == 3
    party.check()


def test_who_fails_to_leave_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gets no caches of its own has no state that could be read by mistake."""
    party = BatchFixture("llama")
    for prompt in (3, 20, 7):
        party.come(prompt=prompt)
    party.feed()
    leaver = party.agents.pop()

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(CacheLayout, "layers", fail)
        with pytest.raises(MemoryError):
            party.feed()
    with pytest.raises(StateLostError):
        party.placement.take_packed(leaver.cache)


def test_closing_late_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed sequence that is closed when others sit in the batch takes nobody's seat away."""
    party, failed = failed_batch("llama", monkeypatch)
    party.feed()
    for agent in failed:
        party.placement.close(agent.cache)
    party.feed(steps=3)
    assert len(party.placement.sequences) == 3
    party.check()


def long_trunk(party: BatchFixture) -> tuple[Branch, int]:
    """A branch of 4,000 tokens without their computation, and its bytes."""
    shape = (2 * len(party.batch._attending), 2, 4000, 32)
    keys = mx.random.normal(shape)
    mx.eval(keys)
    places = tuple(((0, 2 * i), (0, 2 * i + 1)) for i in range(len(party.batch._attending)))
    span = PackedSpan([keys], places)
    return Branch([0] * 4000, [span]), span.nbytes


def settled() -> int:
    """Start measuring the peak, from the bytes that are active now."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def test_entering_copies_no_lease() -> None:
    """Sitting down, standing up and decoding over 4,000 leased tokens copies none of them."""
    party = BatchFixture("llama")
    for _ in range(2):
        party.come(prompt=1)
    party.feed()
    branch, size = long_trunk(party)
    for _ in range(3):
        party.come(branch, 1)
        active = settled()
        party.feed()
        mx.eval(party.batch.arrays())
        assert mx.get_peak_memory() - active < size / 8
    party.leave_batch(party.agents[-1])
    party.feed(party.agents[:-1])
    assert mx.get_peak_memory() - active < size / 8


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_steps_that_are_not_awaited_copy_no_row(name: str) -> None:
    """Steps launched one after the other write into the rows, and do not copy them."""
    party = BatchFixture(name, hidden_size=32)
    for _ in range(6):
        party.come(prompt=200)
    party.feed(steps=2)
    mx.eval(party.batch.arrays())
    size = sum(array.nbytes for array in party.batch.arrays())
    active = settled()
    party.feed(steps=6)
    mx.eval(party.batch.arrays())
    assert mx.get_peak_memory() - active < size / 4
