"""A lease: what it promises while it is open, and how it ends."""

import pytest

from umbel.cachestore import check
from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.errors import CacheError, LeaseClosedError
from umbel.cachestore.ledger import Kind
from umbel.cachestore.node import as_tokens
from umbel.cachestore.tries import Namespace

from .conftest import MakeWorld
from .fakes import EXACT, HYBRID, KV, NAMESPACE, RECURRENT, SLIDING, FakeSpan, Stack, World


def test_closing_is_idempotent(world: World) -> None:
    sequence = world.begin(range(10)).prefill()
    sequence.close()
    sequence.lease.close()
    sequence.lease.close(as_tokens(range(20)), world.span(range(20)))
    assert not sequence.lease.open
    world.check()
    assert world.probe(range(20))[0] == 9


def test_an_exception_gives_back_the_path_and_keeps_nothing(world: World) -> None:
    world.serve(range(10))
    before = world.cache.tries.statistics()
    sequence = world.begin(range(30), (20, Reason.MESSAGE)).prefill()

    def use() -> None:
        with sequence.lease:
            raise RuntimeError("the kernel failed")

    with pytest.raises(RuntimeError, match="kernel"):
        use()
    world.sequences.clear()
    assert not sequence.lease.open
    world.check()
    assert world.cache.tries.statistics() == before
    assert world.probe(range(30))[0] == (10 if world.stack.kv else 9)


def test_a_closed_lease_gives_nothing_out(world: World) -> None:
    sequence = world.begin(range(10))
    sequence.fail()
    with pytest.raises(LeaseClosedError):
        sequence.lease.spans()
    with pytest.raises(LeaseClosedError):
        _ = sequence.lease.checkpoint
    with pytest.raises(LeaseClosedError):
        sequence.lease.capture(world.checkpoint([1]), Reason.GRID)
    assert not world.registry.checkpoints
    assert sequence.lease.captured == []


def test_captured_checkpoints_are_given_up_one_by_one(make_world: MakeWorld) -> None:
    world = make_world(HYBRID, interval=10)
    sequence = world.begin(range(41), (30, Reason.SYSTEM)).prefill()
    lease, ledger = sequence.lease, world.cache.ledger
    left = [item.reason for item in lease.captured]
    assert set(left) == {Reason.GRID, Reason.SYSTEM, Reason.PROMPT}
    while left:
        held = ledger.held(Kind.CHECKPOINT).nbytes
        assert lease.drop_one_checkpoint()
        assert ledger.held(Kind.CHECKPOINT).nbytes < held
        now = [item.reason for item in lease.captured]
        assert len(now) == len(left) - 1 == len(world.registry.checkpoints)
        left = now
        if len(left) == 1:
            assert left == [Reason.SYSTEM]
    assert not lease.drop_one_checkpoint()
    sequence.close()
    world.check()


def test_an_empty_prompt_is_refused(world: World) -> None:
    """There would be no logits to sample from; and no namespace is left behind for it."""
    with pytest.raises(CacheError, match="empty prompt"):
        world.cache.begin(NAMESPACE, as_tokens([]))
    assert len(world.cache.tries) == 0


def test_at_least_one_token_is_left(world: World) -> None:
    world.serve([1], [2, 3, 4])
    assert world.probe([1]) == (1 if world.stack.kv else 0, 0)
    assert world.probe([1])[1] == 0


def test_namespaces_never_see_each_other(world: World) -> None:
    mine, foreign = Namespace("a"), Namespace("b")
    world.serve(range(40), [50, 51], namespace=mine)
    assert world.probe(range(40), namespace=foreign) == (0, 0)
    assert world.serve(range(40), namespace=foreign) == 0
    assert world.probe(range(40), namespace=mine)[1] == 39
    assert world.cache.tries.statistics().namespaces == 2


def test_a_namespace_without_nodes_or_leases_is_dropped(world: World) -> None:
    for tenant in range(20):
        world.probe(range(5), namespace=Namespace(str(tenant)))
    assert len(world.cache.tries) == 0
    open_lease = world.begin(range(5), namespace=Namespace("open"))
    world.serve(range(5), namespace=Namespace("other"))
    world.cache.clear()
    assert [namespace.tenant for namespace, _ in world.cache.tries.items()] == ["open"]
    open_lease.prefill().close()
    assert world.probe(range(5), namespace=open_lease.namespace)[1] == 4


def test_lease_survives_changes_of_its_path(world: World) -> None:
    world.serve(range(60))
    holder = world.begin(range(61)).prefill()
    assert holder.cached == (60 if world.stack is KV else 59)
    for fork in (50, 20, 35, 5):
        world.serve([*range(fork), 900 + fork, 901])
        world.check()
    world.cache.clear()
    world.check()
    holder.decode([70, 71]).close()
    world.check()
    assert world.probe([*range(61), 70, 71])[0] >= 60


def test_concurrent_requests_over_one_prompt_store_it_once(world: World) -> None:
    first, second = world.begin(range(30)).prefill(), world.begin(range(30)).prefill()
    first.close()
    before = world.cache.tries.size.nbytes
    second.close()
    world.check()
    assert world.cache.tries.size.nbytes == before


def test_longer_request_adds_only_new_tokens(world: World) -> None:
    world.serve(range(10))
    longer, shorter = world.begin(range(40)).prefill(), world.begin(range(20)).prefill()
    shorter.close()
    world.check()
    longer.close()
    world.check()
    assert world.probe(range(41))[1] == 39


def test_checkpoint_finds_its_place_after_splits(world: World) -> None:
    """It stands at its offset, though the edge it was taken on has been split and extended."""
    world.serve(range(10))
    slow = world.begin(range(40), (25, Reason.MESSAGE)).prefill(30)
    world.serve([*range(20), 500, 501])
    world.serve([*range(33), 600])
    slow.prefill().close()
    world.check()
    if world.stack.layout.checkpoints:
        assert world.probe([*range(25), 700])[1] == 25


def test_a_lease_holds_no_more_checkpoints_than_it_may_leave(make_world: MakeWorld) -> None:
    """A prompt of thousands of grid points must not hold thousands of states while it runs."""
    world = make_world(HYBRID, interval=4, kept=3)
    sequence = world.begin(range(400)).prefill()
    assert len(sequence.lease.captured) == len(world.registry.checkpoints) == 3
    sequence.decode(range(500, 1500))
    assert len(world.registry.checkpoints) == 3
    sequence.finish()
    assert len(world.checkpoints()) == 3


def test_none_are_left_where_none_may_be(make_world: MakeWorld) -> None:
    world = make_world(HYBRID, kept=0)
    assert world.serve(range(40), range(50, 150)) == 0
    assert world.serve(range(40)) == 0
    assert world.checkpoints() == []


@pytest.mark.parametrize("offset", [0, 41])
def test_checkpoint_outside_computed_tokens_is_dropped(make_world: MakeWorld, offset: int) -> None:
    world = make_world(HYBRID)
    sequence = world.begin(range(41)).prefill()
    sequence.lease.capture(world.checkpoint(range(offset)), Reason.JUNCTION)
    sequence.close()
    world.check()
    assert world.checkpoints() == [40]


@pytest.mark.parametrize("handed", [0, 5, 29, 31])
@pytest.mark.parametrize("stack", [KV, HYBRID], ids=lambda stack: stack.name)
def test_a_span_of_the_wrong_length_is_refused(
    make_world: MakeWorld, stack: Stack, handed: int
) -> None:
    """It would shift the state of all that follows; the lease ends and nothing is kept."""
    world = make_world(stack)
    lease = world.cache.begin(NAMESPACE, as_tokens(range(31)))
    if stack is HYBRID:
        lease.capture(world.checkpoint(range(30)), Reason.PROMPT)
    span = FakeSpan(world.registry, range(handed)) if handed else None
    with pytest.raises(CacheError, match=f"a span of {handed} tokens"):
        lease.close(as_tokens(range(30)), span)
    assert not lease.open
    world.check()
    assert len(world.cache.tries) == 0


def test_a_span_of_a_stack_without_such_is_refused(make_world: MakeWorld) -> None:
    world = make_world(RECURRENT)
    lease = world.cache.begin(NAMESPACE, as_tokens(range(31)))
    with pytest.raises(CacheError, match="a span of 30 tokens"):
        lease.close(as_tokens(range(30)), FakeSpan(world.registry, range(30)))


def test_tokens_of_another_path_are_refused(world: World) -> None:
    world.serve(range(20))
    lease = world.cache.begin(NAMESPACE, as_tokens(range(30)))
    other = range(500, 530)
    with pytest.raises(CacheError, match="not those of the leased path"):
        lease.close(as_tokens(other), world.span(range(lease.cached, 30)))
    world.check()
    assert world.probe(other) == (0, 0)


def test_a_request_cancelled_before_it_computed_anything_changes_nothing(world: World) -> None:
    world.serve(range(20))
    before = world.cache.tries.statistics()
    for tokens in (range(19), range(0), None):
        lease = world.cache.begin(NAMESPACE, as_tokens(range(20)))
        lease.close(None if tokens is None else as_tokens(tokens))
        world.check()
    after = world.cache.tries.statistics()
    assert (after.tokens, after.checkpoints) == (before.tokens, before.checkpoints)
    assert world.probe(range(20))[1] == 19


def test_a_rewinding_checkpoint_below_the_match_is_retained(make_world: MakeWorld) -> None:
    world = make_world(SLIDING)
    world.serve(range(13))
    world.serve([*range(8), 50, 51], [*range(52, 62)])
    assert world.node(8).checkpoint is None
    sequence = world.begin([*range(8), 99])
    assert sequence.cached == 8
    assert sequence.lease.checkpoint is not None
    assert sequence.lease.checkpoint.offset > 8
    world.cache.clear()
    world.check()
    sequence.fail()


def test_an_exact_checkpoint_is_preferred_to_one_that_rewinds(make_world: MakeWorld) -> None:
    world = make_world(SLIDING)
    world.serve(range(10))
    world.serve(range(13))
    sequence = world.begin(range(10))
    assert sequence.lease.checkpoint is not None
    assert sequence.lease.checkpoint.offset == sequence.cached == 9
    sequence.fail()


def test_only_matched_tokens_are_retained(make_world: MakeWorld) -> None:
    """The rest of an edge that a request left belongs to another conversation, and may go."""
    world = make_world(KV)
    world.serve(range(1000))
    sequence = world.begin([*range(10), 99])
    world.cache.clear()
    assert world.cache.tries.size.nbytes == 40
    world.check()
    sequence.fail()


@pytest.mark.parametrize("stack", EXACT, ids=lambda stack: stack.name)
def test_unknown_prompt_touches_nothing(make_world: MakeWorld, stack: Stack) -> None:
    """A miss neither retains nor refreshes a checkpoint that happens to rewind to nothing."""
    world = make_world(stack)
    world.serve(range(10))
    used = [node.checkpoint_used for node in world.trie.nodes()]
    sequence = world.begin([500, 501])
    assert sequence.lease.checkpoint is None
    assert [node.checkpoint_used for node in world.trie.nodes()] == used
    assert all(node.ref_count == 0 for node in world.trie.nodes())
    sequence.fail()


def test_resuming_at_a_node_end_copies_nothing(world: World) -> None:
    """The price of a lease does not grow with the state it leases: no span is made or cut."""
    world.serve(range(4001))
    world.serve([*range(4001), 5000, 5001])
    made, splits = world.registry.made, world.registry.splits
    nodes = world.cache.tries.statistics().nodes
    sequence = world.begin([*range(4001), 6000])
    assert sequence.cached >= 4000
    assert (world.registry.made, world.registry.splits) == (made, splits)
    assert world.cache.tries.statistics().nodes == nodes
    sequence.fail()


def test_the_lease_of_a_root_is_known_to_the_checker(world: World) -> None:
    sequence = world.begin([1, 2, 3])
    assert check.problems(world.cache) == []
    assert world.cache.leases == {sequence.lease}
    assert sequence.lease.trie is world.trie
    assert world.cache.tries.statistics().leases == 1
    sequence.fail()


def test_a_cut_is_noticed_though_another_namespace_is_dropped(make_world: MakeWorld) -> None:
    world = make_world(KV)
    other = Namespace("other")
    world.serve(range(10), namespace=other)
    world.serve([*range(5), 20, 21], namespace=other)
    world.serve(range(10))
    reader = world.begin(range(20))
    seen, spans = world.cache.tries.splits, reader.lease.spans()
    world.cache.evict(0)
    assert len(world.cache.tries) == 1
    world.serve([*range(5), 20, 21])
    assert reader.lease.spans() != spans
    assert world.cache.tries.splits > seen
    reader.fail()
