"""Steps that memory allows, and sequences that it lets start."""

from collections.abc import Iterable
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.ledger import Kind, Size
from umbel.cachestore.restoration import Known
from umbel.models.memory_profile import Held
from umbel.scheduler.memory import MemoryPlanner
from umbel.scheduler.policy import Batch, Call, ChunkSize, plan
from umbel.scheduler.sequence import Sequence
from umbel.scheduler.statistics import MemoryUse

from ..cachestore.fakes import (
    HYBRID,
    KV,
    NAMESPACE,
    RECURRENT_BYTES,
    World,
    conversation,
)
from ..fakes import FakePlan, FakeRunner, FakeState, make_request

EACH = 4
"""Bytes of a token that is kept, here and in the cache."""

NOTHING_KNOWN = Known(0, 0, Size())


class Figures(FakeRunner):
    """Estimates that can be told apart."""

    def held_by(self, caches: Iterable[FakeState]) -> Held:
        """Its tokens, in two allocations each."""
        lengths = [len(state.tokens) for state in caches]
        return Held(EACH * sum(lengths), 2 * len(lengths))

    def kept(self, tokens: int) -> int:
        """As in the cache."""
        return EACH * tokens

    def start(self, tokens: int, context: int) -> Held:
        """Bytes that are left, a byte for each token in view, and learned bytes of steps."""
        return Held(EACH * tokens + context + 50, 4)

    def worst_case(self, context: int) -> Held:
        """The same for all of it, before anything was learned."""
        return Held((EACH + 1) * context + 10, 4)

    def chunk_need(self, tokens: int, states: FakeState) -> Held:
        """Ten bytes a token, and one for each before it."""
        return Held(10 * tokens + len(states.tokens), 4)

    def step_need(self, states: list[FakeState]) -> Held:
        """A hundred bytes each."""
        return Held(100 * len(states), 1)


def end_of(batch: Batch) -> int:
    """Where the batch's chunk ends."""
    assert batch.prefill is not None
    assert batch.prefill.end is not None
    return batch.prefill.end


class PlannerFixture:
    """A planner over a budget of 1,600 bytes, unless told otherwise; 1,500 may be held.

    Attributes:
        others: bytes held elsewhere.
    """

    def __init__(
        self,
        world: World | None = None,
        *,
        nbytes: int = 1600,
        buffers: int = 1000,
    ) -> None:
        self.world = world or World(KV)
        self.world.cache.pool.resize(Size(nbytes, buffers))
        self.pool = self.world.cache.pool
        self.ledger = self.pool.ledger
        self.others = self.ledger.account(Kind.PAGING)
        self.runner = Figures()
        self.planner = MemoryPlanner(self.pool, cast("Any", self.runner))

    def afford(self, running: list[Sequence], chunk: int, *, grid: int = 1) -> Batch | None:
        """Say what the planner lets a step compute."""
        size = ChunkSize(chunk, grid=grid)
        step = self.planner.afford(running, size, {each: state_of(each) for each in running})
        return None if step is None else step.batch

    def leave(self, nbytes: int) -> None:
        """Fill the budget up to so many bytes, after the last step."""
        self.planner.release()
        self.others.close()
        held = self.pool.room.nbytes - nbytes
        assert held >= 0
        self.others.set(Size(held))

    @property
    def aside(self) -> int:
        """Bytes that are set aside."""
        return self.ledger.held(Kind.TRANSIENT).nbytes

    def known(self, sequence: Sequence) -> Known:
        """Cached state of a sequence."""
        return self.world.cache.known(NAMESPACE, sequence.tokens)


def sequence(prompt: int, computed: int = 0, *, seed: int = 0) -> Sequence:
    """Build a sequence that runs and has come this far."""
    made = Sequence(make_request(f"r{seed}", list(conversation(seed, prompt))))
    made.num_computed_tokens = computed
    return made


def state_of(sequence: Sequence) -> Any:
    """State of a sequence in the model."""
    return FakeState([7] * sequence.num_computed_tokens)


def decoding(seed: int = 1) -> Sequence:
    """Build a sequence that is past its prompt."""
    return sequence(3, 5, seed=seed)


class TestChunks:
    """How much of a prompt is computed at once."""

    def test_what_fits_is_not_cut(self) -> None:
        """With room for a whole chunk and all decodes, all of it is computed."""
        fixture, running = PlannerFixture(), [decoding(1), sequence(500), decoding(2)]
        fixture.leave(1280 + 200)
        assert fixture.afford(running, 128) == plan(running, ChunkSize(128))
        assert fixture.aside == 1280 + 200

    @pytest.mark.parametrize(
        ("room", "end"), [(1279, 64), (640, 64), (639, 32), (320, 32), (319, 16), (160, 16)]
    )
    def test_a_chunk_is_cut_to_what_fits(self, room: int, end: int) -> None:
        """By halves, as far as need be, and no further."""
        fixture, alone = PlannerFixture(), sequence(500)
        fixture.leave(room)
        batch = fixture.afford([alone], 128)
        assert batch is not None
        assert batch.prefill == Call((alone,), end)
        assert fixture.aside == 10 * end

    def test_below_the_least_chunk_nothing_is_prefilled(self) -> None:
        fixture = PlannerFixture()
        fixture.leave(159)
        assert fixture.afford([sequence(500)], 128) is None
        assert fixture.aside == 0
        assert fixture.afford([sequence(15)], 128) is not None, "15 tokens are all it needs"

    def test_a_restored_prompt_is_cut_by_halves(self) -> None:
        """From where it was restored."""
        fixture, alone = PlannerFixture(), sequence(500, 70)
        for room, end in ((1350, 198), (1349, 134), (710, 134), (709, 102)):
            fixture.leave(room)
            batch = fixture.afford([alone], 128)
            assert batch is not None
            assert batch.prefill == Call((alone,), end)

    def test_a_chunk_is_cut_for_those_that_decode(self) -> None:
        """They all go on; the prompt gets what they leave."""
        fixture, long = PlannerFixture(), sequence(500)
        running = [long, *[decoding(seed) for seed in (1, 2, 3)]]
        fixture.leave(300 + 320)
        batch = fixture.afford(running, 128)
        assert batch is not None
        assert batch.calls == (Call(tuple(running[1:])), Call((long,), 32))

    @given(
        prompt=st.integers(2, 400),
        computed=st.integers(0, 398),
        chunk=st.sampled_from([8, 16, 48, 64, 100, 128]),
        room=st.integers(0, 1500),
        decodes=st.integers(0, 4),
        fixed=st.booleans(),
    )
    def test_the_most_that_fits_is_computed(
        self, prompt: int, computed: int, chunk: int, room: int, decodes: int, *, fixed: bool
    ) -> None:
        """Nothing over the room is set aside, and there was none for the next larger chunk."""
        fixture, long = PlannerFixture(), sequence(prompt, min(computed, prompt - 2))
        grid = chunk if fixed else 1
        running = [long, *[decoding(seed) for seed in range(1, decodes + 1)]]
        fixture.leave(room)
        batch = fixture.afford(running, chunk, grid=grid)
        seen = long.num_computed_tokens

        def cost(end: int) -> int:
            return 10 * (end - seen) + seen + 100 * decodes

        sizes = [chunk]
        while not fixed and sizes[-1] // 2 >= 16:
            sizes.append(sizes[-1] // 2)
        ends = [end_of(plan([long], ChunkSize(size, grid=grid))) for size in sizes]
        fitting = [end for end in ends if cost(end) <= room]
        if batch is None:
            assert not fitting
            assert fixture.aside == 0
            assert decodes == 0 or room < 100 * decodes
        else:
            assert batch.decode == (Call(tuple(running[1:])) if decodes else None)
            assert batch.prefill == (Call((long,), fitting[0]) if fitting else None)
            assert fixture.aside == (cost(fitting[0]) if fitting else 100 * decodes) <= room

    def test_fixed_chunks_are_held_instead(self) -> None:
        """Where a chunk must be whole it waits, however little is missing."""
        fixture, long, live = PlannerFixture(), sequence(500), decoding()
        fixture.leave(1279 + 100)
        batch = fixture.afford([long, live], 128, grid=128)
        assert batch is not None
        assert batch.calls == (Call((live,)),)
        assert fixture.aside == 100
        assert fixture.afford([long], 128, grid=128) is not None, "alone it fits"
        fixture.leave(1279)
        assert fixture.afford([long], 128, grid=128) is None
        assert fixture.aside == 0


class TestHolding:
    """Priorities where memory is short."""

    def test_decodes_go_on_without_the_prefill(self) -> None:
        """Where only they fit, the prompt waits for its turn."""
        fixture, live = PlannerFixture(), [decoding(1), decoding(2)]
        fixture.leave(200 + 159)
        batch = fixture.afford([live[0], sequence(500), live[1]], 128)
        assert batch is not None
        assert batch == Batch(Call(tuple(live)))
        assert fixture.aside == 200

    @pytest.mark.parametrize(("room", "coming"), [(400, 1), (399, 0)])
    def test_rows_for_those_who_come_must_fit(
        self, room: int, coming: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fixture, running = PlannerFixture(), [decoding(1), sequence(20)]
        cost = fixture.runner.cost

        def with_rows(plan: FakePlan) -> Held:
            nbytes, buffers = cost(plan)
            return Held(nbytes + 100 * plan.coming, buffers)

        monkeypatch.setattr(fixture.runner, "cost", with_rows)
        fixture.leave(room)
        caches = {each: state_of(each) for each in running}
        step = fixture.planner.afford(running, ChunkSize(128), caches)
        assert step is not None
        planned: Any = step.plan
        assert (planned.coming, planned.may_copy) == (coming, True)
        assert end_of(step.batch) == 20
        assert fixture.aside == 300 + 100 * coming

    @pytest.mark.parametrize("prompts", [[], [500]])
    def test_a_sequence_must_be_preempted(self, prompts: list[int]) -> None:
        """One decode too many: none of them is computed, and nothing is set aside."""
        fixture = PlannerFixture()
        running = [*map(sequence, prompts), *[decoding(seed) for seed in (1, 2, 3)]]
        fixture.leave(299)
        assert fixture.afford(running, 128) is None
        assert fixture.aside == 0
        assert fixture.afford(running[:-1], 128) is not None

    def test_allocations_are_short_too(self) -> None:
        """Bytes for a chunk are of no use where it has too many arrays."""
        fixture, live = PlannerFixture(buffers=4), decoding()
        batch = fixture.afford([sequence(500), live], 128)
        assert batch is not None
        assert batch.calls == (Call((live,)),)
        assert PlannerFixture(buffers=0).afford([live], 128) is None

    def test_the_cache_goes_before_a_chunk_is_cut(self) -> None:
        fixture = PlannerFixture()
        fixture.world.serve(conversation(5, 300))
        batch = fixture.afford([sequence(500)], 128)
        assert batch is not None
        assert end_of(batch) == 128
        assert fixture.world.cache.tries.size.nbytes <= 1500 - 1280
        fixture.world.check()

    def test_what_is_leased_stays_and_the_chunk_is_cut(self) -> None:
        """And where even that is of no use, nothing is evicted in vain."""
        fixture = PlannerFixture()
        fixture.world.serve(conversation(5, 200))
        fixture.world.serve(conversation(6, 50))
        lease = fixture.world.begin(conversation(5, 201))
        batch = fixture.afford([sequence(500)], 128)
        assert batch is not None
        assert end_of(batch) == 64
        assert fixture.world.cache.tries.size.nbytes >= 4 * 200
        fixture.planner.release()
        held = fixture.world.cache.tries.size.nbytes
        assert held > 4 * 200, "no more was evicted than is needed"
        assert fixture.afford([decoding(seed) for seed in range(1, 9)], 128) is None
        assert fixture.world.cache.tries.size.nbytes == held
        lease.fail()


class TestLedger:
    """Reservations, and their release."""

    def test_a_step_is_entered_until_the_next(self) -> None:
        """Each step's need takes the place of the last one's; settling gives it back."""
        fixture, running = PlannerFixture(), [sequence(500), decoding()]
        assert fixture.afford(running, 64) is not None
        assert fixture.ledger.held(Kind.TRANSIENT) == Size(740, 5)
        assert fixture.afford(running[1:], 64) is not None
        assert fixture.ledger.held(Kind.TRANSIENT) == Size(100, 1)
        assert fixture.ledger.total == Size(100, 1)
        fixture.planner.release()
        fixture.planner.release()
        assert fixture.ledger.total == Size()

    def test_what_one_step_took_is_room_for_the_next(self) -> None:
        """A step of the whole budget can be followed by another, however often."""
        fixture = PlannerFixture()
        running = [decoding(seed) for seed in range(1, 16)]
        for _ in range(3):
            assert fixture.afford(running, 64) is not None
            assert fixture.aside == 1500
        assert fixture.afford([*running, decoding(16)], 64) is None
        assert fixture.aside == 0, "the last step's is not kept either"

    def test_tails_are_entered_anew(self) -> None:
        """Those that run, with what they have by now."""
        fixture = PlannerFixture()
        first, second = state_of(sequence(500, 40)), state_of(sequence(500, 25))
        fixture.planner.record([first, second])
        assert fixture.ledger.held(Kind.TAIL) == Size(EACH * 65, 4)
        first.tokens.append(1)
        fixture.planner.record([first])
        assert fixture.ledger.held(Kind.TAIL) == Size(EACH * 41, 2)
        fixture.planner.record([])
        assert fixture.ledger.total == Size()

    def test_tails_leave_less_for_a_step(self) -> None:
        fixture, alone = PlannerFixture(), sequence(500, 200)
        batch = fixture.afford([alone], 128)
        assert batch is not None
        assert end_of(batch) == 328
        fixture.planner.record([state_of(alone)])
        batch = fixture.afford([alone], 128)
        assert batch is not None
        assert end_of(batch) == 232


class TestStart:
    """Sequences that may start beside others."""

    def test_alone_it_needs_what_was_promised(self) -> None:
        """To the byte, though more was learned since; nothing is entered for the question."""
        fixture, new_request = PlannerFixture(), sequence(100)
        assert fixture.planner.needed(new_request) == 510
        for room, admitted in ((510, True), (509, False)):
            fixture.leave(room)
            assert fixture.planner.admits(new_request, NOTHING_KNOWN, []) == admitted
            assert fixture.pool.room.nbytes == room

    def test_room_for_those_that_run_is_left(self) -> None:
        """Each has the rest of its prompt to compute, and 256 tokens of an answer."""
        fixture, new_request = PlannerFixture(), sequence(20)
        running = [sequence(31, 10, seed=1)]
        need = (20 * EACH + 20 + 50) + EACH * (21 + 256)
        for room, admitted in ((need, True), (need - 1, False)):
            fixture.leave(room)
            assert fixture.planner.admits(new_request, NOTHING_KNOWN, running) == admitted
        fixture.leave(1400)
        assert fixture.planner.admits(new_request, NOTHING_KNOWN, [decoding(1)])
        assert not fixture.planner.admits(new_request, NOTHING_KNOWN, [decoding(1), decoding(2)])

    def test_what_is_known_need_not_be_computed(self) -> None:
        """Leased by another it is free; else it must stay, and is no room any more."""
        fixture, prompt = PlannerFixture(nbytes=3200), conversation(0, 201)
        fixture.world.serve(prompt[:200])
        new_request, others = sequence(201), [decoding()]
        fixture.leave(EACH + 201 + 50 + EACH * 256)
        assert fixture.known(new_request) == Known(200, 200, Size(800, 2))
        assert fixture.planner.admits(new_request, fixture.known(new_request), others)
        fixture.others.add(Size(1))
        assert not fixture.planner.admits(new_request, fixture.known(new_request), others)
        fixture.others.add(Size(-1))
        lease = fixture.world.begin(prompt)
        assert fixture.known(new_request) == Known(200, 200, Size())
        assert fixture.planner.admits(new_request, fixture.known(new_request), others)
        lease.fail()

    def test_what_is_recognised_but_not_restored_is_computed(self) -> None:
        """Tokens after the last checkpoint spare nothing."""
        fixture, new_request = PlannerFixture(nbytes=3200), sequence(201)
        known = Known(200, 120, Size(60))
        need = EACH * 81 + 201 + 50 + 60 + EACH * 256
        for room, admitted in ((need, True), (need - 1, False)):
            fixture.leave(room)
            assert fixture.planner.admits(new_request, known, [decoding()]) == admitted

    def test_what_could_be_evicted_is_room(self) -> None:
        """It is not evicted yet: that is for who really needs it."""
        fixture = PlannerFixture()
        fixture.world.serve(conversation(5, 300))
        assert fixture.planner.admits(sequence(200), NOTHING_KNOWN, [])
        assert fixture.world.cache.tries.size.nbytes == 1200

    def test_what_is_known_goes_for_who_would_be_alone(self) -> None:
        fixture, prompt = PlannerFixture(), conversation(0, 240)
        fixture.world.serve(prompt[:220])
        new_request = sequence(240)
        known = fixture.known(new_request)
        assert known.cached == 220
        fixture.others.set(Size(1500 - 1210))
        assert not fixture.planner.admits(new_request, known, [decoding()])
        assert fixture.world.cache.tries.size.nbytes == 880
        assert fixture.planner.admits(new_request, known, [])
        assert fixture.world.cache.tries.size.nbytes == 880, "a question evicts nothing"
        assert fixture.planner.make_room(new_request, known)
        assert fixture.world.cache.tries.size.nbytes == 0
        assert fixture.pool.room.nbytes >= fixture.planner.needed(new_request)

    def test_allocations_count(self) -> None:
        """A start needs four arrays."""
        for buffers, admitted in ((4, True), (3, False)):
            fixture = PlannerFixture(buffers=buffers)
            assert fixture.planner.admits(sequence(10), NOTHING_KNOWN, []) == admitted


class TestFigures:
    """Statistics of memory."""

    def test_needed_is_the_promise(self) -> None:
        """For the prompt, and after a preemption for the answer too; nothing is known of it."""
        fixture, preempted = PlannerFixture(), sequence(100)
        fixture.world.serve(conversation(0, 100))
        assert fixture.planner.needed(preempted) == (EACH + 1) * 100 + 10
        preempted.output = [1] * 30
        preempted.preempt(replay=False)
        assert fixture.planner.needed(preempted) == (EACH + 1) * 130 + 10

    def test_who_needs_more_than_is_usable_cannot_start(self) -> None:
        """And who needs no more can, whatever is cached."""
        fixture = PlannerFixture()
        for length in range(290, 310):
            fixture.world.serve(conversation(5, 300))
            new_request = sequence(length, seed=length)
            served = fixture.planner.needed(new_request) <= fixture.planner.usable
            assert served == (length <= 298)
            assert fixture.planner.admits(new_request, fixture.known(new_request), []) == served

    def test_what_is_usable_follows_the_budget(self) -> None:
        """Under pressure it is less; what is kept for a copy never shrinks."""
        fixture = PlannerFixture()
        assert (fixture.planner.use().budget, fixture.planner.usable) == (1600, 1500)
        fixture.others.set(Size(1200))
        fixture.pool.shrink(0.5)
        assert (fixture.planner.use().budget, fixture.planner.usable) == (600, 500)
        assert fixture.planner.use().budget == 600
        fixture.pool.shrink(1.0)
        assert (fixture.planner.use().budget, fixture.planner.usable) == (1600, 1500)

    def test_the_report_names_every_kind(self) -> None:
        """Its figures are the ledger's, each under its own name, and there are no others."""
        fixture = PlannerFixture(World(HYBRID))
        assert fixture.planner.use() == MemoryUse(budget=1600)
        fixture.world.serve(conversation(5, 90))
        lease = fixture.world.begin(conversation(6, 60))
        lease.prefill().capture(next(iter(Reason)))
        fixture.others.set(Size(3, 1))
        fixture.planner.record([state_of(sequence(500, 20))])
        assert fixture.afford([decoding()], 64) is not None
        report = fixture.planner.use()
        assert report == MemoryUse(
            budget=1600,
            kv=EACH * 90,
            checkpoint=2 * RECURRENT_BYTES,
            tail=EACH * 20,
            paging=3,
            transient=100,
            buffers=fixture.ledger.total.buffers,
        )
        assert report.buffers >= 2 + 2 + 2 + 1 + 1
        told = {kind.value: getattr(report, kind.value) for kind in Kind}
        assert sum(told.values()) == fixture.ledger.total.nbytes
        lease.fail()


def test_none_starts_beside_as_many_as_one_did_not_fit_beside() -> None:
    """It would cost them time and be preempted at once; with more room, or fewer, it starts."""
    fixture, new_request = PlannerFixture(nbytes=8000), sequence(20)
    running = [decoding(1), decoding(2)]

    def admitted(beside: list[Sequence]) -> bool:
        return fixture.planner.admits(new_request, NOTHING_KNOWN, beside)

    assert admitted(running)
    fixture.planner.note_preemption(running)
    assert not admitted(running)
    assert not admitted([*running, decoding(3)])
    assert admitted(running[:1])
    assert admitted([])
    fixture.pool.resize(Size(8100, 1000))
    assert admitted(running)


class TestRestart:
    """A lone sequence that does not fit gives its state up where it fits without."""

    def test_one_that_fits_from_its_start(self) -> None:
        """Its worst case is within what may be held, whatever its batch holds."""
        fixture = PlannerFixture()
        for prompt, fits in ((200, True), (298, True), (299, False)):
            assert fixture.planner.may_restart(sequence(prompt, 5)) == fits

    def test_what_it_answered_counts(self) -> None:
        """It is computed again, too."""
        fixture, alone = PlannerFixture(), sequence(290, 290)
        assert fixture.planner.may_restart(alone)
        alone.output.extend(range(9))
        assert not fixture.planner.may_restart(alone)

    def test_one_that_came_no_further_is_not_tried_again(self) -> None:
        """It would do so for ever."""
        fixture, alone = PlannerFixture(), sequence(100, 50)
        assert fixture.planner.may_restart(alone)
        for computed, again in ((0, False), (50, False), (51, True)):
            alone.preempt(replay=False)
            alone.num_computed_tokens = computed
            assert fixture.planner.may_restart(alone) == again
            alone.num_computed_tokens = min(computed, 50)
