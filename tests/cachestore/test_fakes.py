"""The fakes themselves: a fixture that cannot fail would prove nothing."""

import pytest

from umbel.cachestore.node import as_tokens

from .fakes import EVERYTHING, KV, NAMESPACE, FakeCheckpoint, FakeSpan, Registry, World


def test_a_closed_span_cannot_be_used_or_closed_again() -> None:
    registry = Registry()
    span = FakeSpan(registry, [1, 2, 3])
    assert (span.length, span.nbytes) == (3, 12)
    span.close()
    for use in (span.close, lambda: span.nbytes, lambda: span.split(1), lambda: span.merge(span)):
        with pytest.raises(AssertionError, match="after it was closed"):
            use()


def test_split_and_merge_take_ownership() -> None:
    registry = Registry()
    whole = FakeSpan(registry, [1, 2, 3])
    left, right = whole.split(1)
    assert registry.spans == {left, right}
    joined = left.merge(right)
    assert joined.tokens == (1, 2, 3)
    assert registry.spans == {joined}
    with pytest.raises(AssertionError, match="after it was closed"):
        whole.split(1)


def test_a_checkpoint_rewinds_only_until_its_window_wraps() -> None:
    registry = Registry()
    early = FakeCheckpoint(registry, range(16), window=16)
    assert early.restore(3) == (0, 1, 2)
    wrapped = FakeCheckpoint(registry, range(17), window=16)
    recurrent = FakeCheckpoint(registry, range(4))
    for checkpoint in (wrapped, recurrent):
        assert len(checkpoint.restore(checkpoint.offset)) == checkpoint.offset
        assert not checkpoint.rewinds_to(checkpoint.offset - 1)
        with pytest.raises(AssertionError, match="cannot restore"):
            checkpoint.restore(checkpoint.offset - 1)


def test_the_fixture_sees_a_lease_that_is_never_closed() -> None:
    world = World(KV)
    sequence = world.begin([1, 2, 3])
    with pytest.raises(AssertionError, match="a lease was never closed"):
        world.finish()
    sequence.fail()
    world.finish()


@pytest.mark.parametrize("what", ["span", "checkpoint"])
def test_the_fixture_sees_state_that_is_never_closed(what: str) -> None:
    world = World(EVERYTHING)
    getattr(world, what)([1, 2])
    with pytest.raises(AssertionError):
        world.finish()


def test_a_world_sees_state_of_other_tokens() -> None:
    world = World(KV)
    world.serve([1, 2, 3, 4])
    node = world.node(4)
    assert node.span is not None
    node.span.close()
    node.span = FakeSpan(world.registry, [1, 2, 9, 4])
    with pytest.raises(AssertionError):
        world.check()
    with pytest.raises(AssertionError):
        world.begin([1, 2, 3, 4, 5])
    next(iter(world.cache.leases)).close()
    assert world.cache.begin(NAMESPACE, as_tokens([7])).matched == 0
