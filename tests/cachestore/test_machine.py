"""Any order of operations, with several leases open at once, checked after each step."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from umbel.cachestore import compaction
from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.node import as_tokens, common_length
from umbel.cachestore.tries import Namespace

from .fakes import KV, FakeSequence, Stack, World

MAX_OPEN = 5
NAMESPACES = st.sampled_from([Namespace("a"), Namespace("b")])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
REASONS = st.sampled_from([Reason.SYSTEM, Reason.MESSAGE])
PICK = st.integers(0, MAX_OPEN - 1)


class CacheMachine(RuleBasedStateMachine):
    """Drives one cache as an engine with several live sequences does."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.world = World(stack, interval=10)
        self.patch = pytest.MonkeyPatch()

    def pick(self, number: int) -> FakeSequence:
        return self.world.sequences[number % len(self.world.sequences)]

    def has_open(self) -> bool:
        return bool(self.world.sequences)

    def begin(self, namespace: Namespace, prompt: list[int], at: int, reason: Reason) -> None:
        """Start a request, and compare what was matched with all that was ever stored."""
        if len(self.world.sequences) == MAX_OPEN:
            self.world.sequences[0].close()
        sequence = self.world.begin(prompt, (at, reason), namespace=namespace)
        known = [tokens for owner, tokens in self.world.closed if owner == namespace]
        given = as_tokens(prompt)
        longest = max((common_length(as_tokens(tokens), given) for tokens in known), default=0)
        assert sequence.lease.matched <= longest
        if self.world.stack is KV:
            assert sequence.cached == min(sequence.lease.matched, len(prompt) - 1)

    @initialize(always=st.sampled_from([1, 6, 256]))
    def start(self, always: int) -> None:
        self.patch.setattr(compaction, "_ALWAYS", always)

    @rule(namespace=NAMESPACES, prompt=TOKENS, at=st.integers(0, 20), reason=REASONS)
    def begin_new(self, namespace: Namespace, prompt: list[int], at: int, reason: Reason) -> None:
        self.begin(namespace, prompt, at, reason)

    @precondition(lambda self: self.world.closed)
    @rule(
        which=st.integers(0, 20),
        cut=st.integers(0, 60),
        new=TOKENS,
        at=st.integers(0, 60),
        reason=REASONS,
    )
    def branch(self, which: int, cut: int, new: list[int], at: int, reason: Reason) -> None:
        namespace, tokens = self.world.closed[-1 - which % len(self.world.closed)]
        self.begin(namespace, [*tokens[:cut], *new], at, reason)

    @precondition(has_open)
    @rule(number=PICK)
    def repeat(self, number: int) -> None:
        sequence = self.pick(number)
        self.begin(sequence.namespace, list(sequence.prompt), 5, Reason.SYSTEM)

    @precondition(has_open)
    @rule(number=PICK, more=st.integers(1, 30))
    def prefill(self, number: int, more: int) -> None:
        sequence = self.pick(number)
        sequence.prefill(len(sequence.state) + more)

    @precondition(has_open)
    @rule(number=PICK, answer=TOKENS, times=st.sampled_from([1, 1, 8]))
    def decode(self, number: int, answer: list[int], times: int) -> None:
        self.pick(number).prefill().decode(answer * times)

    @precondition(has_open)
    @rule(number=PICK)
    def finish(self, number: int) -> None:
        self.pick(number).prefill().finish()

    @precondition(has_open)
    @rule(number=PICK)
    def cancel(self, number: int) -> None:
        """A request is cancelled wherever it is, and closed once more for good measure."""
        sequence = self.pick(number)
        sequence.close()
        sequence.lease.close()

    @precondition(has_open)
    @rule(number=PICK)
    def fail(self, number: int) -> None:
        self.pick(number).fail()

    @rule(percent=st.integers(0, 100))
    def evict(self, percent: int) -> None:
        self.world.cache.evict(self.world.cache.tries.size.nbytes * percent // 100)

    @rule(budget=st.sampled_from([0, 100, 400, 1 << 30]))
    def press(self, budget: int) -> None:
        self.world.cache.budget = budget

    @rule()
    def clear(self) -> None:
        self.world.cache.clear()
        held = {id(node) for lease in self.world.cache.leases for node in lease.deepest.path()}
        left = [node for trie in self.world.cache.tries for node in trie.nodes()]
        assert all(id(node) in held for node in left)

    @invariant()
    def sound(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.patch.undo()
        for sequence in list(self.world.sequences):
            sequence.close()
        self.world.finish()


def test_any_order_of_operations(stack: Stack) -> None:
    class OverThisStack(CacheMachine):
        def __init__(self) -> None:
            super().__init__(stack)

    run_state_machine_as_test(
        OverThisStack,
        settings=settings(
            max_examples=2 * settings().max_examples,
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )
