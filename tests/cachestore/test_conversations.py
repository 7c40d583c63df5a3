"""Conversations over each kind of stack: what is restored, and from where.

The scenarios follow Ollama's `prefix_cache_test.go` and `prefix_cache_scenario_test.go`.
"""

from itertools import chain

import pytest

from umbel.cachestore.checkpoints import Reason

from .conftest import MakeWorld
from .fakes import EXACT, HYBRID, KV, SLIDING, STACKS, FakeSequence, Stack, TokenIds, World
from .fakes import conversation as fresh

SYSTEM = tuple(range(40))


def test_a_cold_request_restores_nothing(world: World) -> None:
    sequence = world.begin(SYSTEM)
    assert (sequence.lease.matched, sequence.cached, sequence.left) == (0, 0, 40)
    assert sequence.lease.checkpoint is None
    sequence.fail()


def test_branch_creation_and_reuse(world: World) -> None:
    """The second visitor of a prefix finds where it ends, the third one resumes there."""
    assert world.serve([*SYSTEM, *fresh(1, 30)], fresh(2, 20)) == 0
    second = world.begin([*SYSTEM, *fresh(3, 30)])
    assert second.lease.matched == 40
    assert second.cached == (40 if world.stack is KV else 0)
    second.prefill().decode(fresh(4, 20)).finish()
    world.check()
    third = world.begin([*SYSTEM, *fresh(5, 30)])
    assert (third.lease.matched, third.cached) == (40, 40)
    third.fail()


def test_held_bytes_count_leased_state_once(make_world: MakeWorld) -> None:
    world = make_world(KV)
    world.serve([*SYSTEM, *fresh(1, 30)])
    world.serve([*SYSTEM, *fresh(2, 30)])
    assert world.cache.tries.statistics().held_bytes == 0
    running = [world.begin([*SYSTEM, *fresh(n, 30)]) for n in (3, 4)]
    assert world.cache.tries.statistics().held_bytes == len(SYSTEM) * world.each
    for sequence in running:
        sequence.fail()
    assert world.cache.tries.statistics().held_bytes == 0


def test_an_exact_repeat_computes_one_token(world: World) -> None:
    """All stacks saved their state one before the prompt's end: the last one gives logits."""
    world.serve(SYSTEM, fresh(1, 20))
    for _ in range(2):
        repeat = world.begin(SYSTEM)
        assert repeat.left == 1
        repeat.prefill().decode(fresh(1, 20)).finish()
        world.check()


def test_a_repeat_resumes_as_late_as_it_can(make_world: MakeWorld) -> None:
    """Where state cannot go back one token, the last checkpoint before the end is the best."""
    world = make_world(HYBRID)
    world.serve(SYSTEM, fresh(1, 100))
    cached = world.probe([*SYSTEM, *fresh(1, 100)])[1]
    assert cached == 39 + 64
    assert make_world(KV).serve(SYSTEM) == 0


def test_a_conversation_resumes_where_it_ended(world: World) -> None:
    answer = fresh(1, 100)
    world.serve(SYSTEM, answer)
    follow_up = [*SYSTEM, *answer, *fresh(2, 10)]
    assert world.serve(follow_up, fresh(3, 100)) == 140
    assert world.serve([*follow_up, *fresh(3, 100), *fresh(4, 5)]) == 250


def test_a_short_answer_costs_itself_again_at_most(world: World) -> None:
    answer = fresh(1, 20)
    world.serve(SYSTEM, answer)
    cached = world.serve([*SYSTEM, *answer, *fresh(2, 10)])
    assert cached == (60 if world.stack is KV else 39)


@pytest.mark.parametrize("kept", [4, 1 << 10])
@pytest.mark.parametrize("window", [64, 16])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("kv", [False, True])
def test_a_divergence_inside_an_answer_resumes_inside_it(
    *, make_world: MakeWorld, kept: int, window: int, recurrent: bool, kv: bool
) -> None:
    """Seed figure: the prompt's checkpoint is at 30, 96 tokens match, 94 are restored.

    For hybrids as for wrapped windows, and also while at most four checkpoints stay.
    """
    world = make_world(Stack("any", kv=kv, window=window, recurrent=recurrent), kept=kept)
    prompt, answer = fresh(1, 31), fresh(2, 500)
    world.serve(prompt, answer)
    assert 30 in world.checkpoints()
    follow_up = [*prompt, *answer[:65], *fresh(3, 20)]
    sequence = world.begin(follow_up)
    assert (sequence.lease.matched, sequence.cached) == (96, 94)
    assert len(world.checkpoints()) == (4 if kept == 4 else 9)
    sequence.prefill().finish()
    world.check()
    assert world.probe([*prompt, *answer[:65], *fresh(4, 20)])[1] == 96


def test_a_regenerated_answer_resumes_before_it(world: World) -> None:
    world.serve(SYSTEM, fresh(1, 3000))
    assert world.serve(SYSTEM, fresh(2, 3000)) == 39
    assert world.serve(SYSTEM, fresh(3, 100)) == 39


def test_a_restore_point_survives_other_branches(world: World) -> None:
    """A boundary that was saved serves every later turn, whatever branches off around it."""
    world.serve([*SYSTEM, *fresh(1, 10)], (), (40, Reason.SYSTEM))
    for seed in range(2, 8):
        assert world.serve([*SYSTEM, *fresh(seed, 10)], fresh(seed, 5)) == 40
        world.serve([*SYSTEM[:20], *fresh(10 + seed, 10)])
    assert world.probe([*SYSTEM, *fresh(99, 3)])[1] == 40


def test_losing_a_sibling_keeps_a_restore_point(world: World) -> None:
    world.serve([*SYSTEM, *fresh(1, 10)], (), (40, Reason.SYSTEM))
    world.serve([*SYSTEM, *fresh(2, 10)])
    keeper = world.begin([*SYSTEM, *fresh(2, 10), 7])
    world.cache.clear()
    world.check()
    keeper.prefill().close()
    world.check()
    assert world.probe([*SYSTEM, *fresh(3, 10)])[1] == 40


def test_a_cancelled_prefill_keeps_what_it_had(make_world: MakeWorld) -> None:
    """A retry resumes at what was crossed; nothing is claimed beyond what was computed."""
    for stack in STACKS:
        world = make_world(stack, interval=8)
        prompt = fresh(1, 60)
        world.begin(prompt).prefill(36).close()
        world.check()
        if world.stack.layout.checkpoints:
            assert world.checkpoints() == [8, 16, 24, 32]
        retry = world.begin(prompt)
        assert retry.cached == (36 if stack is KV else 32)
        retry.prefill().decode(fresh(2, 10)).finish()
        world.check()
        probe = world.begin([*prompt[:35], *fresh(3, 3)])
        assert probe.cached == (35 if stack is KV else 32)
        probe.fail()


def test_switching_branches_restores_each_ones_state(world: World) -> None:
    a, b = [*SYSTEM, *fresh(1, 30)], [*SYSTEM, *fresh(2, 30)]
    a_answer, b_answer = fresh(3, 70), fresh(4, 70)
    world.serve(a, a_answer)
    world.serve(b, b_answer)
    for turn in range(5, 8):
        for prompt, answer in ((a, a_answer), (b, b_answer)):
            assert world.serve([*prompt, *answer, *fresh(turn, 5)]) == 140


def test_only_used_nodes_are_refreshed(world: World) -> None:
    """Neither the path above a resumption nor the siblings beside it look younger after it."""
    world.serve([*SYSTEM, *fresh(1, 30)], fresh(2, 70), (40, Reason.SYSTEM))
    world.serve([*SYSTEM, *fresh(3, 30)], fresh(4, 70))
    before = {id(node): (node.last_used, node.checkpoint_used) for node in world.trie.nodes()}
    sequence = world.begin([*SYSTEM, *fresh(1, 30), *fresh(2, 70), 7])
    changed = [
        node
        for node in world.trie.nodes()
        if before[id(node)] != (node.last_used, node.checkpoint_used)
    ]
    assert [node.end for node in changed] == [140]
    sequence.fail()
    sequence = world.begin([*SYSTEM, 7])
    assert sequence.cached == 40
    stem = sequence.lease.deepest
    assert stem.end == 40
    assert stem.last_used == max(node.last_used for node in world.trie.nodes())
    sequence.fail()


TURNS = 12


def scenario_turns(world: World, *, boundary: bool) -> list[tuple[int, int]]:
    """Hold a conversation beside others; return what was cached and what could have been."""
    history: TokenIds = SYSTEM
    figures: list[tuple[int, int]] = []
    for turn in range(TURNS):
        prompt = (*history, *fresh(100 + turn, 7))
        boundaries = [(len(prompt) - 2, Reason.MESSAGE)] if boundary else []
        sequence = world.begin(prompt, *boundaries)
        figures.append((sequence.cached, len(history) if turn else 0))
        answer = fresh(200 + turn, 9)
        sequence.prefill().decode(answer).finish()
        world.check()
        world.serve([*SYSTEM, *fresh(300 + turn, 5)], fresh(400 + turn, 3))
        history = (*prompt, *answer)
    return figures


def test_scenario_conversation_turns(make_world: MakeWorld) -> None:
    for stack in STACKS:
        figures = scenario_turns(make_world(stack, interval=8), boundary=True)
        assert figures[0] == (0, 0)
        for cached, known in figures[1:]:
            # The answer, and the generation prompt of two tokens after the message boundary.
            assert cached >= known - (0 if stack is KV else 9 + 2)


def test_scenario_paths_stay_short(make_world: MakeWorld) -> None:
    """Turns of one conversation join into few nodes where no checkpoint keeps them apart."""
    world = make_world(KV)
    history: TokenIds = SYSTEM
    for turn in range(200):
        known = len(history) if turn else 0
        prompt, answer = (*history, *fresh(1 + turn, 3)), fresh(1000 + turn, 2)
        assert world.serve(prompt, answer) == known
        history = (*prompt, *answer)
    assert world.cache.tries.statistics().nodes <= 12
    copied = world.registry.made
    assert copied < 200 * 8


def test_scenario_cancelled_prefills(make_world: MakeWorld) -> None:
    for stack in STACKS:
        world = make_world(stack, interval=6)
        prompt = fresh(1, 60)
        for stop in (18, 36, 54):
            sequence = world.begin(prompt)
            assert sequence.cached == stop - 18
            sequence.prefill(stop).close()
            world.check()
        probe = world.begin([*prompt[:17], *fresh(2, 9)])
        if stack is KV:
            assert probe.cached == 17
        elif stack is SLIDING:
            assert probe.cached >= 12
        else:
            assert probe.cached == 12
        probe.fail()


def test_scenario_divergent_cancels(world: World) -> None:
    """Cancelled and complete requests that diverge everywhere leave sound state behind."""
    open_ones: list[FakeSequence] = []
    for number in range(40):
        keep = 5 + 7 * number % 35
        prompt = [*SYSTEM[:keep], *fresh(1 + number % 7, 30)]
        sequence = world.begin(prompt)
        sequence.prefill(sequence.cached + 1 + 11 * number % 29)
        open_ones.append(sequence)
        if number % 3 == 0:
            open_ones.pop(0).close()
        if number % 5 == 0 and open_ones:
            open_ones.pop().prefill().decode(fresh(50 + number, 6)).finish()
        world.check()
    for sequence in open_ones:
        sequence.close()
        world.check()
    for number in range(7):
        prompt = [*SYSTEM[: 5 + 7 * number % 35], *fresh(1 + number % 7, 30)]
        world.serve(prompt)
        assert world.serve(prompt) == len(prompt) - 1


@pytest.mark.parametrize("stack", EXACT, ids=lambda stack: stack.name)
def test_agents_that_share_a_system_prompt_pay_for_it_once(
    make_world: MakeWorld, stack: Stack
) -> None:
    world = make_world(stack)
    messages = [(at, Reason.MESSAGE) for at in (60, 80, 100, 120, 140)]
    world.serve([*SYSTEM, *fresh(1, 120)], fresh(2, 600), (40, Reason.SYSTEM), *messages)
    assert world.serve([*SYSTEM, *fresh(3, 120)]) == 40


def test_closed_requests_can_be_read_back(world: World) -> None:
    """The trie's own sequences are beginnings of what was computed, and hold all of it."""
    for seed in range(1, 6):
        world.serve([*SYSTEM[: 8 * seed], *fresh(seed, 10)], fresh(10 + seed, 70))
    for _, computed in world.closed:
        matched, cached = world.probe(computed)
        assert matched == len(computed)
        assert cached == len(computed) - 1 if world.stack is KV else cached >= 64
    assert len(list(chain.from_iterable(computed for _, computed in world.closed))) > 400
