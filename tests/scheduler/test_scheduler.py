"""Sequences that run, are preempted and may start, in any order of events."""

import weakref
from itertools import pairwise
from typing import Any, NamedTuple, cast

import msgspec
import pytest

from umbel.scheduler.kv_cache_manager import Awaited
from umbel.scheduler.order import Policy, Priority
from umbel.scheduler.policy import LAG
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.scheduler import _GAP, READ_AHEAD, Ranking, Scheduler, Selection
from umbel.scheduler.sequence import Sequence, SequenceStatus

from ..fakes import make_request


class Cache:
    """what the scheduler asks of the cache's side.

    Attributes:
        on_disk: conversations whose state is being read.
        behind: conversations whose prompt another one is just prefilling.
        spared: tokens of each prompt that are not in the cache.
    """

    def __init__(self) -> None:
        self.on_disk: set[str] = set()
        self.behind: set[str] = set()
        self.spared = 0
        self.paging = self

    def is_on_disk(self, sequence: Sequence) -> bool:
        """Return True if its state is on disk, or being read."""
        return sequence.request.conversation in self.on_disk

    def awaited(self, sequence: Sequence, running: list[Sequence]) -> Awaited | None:
        """Return its beginning if another one, that runs, prefills it."""
        behind = bool(running) and sequence.request.conversation in self.behind
        return Awaited(running[0], 10) if behind else None

    def known(self, sequence: Sequence) -> "Known":
        """All of a prompt is known, so that none is charged and they keep their order."""
        return Known(sequence.request.id, len(sequence.tokens) - 1 - self.spared)


class Known(NamedTuple):
    """Cached tokens by sequence."""

    request: str
    cached: int


class Memory:
    """Memory that holds so many tokens of prompts.

    Attributes:
        room: tokens, of all that run.
        asked: who wanted to start, in order.
    """

    def __init__(self, room: int = 1 << 20) -> None:
        self.room = room
        self.asked: list[str] = []

    def admits(self, sequence: Sequence, known: Known, running: list[Sequence]) -> bool:
        """True if there is room beside running sequences."""
        assert known.request == sequence.request.id
        assert sequence not in running
        self.asked.append(sequence.request.id)
        return sum(len(each.tokens) for each in [*running, sequence]) <= self.room


class SchedulerFixture:
    """A scheduler between a real queue and fakes. Each prompt has ten tokens."""

    def __init__(self, max_batch: int = 8, room: int = 1 << 20) -> None:
        self.cache, self.memory = Cache(), Memory(room)
        self.queue = ConversationQueue(1000)
        self.scheduler = Scheduler(
            self.queue, cast("Any", self.cache), cast("Any", self.memory), max_batch
        )
        self.last = Selection()

    def put(self, *names: str, tenant: str = "t", **more: Any) -> list[Sequence]:
        """Queue requests, each in a conversation of its own unless told otherwise."""
        of_order = {key: more.pop(key) for key in ("unit", "parallel") if key in more}
        requests = [make_request(name, [1] * 10, tenant=tenant, **more) for name in names]
        made = [Sequence(msgspec.structs.replace(each, **of_order)) for each in requests]
        for each in made:
            self.queue.put(each)
        return made

    def start_one(self, ranking: Ranking | None = None) -> Sequence | None:
        """Start the next one, as the engine does."""
        while True:
            ranking = ranking or self.scheduler.ranking()
            found = self.last = self.scheduler.next_start(ranking, self.last.reserved_for)
            started = found.start
            if started is None or self.scheduler.start(started, cast("Any", self.known(started))):
                return started

    def known(self, sequence: Sequence) -> "Known":
        """Look a sequence up."""
        return self.cache.known(sequence)

    def start(self) -> list[str]:
        """Start all that may."""
        self.scheduler.charge()
        ranking, started = self.scheduler.ranking(), list[Sequence]()
        while (sequence := self.start_one(ranking)) is not None:
            started.append(sequence)
        return names_of(started)

    def stuck(self) -> Sequence | None:
        """Take out the one that can never start."""
        return self.scheduler.take_stuck(self.last.short)

    def yielding(self) -> Sequence | None:
        """Return the one that yields, for another that starts next."""
        if not self.scheduler.may_yield(self.last):
            return None
        self.scheduler.charge()
        found = self.scheduler.next_to_yield(self.scheduler.ranking())
        self.last = self.last._replace(reserved_for=found.claimant or self.last.reserved_for)
        return found.victim

    @property
    def running(self) -> list[str]:
        """Running sequences, in order."""
        return names_of(self.scheduler.running)

    @property
    def preempted(self) -> list[str]:
        """Preempted sequences, in order."""
        return names_of(self.scheduler.preempted)


def service_of(fixture: SchedulerFixture, tenant: str) -> float:
    """Tokens per weight that a tenant was charged."""
    return fixture.queue._order.share(tenant).service


def names_of(sequences: list[Sequence]) -> list[str]:
    """The ids of some requests."""
    return [sequence.request.id for sequence in sequences]


class TestStarting:
    """The way in."""

    def test_they_start_in_their_order_and_no_more_than_may(self) -> None:
        """A place that becomes free is the next one's."""
        fixture = SchedulerFixture(max_batch=2)
        a, *_ = fixture.put("a", "b", "c", "d")
        assert fixture.start() == fixture.running == ["a", "b"]
        assert fixture.start() == []
        fixture.scheduler.remove(a)
        assert fixture.start() == ["c"]
        assert fixture.running == ["b", "c"]
        assert len(fixture.queue) == 1

    @pytest.mark.parametrize("resumed", [False, True])
    def test_who_started_last_is_not_kept(self, *, resumed: bool) -> None:
        fixture = SchedulerFixture(max_batch=1)
        (sequence,) = fixture.put("a")
        assert fixture.start() == ["a"]
        if resumed:
            fixture.scheduler.preempt(sequence)
            assert fixture.start() == ["a"]
        gone = weakref.ref(sequence)
        fixture.scheduler.remove(sequence)
        del sequence
        assert gone() is None

    def test_the_cache_is_asked_once_for_the_order_of_those_who_start(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fixture, asked = SchedulerFixture(max_batch=64), list[str]()
        cached = dict[str, int]()

        def known(sequence: Sequence) -> Known:
            name = sequence.request.id
            asked.append(name)
            return Known(name, cached.get(name, 0))

        monkeypatch.setattr(fixture.cache, "known", known)
        names = [f"r{n}" for n in range(12)]
        fixture.put(*names)
        assert fixture.start() == names
        assert all(asked.count(name) <= 3 for name in names), "order, whether it can start, charge"
        fixture.put("a", "b")
        assert fixture.start_one() is not None
        cached["d"] = 1 << 10
        fixture.put("c", "d")
        assert fixture.start()[0] == "d"

    def test_the_queue_is_free_while_they_are_looked_at(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others put and cancel meanwhile, and who is cancelled then does not start."""
        fixture = SchedulerFixture()
        fixture.put("a", "b")

        def cancel_the_first(sequence: Sequence, _running: list[Sequence]) -> None:
            assert not fixture.queue._lock.locked()
            if sequence.request.id == "a":
                fixture.queue.remove("a")

        monkeypatch.setattr(fixture.cache, "awaited", cancel_the_first)
        assert fixture.start() == fixture.running == ["b"]

    def test_a_conversation_runs_one_request_at_a_time(self) -> None:
        """Its next one starts when the first has ended, and not while that is preempted."""
        fixture = SchedulerFixture()
        first, _ = fixture.put("a1", "a2", conversation="a")
        (other,) = fixture.put("b")
        assert fixture.start() == ["a1", "b"]
        fixture.scheduler.preempt(other)
        fixture.scheduler.preempt(first)
        fixture.memory.room = 5
        assert fixture.start() == []
        assert fixture.memory.asked[-1] == "a1"
        fixture.scheduler.remove(first)
        fixture.memory.room = 100
        assert fixture.start() == ["b", "a2"]

    def test_nobody_overtakes_who_lacks_memory(self) -> None:
        """Those after it are not even asked for."""
        fixture = SchedulerFixture(room=25)
        a, *_ = fixture.put("a", "b", "c", "d")
        assert fixture.start() == ["a", "b"]
        assert fixture.memory.asked == ["a", "b", "c"]
        fixture.memory.room = 10
        fixture.scheduler.remove(a)
        assert fixture.start() == []
        fixture.memory.room = 30
        assert fixture.start() == ["c", "d"]

    def test_who_waits_for_the_disk_does_not_hold_up_others(self) -> None:
        fixture = SchedulerFixture()
        fixture.cache.on_disk = {"a", "c"}
        fixture.put("a", "b", "c", "d")
        assert fixture.start() == ["b", "d"]
        assert fixture.last.reads
        fixture.cache.on_disk = {"c"}
        assert fixture.start() == ["a"]
        assert fixture.last.reads
        fixture.cache.on_disk = set()
        assert fixture.start() == ["c"]
        assert fixture.start() == []
        assert not fixture.last.reads
        assert fixture.running == ["b", "d", "a", "c"]

    def test_only_the_first_are_read_ahead(self) -> None:
        fixture = SchedulerFixture()
        names = [f"r{number}" for number in range(READ_AHEAD)]
        fixture.cache.on_disk = set(names)
        fixture.put(*names, "last")
        assert fixture.start() == []
        assert fixture.memory.asked == []
        fixture.cache.on_disk.remove(names[-1])
        assert fixture.start() == [names[-1], "last"]

    def test_who_waits_for_anothers_prefill_does_not_hold_up_others(self) -> None:
        """Nor is its state read from disk meanwhile, nor memory asked for it."""
        fixture = SchedulerFixture()
        fixture.cache.behind = fixture.cache.on_disk = {"b"}
        fixture.put("a", "b", "c")
        assert fixture.start() == ["a", "c"]
        assert not fixture.last.reads
        assert "b" not in fixture.memory.asked
        fixture.cache.behind = set()
        assert fixture.start() == []
        assert fixture.last.reads

    def test_who_lacks_memory_holds_up_those_that_wait_for_the_disk(self) -> None:
        fixture = SchedulerFixture(room=5)
        fixture.cache.on_disk = {"b"}
        fixture.put("a", "b")
        assert fixture.start() == []
        assert not fixture.last.reads


class TestPreempting:
    """Out, and in again."""

    def test_of_the_preempted_the_oldest_resumes_first(self) -> None:
        """Before any that waits, in the order in which they first started."""
        fixture = SchedulerFixture(max_batch=4)
        fixture.put("a", "b", "c", "d", "e")
        fixture.start()
        for left in (["a", "b", "c"], ["a", "b"], ["a"]):
            youngest = fixture.scheduler.running[-1]
            fixture.scheduler.preempt(youngest)
            assert fixture.running == left
            assert youngest in fixture.scheduler
        assert fixture.preempted == ["b", "c", "d"]
        assert fixture.start() == ["b", "c", "d"]
        assert fixture.running == ["a", "b", "c", "d"]
        assert fixture.preempted == []
        assert fixture.start() == []

    @pytest.mark.parametrize("reason", ["memory", "disk", "prefill"])
    def test_nobody_starts_while_somebody_is_preempted(self, reason: str) -> None:
        """Whatever it waits for: it was first."""
        fixture = SchedulerFixture(room=100)
        fixture.put("a", "b", "c")
        fixture.start_one()
        b = fixture.start_one()
        assert b is not None
        fixture.scheduler.preempt(b)
        fixture.memory.room = 10 if reason == "memory" else 100
        fixture.cache.on_disk = {"b"} if reason == "disk" else set()
        fixture.cache.behind = {"b"} if reason == "prefill" else set()
        assert fixture.start() == []
        assert "c" not in fixture.memory.asked
        assert fixture.last.reads == (reason == "disk")
        fixture.memory.room, fixture.cache.on_disk, fixture.cache.behind = 100, set(), set()
        assert fixture.start() == ["b", "c"]


class TestYielding:
    """Slots of a full batch, between tenants."""

    @staticmethod
    def crowd(count: int = 4, **more: Any) -> tuple[SchedulerFixture, list[Sequence]]:
        """Fill the batch with one tenant's decoding sequences, while more of them wait."""
        fixture = SchedulerFixture(max_batch=count, **more)
        made = fixture.put(*[f"a{n}" for n in range(2 * count)], tenant="a")
        assert len(fixture.start()) == count
        for each in made[:count]:
            each.status, each.num_computed_tokens = SequenceStatus.DECODE, 10
        return fixture, made

    @staticmethod
    def give(fixture: SchedulerFixture) -> tuple[str, list[str]]:
        """Make one yield, as the engine does; returns it, and the sequence that starts for it."""
        sequence = fixture.yielding()
        assert sequence is not None
        sequence.preempt(replay=False)
        fixture.scheduler.put_back(sequence)
        return sequence.request.id, fixture.start()

    def test_a_tenant_that_comes_gets_its_part(self) -> None:
        """A slot after the other, the youngest's; half of them, for two tenants of one weight."""
        fixture, _ = self.crowd()
        assert fixture.yielding() is None
        fixture.put("b0", "b1", "b2", tenant="b")
        assert self.give(fixture) == ("a3", ["b0"])
        assert self.give(fixture) == ("a2", ["b1"])
        assert fixture.yielding() is None
        assert fixture.running == ["a0", "a1", "b0", "b1"]
        assert fixture.preempted == []

    def test_who_yielded_goes_on_in_its_place(self) -> None:
        """Before what came after it, once there is a slot for its tenant again."""
        fixture, made = self.crowd()
        (b,) = fixture.put("b0", tenant="b")
        self.give(fixture)
        fixture.scheduler.remove(b)
        assert fixture.start() == ["a3"]
        fixture.scheduler.remove(made[0])
        assert fixture.start() == ["a4"]

    def test_prompts_come_by_their_tenants_slots(self) -> None:
        """Until others' were computed for long; nothing of tenants without prompts is kept."""
        fixture, made = self.crowd()
        (b,) = fixture.put("b0", tenant="b")
        self.give(fixture)
        made[2].num_computed_tokens = 4
        assert fixture.scheduler.prompt_precedence() == {"a": 3, "b": 1}
        fixture.scheduler.advance_prompt(b, 2 * LAG)
        b.num_computed_tokens = 0
        assert fixture.scheduler.prompt_precedence() == {"a": -LAG, "b": 1}
        made[2].num_computed_tokens = b.num_computed_tokens = 10
        assert fixture.scheduler.prompt_precedence() == {}
        made[2].num_computed_tokens = b.num_computed_tokens = 4
        assert fixture.scheduler.prompt_precedence() == {"a": 3, "b": 1}

    def test_what_it_was_given_is_charged_once(self) -> None:
        """Its prompt when it first starts, and each token of its answer."""
        fixture, made = self.crowd()
        fixture.cache.spared = 4
        (b,) = fixture.put("b0", tenant="b")
        before = service_of(fixture, "a")
        made[3].output, made[3].num_computed_tokens = [1, 2, 3], 13
        assert self.give(fixture) == ("a3", ["b0"])
        assert service_of(fixture, "a") == before + 3
        assert service_of(fixture, "b") == before + 3 + 5, "it started as a stood"
        fixture.scheduler.remove(b)
        assert fixture.start() == ["a3"]
        assert service_of(fixture, "a") == before + 3

    def test_what_is_restored_is_charged_by_its_bytes(self) -> None:
        """As many as the weights have cost as much as a decoded token."""
        fixture = SchedulerFixture()
        fixture.scheduler._token_bytes = 500
        (a,) = fixture.put("a0", tenant="a")
        a.bill.restored_bytes = 1000
        fixture.start()
        a.bill.restored_bytes += 250
        fixture.scheduler.remove(a)
        assert service_of(fixture, "a") == 2.5
        assert a.bill.restored_bytes == 0

    def test_what_was_not_computed_is_not_charged(self) -> None:
        """Of a prompt that ended in the middle."""
        fixture = SchedulerFixture()
        fixture.cache.spared = 9
        (a,) = fixture.put("a0", tenant="a")
        fixture.start()
        a.status, a.num_computed_tokens = SequenceStatus.PREFILL, 4
        assert service_of(fixture, "a") == 10
        fixture.scheduler.remove(a)
        assert service_of(fixture, "a") == 4

    @pytest.mark.parametrize("reason", ["disk", "prefill"])
    def test_nobody_yields_to_who_could_not_start(self, reason: str) -> None:
        """It waits for something else than a slot."""
        fixture, _ = self.crowd()
        fixture.put("b0", tenant="b")
        fixture.cache.on_disk = {"b0"} if reason == "disk" else set()
        fixture.cache.behind = {"b0"} if reason == "prefill" else set()
        assert fixture.yielding() is None
        fixture.cache.on_disk, fixture.cache.behind = set(), set()
        assert self.give(fixture) == ("a3", ["b0"])

    def test_memory_is_given_as_slots_are(self) -> None:
        """Where the batch is not full, and the first that waits has no room."""
        fixture, _ = self.crowd(room=40)
        fixture.scheduler._max_batch = 8
        fixture.put("b0", tenant="b")
        assert fixture.start() == []
        assert self.give(fixture) == ("a3", ["b0"])

    def test_what_was_given_up_for_one_is_nobody_elses(self) -> None:
        """One yields after the other until it has room; none of them takes it back meanwhile."""
        fixture, _ = self.crowd(room=40)
        fixture.scheduler._max_batch = 8
        large = Sequence(make_request("b0", [1] * 30, tenant="b"))
        fixture.queue.put(large)
        assert fixture.start() == []
        assert self.give(fixture) == ("a3", [])
        assert self.give(fixture) == ("a2", [])
        assert self.give(fixture) == ("a1", ["b0"])
        assert fixture.start() == []
        fixture.scheduler.remove(large)
        assert fixture.start() == ["a1", "a2", "a3"]

    def test_one_that_was_cancelled_holds_up_nobody_for_whom_it_was(self) -> None:
        fixture, _ = self.crowd(room=40)
        fixture.scheduler._max_batch = 8
        fixture.queue.put(Sequence(make_request("b0", [1] * 30, tenant="b")))
        fixture.start()
        assert self.give(fixture) == ("a3", [])
        assert fixture.queue.remove("b0") is not None
        assert fixture.start() == ["a3"]

    def test_what_decodes_again_is_spared(self) -> None:
        """Under exact serving who yielded replays its answer: another one yields before it."""
        fixture, made = self.crowd()
        (b,) = fixture.put("b0", tenant="b")
        made[3].output, made[3].num_computed_tokens = list(range(50)), 60
        assert self.give(fixture) == ("a3", ["b0"])
        fixture.scheduler.remove(b)
        assert fixture.start() == ["a3"]
        made[3].status, made[3].num_computed_tokens = SequenceStatus.DECODE, 13
        fixture.put("b1", tenant="b")
        assert self.give(fixture) == ("a2", ["b1"])

    def test_what_never_ran_costs_nothing(self) -> None:
        """It was stuck: its prompt was not computed."""
        fixture = SchedulerFixture(room=5)
        fixture.cache.spared = 9
        (a,) = fixture.put("a0", tenant="a")
        fixture.start()
        assert fixture.stuck() is a
        assert service_of(fixture, "a") == 10
        fixture.scheduler.remove(a)
        assert service_of(fixture, "a") == 0

    def test_nobody_yields_while_somebody_is_preempted(self) -> None:
        """It was first."""
        fixture, made = self.crowd()
        fixture.put("b0", tenant="b")
        fixture.scheduler.preempt(made[3])
        assert fixture.yielding() is None

    def test_one_that_was_cancelled_meanwhile_takes_no_slot(self) -> None:
        fixture, _ = self.crowd()
        fixture.put("b0", tenant="b")
        sequence = fixture.yielding()
        assert sequence is not None
        fixture.queue.remove("b0")
        sequence.preempt(replay=False)
        fixture.scheduler.put_back(sequence)
        assert fixture.start() == ["a3"]

    def test_who_yielded_can_be_cancelled_and_runs_to_its_end_at_a_stop(self) -> None:
        """It waits as any other, but a queue that closes does not hand it out."""
        fixture, _ = self.crowd()
        fixture.put("b0", "b1", tenant="b")
        assert self.give(fixture)[0] == "a3"
        assert self.give(fixture)[0] == "a2"
        assert fixture.queue.remove("a2") is not None
        left = names_of(fixture.queue.close())
        assert left == ["a4", "a5", "a6", "a7"]
        fixture.scheduler.remove(fixture.scheduler.running[-1])
        assert fixture.start() == ["a3"]


class TestYieldingToItsTenant:
    """Slots of a full batch, between a tenant's batch answers and its interactive requests."""

    @staticmethod
    def crowd() -> tuple[SchedulerFixture, list[Sequence]]:
        """Fill the batch with a tenant's batch answers and one of another tenant."""
        fixture = SchedulerFixture(max_batch=4)
        made = fixture.put("a0", "a1", "a2", tenant="a", priority=Priority.BATCH)
        made += fixture.put("b0", tenant="b")
        assert len(fixture.start()) == 4
        for each in made:
            each.status, each.num_computed_tokens = SequenceStatus.DECODE, 10
        return fixture, made

    give = staticmethod(TestYielding.give)

    def test_the_youngest_batch_answer_yields(self) -> None:
        """And the next one, to the next; another tenant's is never taken for it."""
        fixture, _ = self.crowd()
        assert fixture.yielding() is None
        fixture.put("i0", "i1", "i2", "i3", tenant="a")
        for pair in ("a2", ["i0"]), ("a1", ["i1"]), ("a0", ["i2"]):
            assert self.give(fixture) == pair
        assert fixture.yielding() is None
        assert fixture.running == ["b0", "i0", "i1", "i2"]

    def test_who_yielded_goes_on_when_nobody_interactive_could_start(self) -> None:
        """Or when enough have started before it: then it keeps its slot to its end."""
        fixture, made = self.crowd()
        asked = fixture.put(*[f"i{n}" for n in range(40)], tenant="a")
        assert [self.give(fixture)[1] for _ in range(3)] == [["i0"], ["i1"], ["i2"]]
        at_work, order = asked[:3], list[str]()
        while at_work:
            fixture.scheduler.remove(at_work.pop(0))
            for name in fixture.start():
                order.append(name)
                sequence = next(each for each in [*asked, *made] if each.request.id == name)
                sequence.status, sequence.num_computed_tokens = SequenceStatus.DECODE, 10
                at_work += [sequence] if sequence in asked else []
            assert fixture.yielding() is None, "who is due keeps its slot"
        batch = [place for place, name in enumerate(order) if name.startswith("a")]
        assert [order[place] for place in batch] == ["a0", "a1", "a2"]
        assert batch[0] < Policy().patience
        assert batch[1] - batch[0] == Policy().patience
        assert len(order) == 40

    def test_who_starts_as_due_keeps_its_slot(self) -> None:
        """Else its prompt would be computed for nothing, and it would never have an answer."""
        fixture = SchedulerFixture(max_batch=1)
        batch = fixture.put(*[f"b{n}" for n in range(4)], tenant="a", priority=Priority.BATCH)
        asked, yields = fixture.put(*[f"i{n}" for n in range(99)], tenant="a"), 0
        ended = list[str]()
        while len(ended) < len(batch) + len(asked):
            (name,) = fixture.start()
            (sequence,) = (each for each in [*batch, *asked] if each.request.id == name)
            sequence.status, sequence.num_computed_tokens = SequenceStatus.DECODE, 10
            yields += fixture.yielding() is not None
            fixture.scheduler.remove(sequence)
            ended.append(name)
        assert yields == 0
        places = [place for place, name in enumerate(ended) if name.startswith("b")]
        assert all(after - before <= Policy().patience for before, after in pairwise(places))

    def test_it_goes_on_beside_one_that_could_not_start(self) -> None:
        """No slot stays empty, and it yields again once that one could."""
        fixture, made = self.crowd()
        first, _ = fixture.put("i0", "i1", tenant="a")
        fixture.cache.on_disk = {"i1"}
        assert self.give(fixture) == ("a2", ["i0"])
        fixture.scheduler.remove(first)
        assert fixture.start() == ["a2"]
        made[2].status, made[2].num_computed_tokens = SequenceStatus.DECODE, 10
        assert fixture.yielding() is None
        fixture.cache.on_disk = set()
        assert self.give(fixture) == ("a2", ["i1"])

    def test_its_tenant_may_have_been_served_most(self) -> None:
        fixture, made = self.crowd()
        fixture.put("b1", tenant="b")
        fixture.queue.charge([(made[0], 1000 * _GAP)])
        fixture.put("i0", tenant="a")
        assert self.give(fixture) == ("a2", ["b1"]), "b gets its part"
        assert self.give(fixture) == ("a1", ["i0"])
        assert fixture.yielding() is None

    @pytest.mark.parametrize("priority", Priority)
    def test_no_other_answer_yields(self, priority: Priority) -> None:
        fixture = SchedulerFixture(max_batch=2)
        made = fixture.put("a0", "a1", tenant="a", priority=priority)
        fixture.start()
        for each in made:
            each.status, each.num_computed_tokens = SequenceStatus.DECODE, 10
        fixture.put("new", tenant="a", priority=priority)
        fixture.queue._order._tenants["a"]._num_passed_over = 99
        assert fixture.yielding() is None

    def test_one_of_the_same_conversation_does_not_yield(self) -> None:
        """It would be before the one that it yields to; another one yields, if there is one."""
        fixture = SchedulerFixture(max_batch=2)
        session: dict[str, Any] = {"tenant": "a", "unit": "session", "parallel": 9}
        one = fixture.put("one", tenant="a", priority=Priority.BATCH)
        made = one + fixture.put("two", priority=Priority.BATCH, **session)
        fixture.start()
        for each in made:
            each.status, each.num_computed_tokens = SequenceStatus.DECODE, 10
        fixture.put("i0", "i1", **session)
        assert self.give(fixture) == ("one", ["i0"])
        assert fixture.yielding() is None
        fixture.put("i2", tenant="a")
        assert self.give(fixture) == ("two", ["i2"])

    def test_a_prompt_is_computed_first(self) -> None:
        fixture, made = self.crowd()
        for each in made[1:3]:
            each.status, each.num_computed_tokens = SequenceStatus.PREFILL, 3
        fixture.put("i0", "i1", tenant="a")
        assert self.give(fixture) == ("a0", ["i0"])
        assert fixture.yielding() is None


class TestStuck:
    """Sequences that can never start."""

    def test_who_lacks_memory_beside_others_is_not_stuck(self) -> None:
        """The others' memory will be free; then it starts."""
        fixture = SchedulerFixture(room=10)
        a, _ = fixture.put("a", "b")
        assert fixture.start() == ["a"]
        assert fixture.stuck() is None
        assert len(fixture.queue) == 1
        fixture.scheduler.remove(a)
        assert fixture.start() == ["b"]

    def test_who_lacks_memory_alone_is_stuck(self) -> None:
        """It has left the queue then, and is the first to start or to be told."""
        fixture = SchedulerFixture(room=9)
        a, _ = fixture.put("a", "b")
        assert fixture.start() == []
        assert fixture.stuck() is a
        assert a in fixture.scheduler
        assert names_of(fixture.queue.close()) == ["b"]
        assert fixture.start() == []
        assert fixture.stuck() is a
        fixture.memory.room = 10
        assert fixture.start() == ["a"]
        assert fixture.stuck() is None
        assert (fixture.running, fixture.preempted) == (["a"], [])

    def test_a_stuck_conversation_goes_on_when_it_is_told(self) -> None:
        """It is busy meanwhile; removing makes way for the next of it."""
        fixture = SchedulerFixture(room=9)
        a, b = fixture.put("a", "b", conversation="c")
        fixture.start()
        assert fixture.stuck() is a
        assert fixture.queue.offers() == []
        fixture.scheduler.remove(a)
        assert fixture.stuck() is None
        assert fixture.start() == []
        assert fixture.stuck() is b

    def test_a_preempted_one_can_be_stuck(self) -> None:
        """Where those that ran beside it have ended, and there is less memory now."""
        fixture = SchedulerFixture()
        a, b = fixture.put("a", "b")
        fixture.start()
        fixture.scheduler.preempt(b)
        fixture.memory.room = 9
        assert fixture.start() == []
        assert fixture.stuck() is None
        fixture.scheduler.remove(a)
        assert fixture.start() == []
        assert fixture.stuck() is b
        assert fixture.preempted == ["b"]

    def test_who_waits_for_something_else_is_not_stuck(self) -> None:
        """The disk answers some day; and an empty queue lacks nothing."""
        fixture = SchedulerFixture()
        assert fixture.start() == []
        assert fixture.stuck() is None
        fixture.cache.on_disk = {"a"}
        fixture.put("a")
        assert fixture.start() == []
        assert fixture.stuck() is None
        assert len(fixture.queue) == 1

    def test_who_was_cancelled_is_not_stuck(self) -> None:
        """It left the queue between the question and the answer."""
        fixture = SchedulerFixture(room=9)
        fixture.put("a")
        fixture.start()
        assert fixture.queue.remove("a") is not None
        assert fixture.stuck() is None
        assert fixture.preempted == []
