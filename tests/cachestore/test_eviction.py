"""Eviction under pressure: its order, and the state that always stays."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.evict import victims
from umbel.cachestore.node import TrieNode
from umbel.cachestore.trie import RadixTrie
from umbel.cachestore.tries import Namespace

from .conftest import MakeWorld
from .fakes import EXACT, HYBRID, KV, NAMESPACE, RECURRENT, STACKS, Stack, TokenIds, World
from .fakes import conversation as fresh

SYSTEM = tuple(range(40))
MARK = (40, Reason.SYSTEM)


def squeeze(world: World) -> Iterator[int]:
    """Evict as little as can be, again and again; yield the bytes that are left."""
    while world.cache.tries.size.nbytes:
        before = world.cache.tries.size.nbytes
        world.cache.evict(before - 1)
        world.check()
        assert world.cache.tries.size.nbytes < before, "nothing was freed"
        yield world.cache.tries.size.nbytes


def chat(world: World, seed: int, turns: int) -> TokenIds:
    """Hold a conversation that starts with the system prompt; return its history."""
    history = SYSTEM
    for turn in range(turns):
        prompt, answer = (*history, *fresh(seed + turn, 6)), fresh(seed + 500 + turn, 4)
        world.serve(prompt, answer, MARK, (len(prompt), Reason.MESSAGE))
        history = (*prompt, *answer)
    return history


def test_one_byte_costs_one_token(make_world: MakeWorld) -> None:
    world = make_world(KV, each=1024)
    history = fresh(1, 1000)
    world.serve(history)
    for left in (999, 998):
        world.cache.evict(world.cache.tries.size.nbytes - 1)
        world.check()
        assert world.probe([*history, 1]) == (left, left)
    world.cache.evict(world.cache.tries.size.nbytes - 10 * 1024)
    assert world.probe([*history, 1]) == (988, 988)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 600))
def test_a_cut_frees_enough_and_less_than_a_token_more(length: int, each: int, budget: int) -> None:
    world = World(KV, each=each)
    world.serve(fresh(1, length))
    before = world.cache.tries.size.nbytes
    world.cache.evict(budget)
    world.check()
    assert world.cache.tries.size.nbytes == min(before, budget // each * each)
    world.finish()


def test_one_byte_never_costs_a_conversation(world: World) -> None:
    history = chat(world, 100, 6)
    full = world.probe([*history, 1])[1]
    world.cache.evict(world.cache.tries.size.nbytes - 1)
    world.check()
    left = world.probe([*history, 1])[1]
    assert left == (full - 1 if world.stack is KV else full)


def test_eviction_byte_by_byte_stays_sound(world: World) -> None:
    """Byte after byte to nothing: what can be restored shrinks little by little, and stays true."""
    history = chat(world, 100, 4)
    cached = world.probe([*history, 1])[1]
    for _ in squeeze(world):
        now = world.probe([*history, 1])[1]
        assert now <= cached
        assert now >= 40 or now == 0 or world.stack is KV
        cached = now
    assert cached == 0
    assert len(world.cache.tries) == 0


def test_the_oldest_conversation_goes_first(world: World) -> None:
    histories = [(*fresh(seed, 50), *fresh(10 + seed, 70)) for seed in range(1, 4)]
    for history in histories:
        world.serve(history[:50], history[50:])
    world.serve([*histories[0], 7])
    full = [world.probe([*history, 1])[1] for history in histories]
    order: list[int] = []
    for _ in squeeze(world):
        for number, history in enumerate(histories):
            # Looked at without a probe, which would refresh it.
            known = world.cache.tries.get(NAMESPACE)
            if known is None or history[0] not in known.root.children:
                order += [number] if number not in order else []
    assert all(full)
    assert order == [0, 1, 2]


def test_a_probe_is_a_use(make_world: MakeWorld) -> None:
    world = make_world(KV)
    world.serve(fresh(1, 50))
    world.serve(fresh(2, 50))
    world.probe([*fresh(1, 50), 7])
    world.cache.evict(50 * 4)
    assert world.probe([*fresh(1, 50), 7])[1] == 50
    assert world.probe([*fresh(2, 50), 7])[1] == 0


@pytest.mark.parametrize("stack", EXACT, ids=lambda stack: stack.name)
def test_of_one_request_the_deepest_checkpoint_goes_first(
    make_world: MakeWorld, stack: Stack
) -> None:
    world = make_world(stack, interval=50)
    world.serve(fresh(1, 240))
    seen = [world.checkpoints()]
    for left in squeeze(world):
        if left and world.checkpoints() != seen[-1]:
            seen.append(world.checkpoints())
    expected = [100, 150, 200, 239]
    assert seen == [expected[:count] for count in range(4, -1 if stack.kv else 0, -1)]


@pytest.mark.parametrize("stack", EXACT, ids=lambda stack: stack.name)
def test_the_system_prompt_of_a_long_conversation_is_not_the_first_victim(
    make_world: MakeWorld, stack: Stack
) -> None:
    """It was last used at the first turn, and is yet what the next agent will resume at (L8)."""
    world = make_world(stack)
    chat(world, 100, 8)
    before = world.checkpoints()
    assert before[0] == 40
    for _ in squeeze(world):
        left = world.checkpoints() if world.cache.tries.size.nbytes else []
        if left != before:
            assert 40 in left or not left
    assert not world.cache.tries.size.nbytes


@pytest.mark.parametrize("stack", EXACT, ids=lambda stack: stack.name)
def test_a_junction_outlives_older_checkpoints_of_those_that_part_there(
    make_world: MakeWorld, stack: Stack
) -> None:
    world = make_world(stack)
    shared = [*SYSTEM, *fresh(1, 20)]
    branches = [[*shared, *fresh(2, 20)], [*shared, *fresh(3, 20)]]
    for branch in branches:
        world.serve(branch, (), (20, Reason.SYSTEM))
    for turn in range(6):
        for branch in branches:
            branch.extend(fresh(10 + turn, 8))
            world.serve(branch)
    junction = world.node(60)
    used = [node.checkpoint_used for node in world.trie.nodes() if node.checkpoint is not None]
    assert junction.checkpoint_used in sorted(used)[:2]
    while len(junction.children) > 1:
        assert junction.checkpoint is not None
        before = world.checkpoints()
        world.cache.evict(world.cache.tries.size.nbytes - 1)
        world.check()
    assert len(before) < len(used) / 2


def test_a_shared_prompt_survives_the_conversations_that_are_evicted(world: World) -> None:
    """After the eviction of all but one the common beginning still serves a new request."""
    histories = [chat(world, seed, 2) for seed in (100, 2000, 4000)]
    keeper = world.begin([*histories[1], 1])
    world.cache.clear()
    world.check()
    assert world.cache.tries.size.nbytes
    assert world.probe([*SYSTEM, 7])[1] == 40
    assert world.probe([*histories[0], 7])[0] == 40
    keeper.fail()


def test_leased_state_stays_under_any_budget(world: World) -> None:
    """Neither zero nor less; and what was held goes when it is given back, however it ends."""
    for end in ("close", "fail"):
        world.cache.budget = 1 << 30
        history = chat(world, 100, 3)
        sequence = world.begin([*history, 1])
        assert sequence.cached
        world.cache.budget = 0
        for budget in (1, 0, -1):
            world.cache.evict(budget)
            world.check()
        assert world.cache.tries.size.nbytes
        getattr(sequence, end)()
        world.check()
        assert world.cache.tries.size.nbytes == 0


def test_a_span_is_not_cut_under_its_checkpoint(make_world: MakeWorld) -> None:
    world = make_world(HYBRID)
    world.serve(SYSTEM, fresh(1, 63))
    assert world.checkpoints() == [39, 103]
    leaf = world.node(103)
    world.trie.touch(leaf, 0)
    world.cache.evict(world.cache.tries.size.nbytes - 1)
    assert world.checkpoints() == [39]
    assert leaf.end == 103


def test_clear_forgets_everything_of_everyone(world: World) -> None:
    for tenant in "abc":
        chat_namespace = Namespace(tenant)
        world.serve(SYSTEM, fresh(1, 70), namespace=chat_namespace)
    world.cache.clear()
    assert world.cache.tries.statistics().nodes == 0
    assert len(world.cache.tries) == 0
    assert world.cache.tries.statistics().evictions


def test_eviction_takes_the_oldest_of_all_tenants(world: World) -> None:
    namespaces = [Namespace(tenant) for tenant in "abc"]
    for namespace in namespaces:
        world.serve(SYSTEM, fresh(1, 70), namespace=namespace)
    third = world.cache.tries.size.nbytes // 3
    world.cache.evict(2 * third)
    assert [namespace for namespace, _ in world.cache.tries.items()] == namespaces[1:]
    assert world.cache.tries.size.nbytes == 2 * third


def test_an_eviction_is_one_pass(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1, 101):
        world.serve(fresh(seed, 30))
    walks = 0
    walk = RadixTrie.nodes

    def counted(trie: RadixTrie) -> Iterator[TrieNode]:
        nonlocal walks
        walks += 1
        return walk(trie)

    monkeypatch.setattr(RadixTrie, "nodes", counted)
    world.cache.evict(world.cache.tries.size.nbytes // 10)
    assert walks == 1
    assert world.cache.tries.statistics().evictions > 50


def test_no_walk_without_pressure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close within the budget does not look at the other conversations' nodes at all."""
    world.serve(SYSTEM)

    def never(_: RadixTrie) -> Iterator[TrieNode]:
        raise AssertionError

    monkeypatch.setattr(RadixTrie, "nodes", never)
    world.begin([*SYSTEM, *fresh(1, 9)]).prefill().close()


def test_victims_come_in_order_and_never_retained(world: World) -> None:
    chat(world, 100, 3)
    history = chat(world, 2000, 3)
    sequence = world.begin([*history, 1])
    held = set(sequence.lease.deepest.path())
    order: list[tuple[int, int]] = []
    for victim in victims([world.trie]):
        assert victim.node not in held
        if victim.checkpoint:
            order.append(victim[:2])
            world.trie.drop_checkpoint(victim.node)
            world.trie.prune(victim.node)
        else:
            world.trie.shorten(victim.node, victim.node.start)
            world.trie.spans.trim()
        world.check()
    assert order == sorted(order)
    assert set(world.trie.nodes()) == held
    sequence.fail()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=9))
def test_spans_go_oldest_first_from_the_ends_of_paths(prompts: list[list[int]]) -> None:
    """Of any trie: nothing goes before what goes on from it, nor while someone holds it."""
    world = World(KV)
    for prompt in prompts:
        world.serve(prompt)
    sequence = world.begin([*prompts[0], 9])
    held, uncovered = set(sequence.lease.deepest.path()), set[TrieNode | None]()
    last = 0
    for victim in victims([world.trie]):
        assert victim.node not in held
        assert not victim.node.children
        assert victim.used >= last or victim.node in uncovered
        last = max(last, victim.used)
        uncovered.add(victim.node.parent)
        world.trie.shorten(victim.node, victim.node.start)
        world.trie.spans.trim()
        world.check()
    assert set(world.trie.nodes()) == held
    sequence.fail()
    world.finish()


def test_a_stack_without_spans_keeps_no_tokens_that_lead_nowhere(make_world: MakeWorld) -> None:
    """Tokens beyond the last checkpoint restore nothing and no budget would ever see them."""
    world = make_world(RECURRENT, kept=0)
    for seed in range(1, 50):
        world.serve(fresh(seed, 30))
    assert len(world.cache.tries) == 0
    world = make_world(RECURRENT)
    for seed in range(1, 50):
        world.serve(fresh(seed, 30))
    world.cache.evict(5 * 40)
    assert world.cache.tries.statistics().nodes == world.cache.tries.statistics().checkpoints == 5


@pytest.mark.parametrize("budget", [0, 300, 2000])
def test_budget_holds_without_leases(make_world: MakeWorld, budget: int) -> None:
    for stack in STACKS:
        world = make_world(stack, budget=budget)
        for seed in range(30):
            world.serve([*SYSTEM, *fresh(1 + seed % 4, 30)], fresh(100 + seed, 80), MARK)
            assert world.cache.tries.size.nbytes <= budget
