"""Who runs, who is paused, and who may start, in any order of events."""

from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.roster import _READ_AHEAD, Roster
from umbel.scheduler.sequence import Sequence

from ..fakes import make_request


class Cache:
    """What the roster asks of the cache's side.

    Attributes:
        on_disk: conversations whose state is being read.
        behind: conversations whose prompt another one is just prefilling.
    """

    def __init__(self) -> None:
        self.on_disk: set[str] = set()
        self.behind: set[str] = set()

    def page_in(self, sequence: Sequence) -> bool:
        """Whether it is being read."""
        return sequence.request.conversation in self.on_disk

    def shall_wait(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether another one, that runs, prefills it."""
        return bool(running) and sequence.request.conversation in self.behind

    def known(self, sequence: Sequence) -> str:
        """What is known goes with whom it is known of."""
        return sequence.request.id


class Memory:
    """Memory that holds so many tokens of prompts.

    Attributes:
        room: tokens, of all that run.
        asked: who wanted to start, in order.
    """

    def __init__(self, room: int = 1 << 20) -> None:
        self.room = room
        self.asked: list[str] = []

    def admits(self, sequence: Sequence, known: str, running: list[Sequence]) -> bool:
        """Whether there is room beside those that run."""
        assert known == sequence.request.id
        assert sequence not in running
        self.asked.append(sequence.request.id)
        return sum(len(each.tokens) for each in [*running, sequence]) <= self.room


class Hall:
    """A roster between a real queue and fakes. Each prompt has ten tokens."""

    def __init__(self, max_batch: int = 8, room: int = 1 << 20) -> None:
        self.cache, self.memory = Cache(), Memory(room)
        self.queue = ConversationQueue(1000)
        self.roster = Roster(
            self.queue, cast("Any", self.cache), cast("Any", self.memory), max_batch
        )

    def put(self, *names: str, conversation: str | None = None) -> list[Sequence]:
        """Queue requests, each in a conversation of its own unless told otherwise."""
        made = [Sequence(make_request(n, [1] * 10, conversation=conversation)) for n in names]
        for each in made:
            self.queue.put(each)
        return made

    def start(self) -> list[str]:
        """Start all that may."""
        started = []
        while (sequence := self.roster.start_next()) is not None:
            started.append(sequence)
        return names_of(started)

    @property
    def running(self) -> list[str]:
        """Who runs, in order."""
        return names_of(self.roster.running)

    @property
    def paused(self) -> list[str]:
        """Who is paused, in order."""
        return names_of(self.roster.paused)


def names_of(sequences: list[Sequence]) -> list[str]:
    """The ids of some requests."""
    return [sequence.request.id for sequence in sequences]


class TestStarting:
    """The way in."""

    def test_they_start_in_their_order_and_no_more_than_may(self) -> None:
        """A place that becomes free is the next one's."""
        hall = Hall(max_batch=2)
        a, *_ = hall.put("a", "b", "c", "d")
        assert hall.start() == hall.running == ["a", "b"]
        assert hall.start() == []
        hall.roster.remove(a)
        assert hall.start() == ["c"]
        assert hall.running == ["b", "c"]
        assert len(hall.queue) == 1

    def test_the_queue_is_free_while_they_are_looked_at(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others put and cancel meanwhile, and who is cancelled then does not start."""
        hall = Hall()
        hall.put("a", "b")

        def cancel_the_first(sequence: Sequence, _running: list[Sequence]) -> bool:
            assert not hall.queue._lock.locked()
            if sequence.request.id == "a":
                hall.queue.remove("a")
            return False

        monkeypatch.setattr(hall.cache, "shall_wait", cancel_the_first)
        assert hall.start() == hall.running == ["b"]

    def test_a_conversation_runs_one_request_at_a_time(self) -> None:
        """Its next one starts when the first has ended, and not while that is paused."""
        hall = Hall()
        first, _ = hall.put("a1", "a2", conversation="a")
        (other,) = hall.put("b")
        assert hall.start() == ["a1", "b"]
        hall.roster.pause(other)
        hall.roster.pause(first)
        hall.memory.room = 5
        assert hall.start() == []
        assert hall.memory.asked[-1] == "a1"
        hall.roster.remove(first)
        hall.memory.room = 100
        assert hall.start() == ["b", "a2"]

    def test_nobody_overtakes_who_lacks_memory(self) -> None:
        """Those after it are not even asked for."""
        hall = Hall(room=25)
        a, *_ = hall.put("a", "b", "c", "d")
        assert hall.start() == ["a", "b"]
        assert hall.memory.asked == ["a", "b", "c"]
        hall.memory.room = 10
        hall.roster.remove(a)
        assert hall.start() == []
        hall.memory.room = 30
        assert hall.start() == ["c", "d"]

    def test_who_waits_for_the_disk_does_not_hold_up_others(self) -> None:
        """It is told that somebody does, as long as that is so."""
        hall = Hall()
        hall.cache.on_disk = {"a", "c"}
        hall.put("a", "b", "c", "d")
        assert hall.start() == ["b", "d"]
        assert hall.roster.paging
        hall.cache.on_disk = {"c"}
        assert hall.start() == ["a"]
        assert hall.roster.paging
        hall.cache.on_disk = set()
        assert hall.start() == ["c"]
        assert hall.start() == []
        assert not hall.roster.paging
        assert hall.running == ["b", "d", "a", "c"]

    def test_only_the_first_are_read_ahead(self) -> None:
        """Who stands after them is not looked at until one of them has what it waits for."""
        hall = Hall()
        names = [f"r{number}" for number in range(_READ_AHEAD)]
        hall.cache.on_disk = set(names)
        hall.put(*names, "last")
        assert hall.start() == []
        assert hall.memory.asked == []
        hall.cache.on_disk.remove(names[-1])
        assert hall.start() == [names[-1], "last"]

    def test_who_waits_for_anothers_prefill_does_not_hold_up_others(self) -> None:
        """Nor is its state read from disk meanwhile, nor memory asked for it."""
        hall = Hall()
        hall.cache.behind = hall.cache.on_disk = {"b"}
        hall.put("a", "b", "c")
        assert hall.start() == ["a", "c"]
        assert not hall.roster.paging
        assert "b" not in hall.memory.asked
        hall.cache.behind = set()
        assert hall.start() == []
        assert hall.roster.paging

    def test_who_lacks_memory_holds_up_those_that_wait_for_the_disk(self) -> None:
        """What is read for a later one would take the memory that the first one waits for."""
        hall = Hall(room=5)
        hall.cache.on_disk = {"b"}
        hall.put("a", "b")
        assert hall.start() == []
        assert not hall.roster.paging


class TestPausing:
    """Out, and in again."""

    def test_the_youngest_is_paused_and_the_oldest_resumes_first(self) -> None:
        """Before any that waits, in the order in which they first started."""
        hall = Hall(max_batch=4)
        hall.put("a", "b", "c", "d", "e")
        hall.start()
        for left in (["a", "b", "c"], ["a", "b"], ["a"]):
            youngest = hall.roster.youngest()
            assert youngest is not None
            hall.roster.pause(youngest)
            assert hall.running == left
            assert youngest in hall.roster
        assert hall.paused == ["b", "c", "d"]
        assert hall.start() == ["b", "c", "d"]
        assert hall.running == ["a", "b", "c", "d"]
        assert hall.paused == []
        assert hall.start() == []

    def test_who_runs_alone_is_not_paused(self) -> None:
        """Nor is anybody where nobody runs."""
        hall = Hall()
        assert hall.roster.youngest() is None
        (_, b) = hall.put("a", "b")
        hall.roster.start_next()
        assert hall.roster.youngest() is None
        hall.roster.start_next()
        assert hall.roster.youngest() is b

    @pytest.mark.parametrize("reason", ["memory", "disk", "prefill"])
    def test_nobody_starts_while_somebody_is_paused(self, reason: str) -> None:
        """Whatever it waits for: it was first."""
        hall = Hall(room=100)
        hall.put("a", "b", "c")
        hall.roster.start_next()
        b = hall.roster.start_next()
        assert b is not None
        hall.roster.pause(b)
        hall.memory.room = 10 if reason == "memory" else 100
        hall.cache.on_disk = {"b"} if reason == "disk" else set()
        hall.cache.behind = {"b"} if reason == "prefill" else set()
        assert hall.start() == []
        assert "c" not in hall.memory.asked
        assert hall.roster.paging == (reason == "disk")
        hall.memory.room, hall.cache.on_disk, hall.cache.behind = 100, set(), set()
        assert hall.start() == ["b", "c"]


class TestStuck:
    """Who can never start."""

    def test_who_lacks_memory_beside_others_is_not_stuck(self) -> None:
        """The others' memory will be free; then it starts."""
        hall = Hall(room=10)
        a, _ = hall.put("a", "b")
        assert hall.start() == ["a"]
        assert hall.roster.stuck() is None
        assert len(hall.queue) == 1
        hall.roster.remove(a)
        assert hall.start() == ["b"]

    def test_who_lacks_memory_alone_is_stuck(self) -> None:
        """It has left the queue then, and is the first to start or to be told."""
        hall = Hall(room=9)
        a, _ = hall.put("a", "b")
        assert hall.start() == []
        assert hall.roster.stuck() is a
        assert a in hall.roster
        assert names_of(hall.queue.close()) == ["b"]
        assert hall.start() == []
        assert hall.roster.stuck() is a
        hall.memory.room = 10
        assert hall.start() == ["a"]
        assert hall.roster.stuck() is None
        assert (hall.running, hall.paused) == (["a"], [])

    def test_a_stuck_conversation_goes_on_when_it_is_told(self) -> None:
        """It is busy meanwhile; removing makes way for the next of it."""
        hall = Hall(room=9)
        a, b = hall.put("a", "b", conversation="c")
        hall.start()
        assert hall.roster.stuck() is a
        assert hall.queue.candidates() == []
        hall.roster.remove(a)
        assert hall.roster.stuck() is None
        assert hall.start() == []
        assert hall.roster.stuck() is b

    def test_a_paused_one_can_be_stuck(self) -> None:
        """Where those that ran beside it have ended, and there is less memory now."""
        hall = Hall()
        a, b = hall.put("a", "b")
        hall.start()
        hall.roster.pause(b)
        hall.memory.room = 9
        assert hall.start() == []
        assert hall.roster.stuck() is None
        hall.roster.remove(a)
        assert hall.start() == []
        assert hall.roster.stuck() is b
        assert hall.paused == ["b"]

    def test_who_waits_for_something_else_is_not_stuck(self) -> None:
        """The disk answers some day; and an empty queue lacks nothing."""
        hall = Hall()
        assert hall.start() == []
        assert hall.roster.stuck() is None
        hall.cache.on_disk = {"a"}
        hall.put("a")
        assert hall.start() == []
        assert hall.roster.stuck() is None
        assert len(hall.queue) == 1

    def test_who_was_cancelled_is_not_stuck(self) -> None:
        """It left the queue between the question and the answer."""
        hall = Hall(room=9)
        hall.put("a")
        hall.start()
        assert hall.queue.remove("a") is not None
        assert hall.roster.stuck() is None
        assert hall.paused == []


class TestRemoving:
    """Out for good."""

    def test_removed_is_removed(self) -> None:
        """From among those that run or are paused; the rest keep their order."""
        hall = Hall()
        a, b, c, d = hall.put("a", "b", "c", "d")
        hall.start()
        hall.roster.pause(d)
        hall.roster.pause(c)
        for gone in (b, c):
            assert gone in hall.roster
            hall.roster.remove(gone)
            hall.roster.remove(gone)
            assert gone not in hall.roster
        assert (hall.running, hall.paused) == (["a"], ["d"])
        assert a in hall.roster

    def test_its_conversation_goes_on(self) -> None:
        """Only its own."""
        hall = Hall(max_batch=3)
        a1, *_ = hall.put("a1", "a2", conversation="a")
        hall.put("b1", "b2", conversation="b")
        assert hall.start() == ["a1", "b1"]
        hall.roster.remove(a1)
        assert hall.start() == ["a2"]


class RosterMachine(RuleBasedStateMachine):
    """Whatever happens in whichever order, everybody is in one place, and in turn."""

    CONVERSATIONS = ("a", "b", "c", "d")

    @initialize(max_batch=st.integers(1, 3), room=st.integers(0, 45))
    def begin(self, max_batch: int, room: int) -> None:
        """Open the doors."""
        self.hall = Hall(max_batch, room)
        self.roster = self.hall.roster
        self.max_batch = max_batch
        self.waiting: list[Sequence] = []
        self.there: list[Sequence] = []  # started and not ended, in the order of their starts
        self.count = 0

    @rule(conversation=st.sampled_from(CONVERSATIONS))
    def put(self, conversation: str) -> None:
        """Another request comes."""
        self.count += 1
        self.waiting += self.hall.put(f"r{self.count}", conversation=conversation)

    @rule(room=st.integers(0, 45))
    def change_room(self, room: int) -> None:
        """There is more memory, or less."""
        self.hall.memory.room = room

    @rule(conversation=st.sampled_from(CONVERSATIONS), which=st.sampled_from(["on_disk", "behind"]))
    def change_state(self, conversation: str, which: str) -> None:
        """A conversation waits for its state, or does not any more."""
        getattr(self.hall.cache, which).symmetric_difference_update({conversation})

    def expected(self) -> tuple[Sequence | None, Sequence | None, bool]:
        """Who is next, else who lacks memory; and whether somebody waits for the disk."""
        running, reading = self.roster.running, 0
        if len(running) >= self.max_batch:
            return None, None, self.roster.paging
        busy = {sequence.request.conversation for sequence in self.there}
        idle = [s for s in self.waiting if s.request.conversation not in busy]
        for sequence in self.roster.paused[:1] or idle:
            conversation = sequence.request.conversation
            if reading == _READ_AHEAD:
                break
            if running and conversation in self.hall.cache.behind:
                continue
            if conversation in self.hall.cache.on_disk:
                reading += 1
            elif 10 * (len(running) + 1) <= self.hall.memory.room:
                return sequence, None, reading > 0
            else:
                return None, sequence, reading > 0
        return None, None, reading > 0

    @rule()
    def start(self) -> None:
        """The next one starts, if one may; else perhaps nobody ever could."""
        next_one, lacking, paging = self.expected()
        full = len(self.roster.running) >= self.max_batch
        assert self.roster.start_next() is next_one
        assert self.roster.paging == paging
        if next_one is not None:
            assert self.roster.running[-1] is next_one
            self.arrive(next_one)
        if full or next_one is not None or self.roster.running:
            assert self.roster.stuck() is None
        else:
            assert self.roster.stuck() is lacking
            if lacking is not None:
                self.arrive(lacking)

    def arrive(self, sequence: Sequence) -> None:
        """Note that it does not wait any more."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.there.append(sequence)

    @precondition(lambda self: len(self.roster.running) > 1)
    @rule()
    def pause(self) -> None:
        """The one that started last stops."""
        youngest = self.roster.youngest()
        assert youngest is self.roster.running[-1]
        self.roster.pause(youngest)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """One of those that started ends, whether it runs or is paused."""
        sequence = data.draw(st.sampled_from(self.there))
        self.there.remove(sequence)
        self.roster.remove(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """One that waits is taken out."""
        sequence = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(sequence)
        assert self.hall.queue.remove(sequence.request.id) is sequence

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        """Nobody is lost or doubled, and no more run than may."""
        running, paused = self.roster.running, self.roster.paused
        assert len(running) <= self.max_batch
        assert sorted(names_of([*running, *paused])) == sorted(names_of(self.there))
        assert len(self.hall.queue) == len(self.waiting)
        assert all(sequence in self.roster for sequence in self.there)
        assert not any(sequence in self.roster for sequence in self.waiting)
        conversations = [sequence.request.conversation for sequence in self.there]
        assert len(set(conversations)) == len(conversations)

    @invariant()
    def the_older_come_first(self) -> None:
        """Those that run, and then those that are paused, are in the order of their starts."""
        assert [*self.roster.running, *self.roster.paused] == self.there

    def teardown(self) -> None:
        """With memory and a disk that answers, all are served in the end."""
        if not hasattr(self, "hall"):
            return
        self.hall.memory.room = 1 << 20
        self.hall.cache.on_disk, self.hall.cache.behind = set(), set()
        left = {sequence.request.id for sequence in (*self.waiting, *self.there)}
        served = set(self.hall.running)
        while self.hall.start() or self.roster.running:
            served |= set(self.hall.running)
            self.roster.remove(self.roster.running[0])
        assert served == left
        assert self.hall.queue._busy == set()
        assert self.hall.paused == []


def test_nobody_is_lost() -> None:
    """Random schedules, against a plain account of who should be where."""
    run_state_machine_as_test(
        RosterMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
