"""Any order of requests, evictions, writes, reads, damages and restarts."""

import os
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
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
from umbel.cachestore.errors import PinError
from umbel.cachestore.ledger import Size
from umbel.cachestore.node import as_tokens
from umbel.cachestore.paging import page_out
from umbel.cachestore.pool import TenantBounds
from umbel.cachestore.tries import SHARED, Namespace

from .bounded import bound, watched
from .disk_tools import TIMEOUT
from .fakes import NAMESPACE, PLENTY, Stack
from .pager_tools import PagedSequence, PagedWorld, damage, has_on_disk, on_disk

MAX_OPEN = 4
OPERATOR = Namespace(SHARED)
NAMESPACES = st.sampled_from([NAMESPACE, NAMESPACE, Namespace("b")])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
REASONS = st.sampled_from([Reason.SYSTEM, Reason.MESSAGE])
PICK = st.integers(0, 20)
BOUNDS = st.builds(
    TenantBounds,
    floor=st.sampled_from([0, 60, 200]),
    ceiling=st.sampled_from([None, 0, 100]),
    disk=st.sampled_from([None, 0, 500]),
)


class PagerMachine(RuleBasedStateMachine):
    """Drives a cache and its disk as an engine with several live sequences does."""

    world: PagedWorld

    def __init__(self, stack: Stack, folder: Path) -> None:
        super().__init__()
        self.stack = stack
        self.damaged = False
        self.folder = folder
        self.patch = pytest.MonkeyPatch()

    @initialize(
        longest=st.sampled_from([4, 9, 1 << 60]),
        always=st.sampled_from([1, 6, 256]),
        queue=st.sampled_from([1, 90, PLENTY]),
        memory=st.sampled_from([400, PLENTY]),
        copies=st.sampled_from([False, False, True]),
    )
    def start(self, longest: int, always: int, queue: int, memory: int, *, copies: bool) -> None:
        self.patch.setattr(compaction, "_ALWAYS", always)
        self.folder = Path(mkdtemp(dir=self.folder))
        self.world = PagedWorld(
            self.stack,
            self.folder / "disk",
            longest=longest,
            queue=queue,
            memory=Size(memory, PLENTY),
            copies=copies,
            interval=10,
        )

    def pick(self, number: int) -> PagedSequence:
        sequence = self.world.sequences[number % len(self.world.sequences)]
        assert isinstance(sequence, PagedSequence)
        return sequence

    def has_open(self) -> bool:
        return bool(self.world.sequences)

    def has_closed(self) -> bool:
        return bool(self.world.closed)

    # -- requests ----------------------------------------------------------------------

    def begin(self, namespace: Namespace, prompt: list[int], at: int, reason: Reason) -> None:
        if len(self.world.sequences) == MAX_OPEN:
            self.world.sequences[0].close()
        self.world.begin(prompt, (at, reason), namespace=namespace)

    @rule(namespace=NAMESPACES, prompt=TOKENS, at=st.integers(0, 20), reason=REASONS)
    def begin_new(self, namespace: Namespace, prompt: list[int], at: int, reason: Reason) -> None:
        self.begin(namespace, prompt, at, reason)

    @precondition(has_closed)
    @rule(which=PICK, cut=st.integers(0, 30), more=TOKENS, reason=REASONS, fetch=st.booleans())
    def go_on(self, which: int, cut: int, more: list[int], reason: Reason, *, fetch: bool) -> None:
        """A conversation goes on, or another parts from it; its state may be on disk."""
        namespace, tokens = self.world.closed[-1 - which % len(self.world.closed)]
        prompt = [*tokens[: len(tokens) - cut // 3], *more]
        if fetch:
            self.world.fetch(prompt, namespace)
        self.begin(namespace, prompt, len(tokens), reason)

    @precondition(has_open)
    @rule(number=PICK, more=st.integers(1, 30), publish=st.booleans())
    def prefill(self, number: int, more: int, *, publish: bool) -> None:
        sequence = self.pick(number)
        sequence.prefill(len(sequence.state) + more)
        if publish:
            sequence.publish()

    @precondition(has_open)
    @rule(number=PICK, answer=TOKENS, times=st.sampled_from([0, 1, 1, 8]))
    def finish(self, number: int, answer: list[int], times: int) -> None:
        self.pick(number).prefill().decode(answer * times).finish()

    @precondition(has_open)
    @rule(number=PICK, fail=st.booleans())
    def cancel(self, number: int, *, fail: bool) -> None:
        self.pick(number).fail() if fail else self.pick(number).close()

    # -- memory ------------------------------------------------------------------------

    @rule(percent=st.integers(0, 100))
    def evict(self, percent: int) -> None:
        limit = self.world.cache.tries.size.nbytes * percent // 100
        with watched(self.world.cache, limit):
            self.world.cache.evict(limit)

    @rule(one=BOUNDS, other=BOUNDS)
    def bound(self, one: TenantBounds, other: TenantBounds) -> None:
        bound(self.world.cache, **{NAMESPACE.tenant: one, "b": other})

    @rule(nbytes=st.integers(0, 300))
    def make_room(self, nbytes: int) -> None:
        before = self.world.cache.tries.size.nbytes
        if not self.world.cache.pool.make_room(Size(nbytes)):
            assert self.world.cache.tries.size.nbytes == before

    @rule(share=st.sampled_from([0.25, 0.5, 1.0]))
    def shrink(self, share: float) -> None:
        self.world.cache.pool.shrink(share)

    # -- shared prompts ----------------------------------------------------------------

    @precondition(has_closed)
    @rule(which=PICK, cut=st.integers(1, 30), name=st.sampled_from("xy"))
    def share(self, which: int, cut: int, name: str) -> None:
        tokens = self.world.closed[-1 - which % len(self.world.closed)][1][:cut]
        self.world.serve([*tokens, 9], (), (len(tokens), Reason.SYSTEM), namespace=OPERATOR)
        with suppress(PinError):
            self.world.cache.pins.pin(SHARED, name, as_tokens(tokens))

    @rule(name=st.sampled_from("xy"))
    def share_no_more(self, name: str) -> None:
        self.world.cache.pins.unpin(SHARED, name)

    # -- the disk ----------------------------------------------------------------------

    @rule()
    def hand_over(self) -> None:
        self.world.pager.step()

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()

    @precondition(has_closed)
    @rule(which=PICK, more=TOKENS)
    def want(self, which: int, more: list[int]) -> None:
        namespace, tokens = self.world.closed[-1 - which % len(self.world.closed)]
        self.world.pager.page_in.request(namespace, as_tokens([*tokens, *more]))

    @rule(percent=st.integers(0, 100))
    def forget_persisted(self, percent: int) -> None:
        self.world.cache.pool.forget_persisted(self.world.cache.tries.files.nbytes * percent // 100)

    @rule(disk=st.sampled_from([200, 3000, PLENTY, PLENTY]))
    def resize_disk(self, disk: int) -> None:
        self.world.disk = self.world.pager.budget = disk

    @rule(count=st.integers(1, 3))
    def poison(self, count: int) -> None:
        self.world.codec.poisoned = count

    @rule(which=PICK, how=st.sampled_from(["flip", "truncate", "remove"]))
    def damage(self, which: int, how: str) -> None:
        assert self.world.tier.flush(TIMEOUT)
        while self.world.pager.page_in.ready:
            self.world.step()
        assert self.world.tier.flush(TIMEOUT)  # of what these steps removed, too
        names = sorted(self.world.tier.files())
        if names:
            self.damaged = True
            damage(self.world.tier.path_of(names[which % len(names)]), how)

    @rule(save=st.booleans())
    def restart(self, *, save: bool) -> None:
        world = self.world
        for sequence in list(world.sequences):
            sequence.close()
        if save:
            world.codec.poisoned = 0
            world.write_all()
        assert world.tier.flush(TIMEOUT)
        world.step()
        before = on_disk(world.cache)
        world.restart()
        if self.damaged:
            self.damaged = False
        else:
            assert all(has_on_disk(world.cache, path) for path in before)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        self.patch.undo()
        if not hasattr(self, "world"):
            return
        try:
            for sequence in list(self.world.sequences):
                sequence.close()
            self.world.finish()
        finally:
            self.world.close_tier()
            rmtree(self.folder)


def test_any_order_of_operations(
    stack: Stack, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_out, "_REST", 0.0, raising=False)
    folder.mkdir()

    class OverThisStack(PagerMachine):
        def __init__(self) -> None:
            super().__init__(stack, folder)

    run_state_machine_as_test(
        OverThisStack,
        settings=settings(
            max_examples=int(os.environ.get("PAGER_EXAMPLES", "40")),
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate] if os.environ.get("PAGER_FAST") else tuple(Phase),
            suppress_health_check=list(HealthCheck),
        ),
    )
