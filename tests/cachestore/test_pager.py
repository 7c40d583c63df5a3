"""Writes to disk: their order, and their cost."""

import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from umbel.cachestore import check
from umbel.cachestore.ledger import Kind, Size
from umbel.cachestore.node import Extent, TrieNode, as_tokens, path_tokens
from umbel.cachestore.paging import page_out
from umbel.cachestore.record import RecordKind, digest
from umbel.cachestore.trie import RadixTrie

from .fakes import EVERYTHING, HYBRID, KV, RECURRENT, STACKS, Stack, conversation
from .pager_tools import PagedWorld, read_file, written
from .test_extents import record


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_out, "_REST", 0.0)


def stored_tokens(world: PagedWorld) -> list[int]:
    """All tokens in the files, each as often as it was written."""
    found: list[int] = []
    for each in world.tier.alive.values():
        if each.kind is RecordKind.SPAN:
            found += read_file(world.tier.path(each))[0].tolist()
    return sorted(found)


# -- only what is new ----------------------------------------------------------------------


def test_only_new_tokens_are_written(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    talk = conversation(1, 5 * 700)
    for turn in range(1, 6):
        world.serve(talk[: 700 * turn])
        world.write_all()
    assert written(world) == [(at, at + 700) for at in range(0, 3500, 700)]
    sizes = [each.nbytes for each in world.tier.alive.values()]
    assert all(2800 <= size < 3100 for size in sizes)
    assert stored_tokens(world) == sorted(talk)
    assert world.codec.exported == 3500
    world.finish()


def test_a_node_that_grew_is_written_from_where_its_file_ends(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    world.write_all()
    world.serve(range(180))
    assert world.ends() == [180]
    world.write_all()
    assert written(world) == [(0, 100), (100, 180)]
    assert [extent.stop for extent in world.node(180).extents] == [100, 180]
    world.finish()


def test_forks_splits_and_evictions_rewrite_nothing(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    common = conversation(1, 100)
    for number in range(2, 6):
        world.serve([*common[: 20 * number], *conversation(number, 50)])
        world.write_all()
        world.cache.evict(150)
        world.write_all()
        world.fetch([*common, 0])
    tokens = stored_tokens(world)
    assert len(tokens) == len(set(tokens)) == 4 * 50 + 100
    jobs = len(world.tier.jobs)
    world.page_out()
    world.fetch([*common, 0])
    world.write_all()
    assert len(world.tier.jobs) == jobs
    world.finish()


def test_split_during_a_write_is_not_rewritten(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    world.tier.slow = True
    world.pager.step()
    sequence = world.begin([*range(40), 777])
    assert world.ends() == [40, 100]
    world.pager.step()
    sequence.fail()
    world.tier.slow = False
    world.write_all()
    assert written(world) == [(0, 100)]
    assert [node.persisted_end for node in (world.node(40), world.node(100))] == [40, 100]
    assert sum(world.cache.tries.files.counts.values()) == 2
    world.finish()


def test_joined_node_stays_under_way_while_written(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    world.tier.slow = True
    world.pager.step()
    world.serve(range(180))
    assert world.ends() == [180]
    world.cache.evict(0)
    assert world.ends() == [180], "it is being written: giving it up would free nothing"
    world.tier.slow = False
    world.write_all()
    assert written(world) == [(0, 100), (100, 180)]
    assert not world.node(180).writing
    world.finish()


def test_a_joined_child_waits_for_all_of_its_parent(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    world.tier.slow = True
    world.pager.step()
    world.serve(range(180))
    world.cache.longest = 180
    world.serve([*range(180), *conversation(2, 400)])
    assert world.ends() == [180, 580]
    world.pager.step()
    assert written(world) == [(0, 100)]
    world.tier.slow = False
    world.write_all()
    assert written(world) == [(0, 100), (100, 180), (180, 580)]
    world.finish()


def test_whole_states_are_written_once(stack: Stack, folder: Path) -> None:
    world = PagedWorld(stack, folder, interval=20)
    for turn in (30, 60, 90):
        world.serve(range(turn))
        world.write_all()
    jobs = list(world.tier.jobs)
    for _ in range(2):
        world.page_out()
        world.fetch(range(91))
    world.write_all()
    assert world.tier.jobs == jobs
    spans, checkpoints = written(world), written(world, RecordKind.CHECKPOINT)
    assert bool(spans) == stack.layout.spans
    assert bool(checkpoints) == stack.layout.checkpoints
    assert len(set(checkpoints)) == len(checkpoints)
    world.finish()


# -- order ---------------------------------------------------------------------------------


def follows(world: PagedWorld) -> None:
    """Assert that each job goes on from an earlier one, or from nothing."""
    paths = [as_tokens([])]
    for job in (each.record for each in world.tier.jobs):
        before = [
            path[: job.start]
            for path in paths
            if len(path) >= job.start and digest(path[: job.start]) == job.prefix
        ]
        assert before, f"[{job.start}, {job.end}) before its parents"
        paths.append(np.concatenate([before[0], np.frombuffer(job.tokens, np.int32)]))


def test_parents_are_written_first(stack: Stack, folder: Path) -> None:
    world = PagedWorld(stack, folder, queue=1, longest=10, interval=10)
    for number in range(4):
        world.serve([*range(10 * number), *conversation(number + 1, 30)])
    world.write_all()
    follows(world)
    assert len(world.tier.alive) == len(world.tier.jobs) > 4
    world.finish()


def test_a_child_is_not_kept_without_its_parent(folder: Path) -> None:
    """Two are in flight, and the first one fails: the second goes, and both come again."""
    world = PagedWorld(KV, folder, longest=10)
    world.serve(range(10))
    world.serve(range(40))
    assert world.ends() == [10, 40]
    world.codec.poisoned = 1
    world.pager.step()
    assert written(world) == [(0, 10), (10, 40)]
    world.step()
    assert written(world) == [(0, 10), (10, 40), (0, 10)], "the child waits for it"
    assert not world.tier.alive
    world.write_all()
    assert sorted((each.start, each.end) for each in world.tier.alive.values()) == [
        (0, 10),
        (10, 40),
    ]
    assert stored_tokens(world) == list(range(40))
    world.finish()


def test_failing_write_delays_no_other(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(conversation(1, 30))
    world.codec.poisoned = 1
    world.pager.step()
    for number in range(2, 9):
        world.serve(conversation(number, 30))
    world.tier.flush(9)
    for _ in range(5):
        world.codec.poisoned = 0
        world.step()
    assert world.pager.page_out.failures == 1
    assert len(world.tier.alive) == 8
    world.finish()


def test_whole_states_follow_their_spans(folder: Path) -> None:
    """A checkpoint whose span could not be written is not kept, and comes again with it."""
    world = PagedWorld(HYBRID, folder)
    world.serve(range(30))
    world.codec.poisoned = 1
    world.write_all()
    ends = sorted((each.kind.value, each.end) for each in world.tier.alive.values())
    assert ("span", 30) in ends or ("span", 29) in ends
    assert any(kind == "checkpoint" for kind, _ in ends)
    assert not world.trie.persistence.dirty
    world.finish()


# -- what it costs -------------------------------------------------------------------------


def test_a_full_queue_is_not_exported_for_again_and_again(folder: Path) -> None:
    world = PagedWorld(KV, folder, queue=1)
    for number in range(1, 4):
        world.serve(conversation(number, 30))
    world.tier.slow = True
    world.pager.step()
    exports = world.codec.exports
    assert exports <= 2
    for _ in range(50):
        world.pager.step()
    assert world.codec.exports == exports
    world.tier.slow = False
    world.write_all()
    assert len(world.tier.alive) == 3
    world.finish()


def test_a_tier_that_takes_nothing_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(page_out, "_REST", 5.0)
    monkeypatch.setattr(page_out, "_clock", lambda: now[0])
    world = PagedWorld(KV, folder)
    world.close_tier()
    world.serve(range(30))
    for _ in range(50):
        world.pager.step()
    assert world.codec.exports == 1
    assert not world.pager.write_all()
    now[0] = 6.0
    world.pager.step()
    assert world.codec.exports == 2
    assert not any(node.writing for node in world.trie.nodes())
    assert world.cache.ledger.held(Kind.PAGING) == Size()
    world.cache.clear()
    assert not world.registry.spans


def test_idle_steps_walk_nothing(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    trie = world.cache.tries.open(world.begin([1]).namespace)
    for number in range(5000):
        path = as_tokens(range(10 * number, 10 * number + 10))
        node = trie.append(trie.root, path, None)
        trie.persistence.add_extent(node, Extent(record(number, 0, 10), 0, 10))
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        world.pager.step()
    finally:
        sys.setprofile(None)
    assert 0 < calls < 100
    assert len(list(trie.nodes())) == 5000
    world.close_tier()


def test_the_disks_budget_is_kept(stack: Stack, folder: Path) -> None:
    world = PagedWorld(stack, folder, disk=3000)
    for number in range(1, 12):
        world.serve(conversation(number, 100))
        world.write_all()
        assert world.cache.tries.files.nbytes <= 3000
    assert world.tier.flush(9)
    assert 0 < world.tier.statistics().nbytes <= 3000
    assert world.fetch(conversation(11, 100)) == 0
    assert world.probe(conversation(1, 100))[0] > 0
    world.restart()
    assert world.cache.tries.get(world.begin([1]).namespace) is not None
    assert world.fetch(conversation(11, 100)) == 1
    assert world.fetch(conversation(1, 100)) == 0
    world.sequences[0].fail()
    world.finish()


# -- memory --------------------------------------------------------------------------------


def paging(world: PagedWorld) -> int:
    return world.cache.ledger.held(Kind.PAGING).nbytes


def copied(world: PagedWorld) -> int:
    """Bytes that only the writer has in the second step of a slow disk; then all is written."""
    world.tier.slow = True
    world.pager.step()
    world.pager.step()
    found = paging(world)
    world.tier.slow = False
    world.write_all()
    assert paging(world) == 0
    return found


def test_copies_are_counted_as_long_as_they_are(folder: Path) -> None:
    world = PagedWorld(KV, folder, copies=True)
    world.serve(range(1000))
    world.tier.slow = True
    world.pager.step()
    assert paging(world) == 4 * 1000, "a whole storage, too"
    world.tier.slow = False
    world.write_all()
    world.serve(range(1500))
    assert world.ends() == [1500]
    assert paging(world) == 0
    assert copied(world) == 4 * 500
    world.finish()


@pytest.mark.parametrize(
    ("most", "steps"), [(1, [1, 2, 3, 4, 5]), (500, [2, 4, 5]), (1 << 30, [4, 5])]
)
def test_few_bytes_are_copied_between_two_steps(
    most: int, steps: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_out, "_COPIED", most)
    world = PagedWorld(KV, folder, copies=True)
    for number in range(5):
        world.serve(conversation(number, 100))
    world.tier.slow = True
    found = []
    for _ in steps:
        world.pager.step()
        found.append(len(world.tier.jobs))
    assert found == steps
    world.tier.slow = False
    world.write_all()
    world.finish()


def test_a_copy_needs_room(folder: Path) -> None:
    """Where there is none, it waits; the rest of the cache is not evicted for it in vain."""
    world = PagedWorld(KV, folder, memory=Size(16_000, 1000), copies=True)
    world.serve(range(1500))
    world.write_all()
    world.serve(range(2250))
    tails = world.cache.ledger.account(Kind.TAIL)
    sequence = world.begin(range(2251))
    tails.set(Size(15_000 - 9000 - 2999))
    before = world.cache.tries.size.nbytes
    world.step()
    assert written(world) == [(0, 1500)]
    assert world.cache.tries.size.nbytes == before
    tails.close()
    world.write_all()
    assert written(world) == [(0, 1500), (1500, 2250)]
    sequence.fail()
    world.finish()


def test_released_state_is_counted_while_written(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    world.tier.slow = True
    world.pager.step()
    assert paging(world) == 0
    sequence = world.begin([*range(40), 777])
    assert paging(world) == 0, "a cut copies nothing"
    sequence.fail()
    world.trie.join([world.node(40), world.node(100)])
    assert paging(world) == 400
    world.tier.slow = False
    world.write_all()
    assert paging(world) == 0
    world.serve(conversation(1, 100))
    world.tier.slow = True
    world.pager.step()
    world.cache.clear()
    assert paging(world) == 400
    assert world.cache.tries.size.nbytes == 0
    world.tier.slow = False
    world.write_all()
    assert paging(world) == 0
    world.step()
    world.finish()


def test_join_during_a_write_is_counted_at_once(folder: Path) -> None:
    world = PagedWorld(KV, folder, longest=40)
    world.serve(range(40))
    world.serve(range(100))
    world.tier.slow = True
    world.pager.step()
    assert paging(world) == 0
    world.trie.merge(world.node(40))
    assert paging(world) == 400
    world.tier.slow = False
    world.write_all()
    assert paging(world) == 0
    world.finish()


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_forgotten_write_goes_to_no_other_path(stack: Stack, folder: Path) -> None:
    """Another path may begin like it by then: it gets the tokens that they share, or none."""
    world = PagedWorld(stack, folder)
    world.serve(range(40))
    world.pager.step()
    world.cache.clear()
    world.serve([*range(20), *range(100, 120)])
    world.write_all()
    world.page_out()
    world.fetch([*range(20), *range(100, 120), 1])
    assert world.probe([*range(20), *range(100, 120), 1])[1] >= 39
    world.finish()


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
@pytest.mark.parametrize("persisted", [True, False])
def test_cleared_state_does_not_return(stack: Stack, folder: Path, *, persisted: bool) -> None:
    world = PagedWorld(stack, folder, interval=10)
    world.serve(range(60))
    world.serve([*range(20), *range(100, 130)])
    if persisted:
        world.write_all()
    else:
        world.pager.step()  # it is being written
    kept = world.begin(range(40))
    restored = kept.cached
    world.cache.clear()
    world.check()
    world.write_all()
    world.step()
    for one in world.tier.alive.values():
        assert set(np.frombuffer(one.tokens, "<i4")) <= set(range(40))
    kept.fail()
    world.restart()
    world.fetch(range(60))
    matched, cached = world.probe(range(60))
    assert matched <= 40
    assert cached == restored
    world.finish()


def test_a_leaf_that_is_partly_on_disk_is_shortened_first(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(40))
    world.write_all()
    world.serve(range(60))
    (leaf,) = world.trie.nodes()
    assert (leaf.persisted_end, leaf.end) == (40, 60)
    world.cache.evict(world.cache.tries.size.nbytes - 5 * world.each)
    assert (leaf.end, leaf.span is not None) == (55, True)
    world.cache.evict(41 * world.each)
    assert (leaf.end, leaf.span is not None) == (41, True)
    world.cache.evict(30 * world.each)
    assert (leaf.end, leaf.span, leaf.persisted_end) == (40, None, 40)
    world.check()
    world.finish()


def test_deep_paths_are_forgotten() -> None:
    trie = RadixTrie()
    node = trie.root
    for number in range(3000):
        node = trie.append(node, as_tokens([number]), None)
        trie.persistence.add_extent(
            node, Extent(record(number, number, number + 1), number, number + 1)
        )
    assert len(path_tokens(node)) == 3000
    trie.forget(next(iter(trie.root.children.values())))
    assert not trie.root.children
    assert len(trie.persistence.files.unused()) == 3000


def test_forgetting_prunes_stateless_junctions() -> None:
    trie = RadixTrie()
    upper = trie.append(trie.root, as_tokens([1]), None)
    middle = trie.append(upper, as_tokens([2]), None)
    lower = trie.append(middle, as_tokens([3]), None)
    trie.persistence.set_checkpoint(lower, record(1, 0, 3, RecordKind.CHECKPOINT))
    trie.forget(middle)
    assert not trie.root.children
    assert [gone.id for gone in trie.persistence.files.unused()] == [1]


# -- paths that are partly on disk only ----------------------------------------------------


def test_recomputed_state_is_not_rewritten(stack: Stack, folder: Path) -> None:
    world = PagedWorld(stack, folder, longest=30)
    for end in (30, 60, 90):
        world.serve(range(end))
    world.page_out()
    jobs = written(world)
    assert world.begin(range(120)).prefill(75).publish().prefill().cached == 0
    world.check()
    world.sequences[0].finish()
    world.write_all()
    new = written(world)[len(jobs) :]
    assert all(start >= 90 for start, _ in new)
    assert world.probe([*range(120), 1])[1] >= 119
    world.finish()


def test_a_request_resumes_where_memory_ends(folder: Path) -> None:
    world = PagedWorld(KV, folder, longest=30)
    for end in (30, 60, 90):
        world.serve(range(end))
    world.write_all()
    world.cache.evict(4 * 60)
    assert [node.span is None for node in world.trie.nodes()] == [False, False, True]
    assert world.probe(range(100)) == (90, 60)
    assert world.fetch(range(100)) == 1
    assert world.probe(range(100)) == (90, 90)
    world.finish()


def test_only_a_leaf_loses_unwritten_tokens(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    world.write_all()
    world.serve(range(150))
    assert world.ends() == [150]
    world.cache.evict(0)
    (node,) = world.trie.nodes()
    assert (node.end, node.persisted_end, node.span) == (100, 100, None)
    assert node not in world.trie.persistence.dirty
    assert check.problems(world.cache) == []
    world.fetch(range(150))
    assert world.probe(range(150)) == (100, 100)
    world.finish()


def test_writing_is_until_all_writers_are_done() -> None:
    """A node is written as long as it has writers, and persisted soon if one goes to its end."""
    node = TrieNode(as_tokens(range(10)), 0, None)

    class Idle:
        def left(self, state: object) -> None:
            """Do not mind."""

    assert not node.writing
    assert not node.persisted_soon
    node.writers[Idle()] = 5
    assert node.writing
    assert not node.persisted_soon
    node.writers[Idle()] = 10
    assert node.persisted_soon


@pytest.mark.parametrize("stack", [EVERYTHING, RECURRENT, HYBRID], ids=lambda stack: stack.name)
def test_whole_states_return(stack: Stack, folder: Path) -> None:
    world = PagedWorld(stack, folder, interval=16)
    world.serve(range(100), range(200, 290))
    prompt = [*range(100), *range(200, 290), 7]
    cached = world.probe(prompt)
    assert cached[1] > 90
    world.write_all()
    world.restart()
    assert world.probe(prompt)[1] == 0
    assert world.fetch(prompt) == 1
    assert world.probe(prompt) == cached
    world.finish()


def test_write_ends_on_all_parts_of_a_changed_node(folder: Path) -> None:
    with PagedWorld(KV, folder) as world:
        world.tier.slow = True
        world.serve([1])
        world.pager.step()
        world.serve([1, 2])
        world.probe([1, 5])
        assert all(node.writing for node in world.trie.nodes())
        world.tier.slow = False
        world.step()
        world.write_all()
        assert not world.cache.tries.writing
        world.finish()
