"""The fair order: shares and their bounds, the order within them, and the cost of a decision."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.scheduler.order import Candidate, Entry, FairOrder, Policy, Priority, rank
from umbel.scheduler.policy import Slot, own_preemption, preemption
from umbel.scheduler.tenants import Share

SMALL = Policy(quantum=100, patience=4, looks=6)
Trace = Callable[[FrameType, str, object], "Trace"]
SEEDS = st.integers(0, 2**32)


def cold(entry: Entry) -> int:
    """Nothing is in the cache."""
    del entry
    return 0


def first(order: FairOrder, cached: Callable[[Entry], int] = cold) -> Entry:
    """The request that an order would start next."""
    return rank(order.window(), cached)[0]


def fill(order: FairOrder, tenant: str, count: int, **fields: Priority) -> None:
    """Let a tenant wait with so many conversations of one request."""
    for number in range(count):
        order.put(Entry(f"{tenant}{number}", tenant, f"{number}", **fields))


class Load:
    """Tenants that always have requests waiting, on a server with slots.

    Attributes:
        served: tokens that each tenant was given.
        most: tokens that a request costs at most.

    Args:
        seed: of prompts, answers and cached prefixes.
        weights: of the tenants.
        slots: of the server.
    """

    def __init__(self, seed: int, weights: dict[str, int], slots: int) -> None:
        self.order = FairOrder(SMALL, weights.__getitem__)
        self.served: Counter[str] = Counter()
        self.passed_over: Counter[str] = Counter()
        self.most_passed_over = 0
        self.longest_prompt, self.longest_answer = 120, 30
        self._random = random.Random(seed)  # noqa: S311 - lengths, not secrets
        self._slots = slots
        self._left: dict[Entry, int] = {}
        self._waiting: dict[str, list[Entry]] = {}
        self._count = 0
        for tenant in weights:
            self.join(tenant)

    def join(self, tenant: str) -> None:
        """Make a tenant wait from now on."""
        self._waiting[tenant] = []
        for _ in range(5):
            self._put(tenant)

    def leave(self, tenant: str) -> None:
        """Take a tenant's waiting requests away."""
        for entry in self._waiting.pop(tenant):
            self.order.remove(entry.id)

    def step(self) -> None:
        """Fill the slots, and decode a token of each answer."""
        while len(self._left) < self._slots and self.order._waiting:
            self._start(rank(self.order.window(), lambda _: self._random.randrange(1000))[0])
        for entry in list(self._left):
            self._charge(entry, 1)
            self._left[entry] -= 1
            if not self._left[entry]:
                del self._left[entry]
                self.order.end(entry.id)

    def _put(self, tenant: str) -> None:
        self._count += 1
        entry = Entry(f"{self._count}", tenant, f"{self._count}")
        self._waiting[tenant].append(entry)
        self.order.put(entry)

    def _start(self, entry: Entry) -> None:
        waiting = self._waiting[entry.tenant]
        self.passed_over[entry.tenant] += 1
        if waiting[0] == entry:
            self.passed_over[entry.tenant] = 0
        self.most_passed_over = max(self.most_passed_over, self.passed_over[entry.tenant])
        waiting.remove(entry)
        self._put(entry.tenant)
        prompt = self._random.randint(1, self.longest_prompt)
        self.order.start(entry.id, prompt)
        self.served[entry.tenant] += prompt
        self._left[entry] = self._random.randint(1, self.longest_answer)

    def _charge(self, entry: Entry, tokens: int) -> None:
        self.order.charge(entry.id, tokens)
        self.served[entry.tenant] += tokens

    @property
    def bound(self) -> float:
        """How far tenants may be apart: a quantum, and what one started last (weights from 1)."""
        return SMALL.quantum + self.longest_prompt + self._slots * self.longest_answer


def claimants(order: FairOrder) -> list[str]:
    """List the tenants to which others yield."""
    return [share.tenant for share in order.claimants()]


# -- shares --------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 6), st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_backlogged_tenants_stay_together(seed: int, slots: int, weights: list[int]) -> None:
    """At no time is one further behind another than a quantum and what that started last."""
    load = Load(seed, {f"t{number}": weight for number, weight in enumerate(weights)}, slots)
    for _ in range(300):
        load.step()
        shares = [load.served[f"t{number}"] / weight for number, weight in enumerate(weights)]
        assert max(shares) - min(shares) <= load.bound


@settings(max_examples=5, deadline=None)
@given(SEEDS, st.integers(1, 6))
def test_weights_are_obeyed_in_the_long_run(seed: int, slots: int) -> None:
    """A tenant of three times the weight gets three times as much."""
    load = Load(seed, {"light": 1, "heavy": 3}, slots)
    for _ in range(2000):
        load.step()
    assert load.served["heavy"] / load.served["light"] == pytest.approx(3, rel=0.15)


@given(SEEDS, st.integers(1, 4), st.integers(50, 300))
def test_an_idle_tenant_gains_no_credit(seed: int, slots: int, away: int) -> None:
    load = Load(seed, {"a": 1, "b": 1, "idle": 1}, slots)
    load.leave("idle")
    for _ in range(away):
        load.step()
    before = load.served.copy()
    load.join("idle")
    for _ in range(200):
        load.step()
        given_since = load.served - before
        assert given_since["idle"] - min(given_since["a"], given_since["b"]) <= 2 * load.bound


@given(SEEDS, st.integers(1, 6))
def test_the_oldest_is_passed_over_so_often(seed: int, slots: int) -> None:
    """Of every few requests that a tenant starts one is its oldest, whatever is cached."""
    load = Load(seed, {"a": 1, "b": 2}, slots)
    for _ in range(300):
        load.step()
    assert 0 < load.most_passed_over < SMALL.patience


def test_a_new_tenant_starts_at_the_least_of_the_others() -> None:
    """It neither owes what they were given nor is owed it."""
    order = FairOrder(SMALL)
    fill(order, "a", 3)
    order.window()
    order.start("a0", 1000)
    fill(order, "b", 3)
    order.window()
    assert order.share("b").service == order.share("a").service == 1000
    order.window()
    order.start("b0", 70)
    fill(order, "c", 1)
    order.window()
    assert order.share("c").service == 1000
    assert claimants(order) == ["a", "c", "b"]


def test_a_tenant_that_comes_back_keeps_what_it_owes() -> None:
    """To leave the queue pays nothing back."""
    order = FairOrder(SMALL)
    fill(order, "a", 1)
    fill(order, "b", 2)
    order.start("a0", 1000)
    order.end("a0")
    assert order.share("a").service == 1000
    fill(order, "a", 1)
    assert order.share("a").service == 1000
    assert first(order).tenant == "b"


def test_a_charge_can_be_corrected() -> None:
    order = FairOrder(SMALL)
    fill(order, "a", 2)
    fill(order, "b", 1)
    order.start("a0", 500)
    assert order.share("a").service == 500
    order.charge("a0", -450)
    assert order.share("a").service == 50
    assert first(order, lambda entry: entry.tenant == "a").tenant == "a"


def test_a_weight_may_change() -> None:
    """The next charge counts by the new one."""
    weights = {"a": 1.0}
    order = FairOrder(SMALL, weights.__getitem__)
    fill(order, "a", 2)
    order.start("a0", 40)
    weights["a"] = 4.0
    order.charge("a0", 40)
    assert order.share("a").service == 50
    assert order.weight("a") == 4.0


def test_debts_of_the_absent_are_forgotten_in_the_end() -> None:
    """The number of tenants without requests that are remembered is bounded."""
    order = FairOrder(SMALL)
    fill(order, "stays", 1)
    for number in range(5000):
        order.put(Entry(f"{number}", f"{number}", "c"))
        order.start(f"{number}", 50)
        order.end(f"{number}")
    assert len(order._absent) < 1100
    assert order.share("4999").service == 50
    assert order.share("0").service == order.share("stays").service == 0


# -- conversations, prefixes, priorities -----------------------------------------------------


def test_the_longest_cached_prefix_goes_first() -> None:
    """Among what has credit."""
    order = FairOrder(SMALL)
    fill(order, "a", 4)
    assert first(order, lambda entry: {"a2": 90, "a3": 20}.get(entry.id, 0)).id == "a2"


def test_the_oldest_goes_first_once_only() -> None:
    """After it, the longest cached prefix does again."""
    order = FairOrder(SMALL._replace(quantum=1000))
    fill(order, "a", 6)
    started = [
        order.start(first(order, lambda entry: int(entry.id[1:])).id, 1).id
        for _ in range(SMALL.patience + 1)
    ]
    assert started == ["a5", "a4", "a3", "a0", "a2"]


def test_credit_goes_before_a_cached_prefix() -> None:
    """A tenant that has spent its quantum waits, whatever is cached of its requests."""
    order = FairOrder(SMALL)
    fill(order, "a", 3)
    fill(order, "b", 3)
    order.start("a0", 101)
    assert first(order, lambda entry: entry.tenant == "a").tenant == "b"
    order.start("b0", 102 + SMALL.quantum)
    assert first(order, lambda entry: entry.tenant == "b").tenant == "a"


def test_conversations_of_a_tenant_start_first_in_first_out() -> None:
    """One agent with many requests at once, all of them cached, is passed by so often only."""
    order = FairOrder(SMALL)
    order.put(Entry("first", "a", "modest"))
    for number in range(20):
        order.put(Entry(f"greedy{number}", "a", "greedy", parallel=20))
    order.put(Entry("second", "a", "modest2"))
    started = []
    while "second" not in started:
        started.append(first(order, lambda entry: entry.conversation == "greedy").id)
        order.start(started[-1], 0)
    assert started.index("first") == SMALL.patience - 1
    assert [name for name in started if name.startswith("greedy")] == [
        f"greedy{number}" for number in range(20)
    ]


def test_interactive_goes_before_batch() -> None:
    """Also where batch has more in the cache."""
    order = FairOrder(SMALL)
    fill(order, "a", 2, priority=Priority.BATCH)
    fill(order, "b", 2)
    assert first(order, lambda entry: entry.tenant == "a").tenant == "b"


def test_batch_of_one_tenant_gets_its_part_beside_interactive_of_another() -> None:
    """Interactive requests spend their credit in the end, and batch runs before it is refilled."""
    order = FairOrder(SMALL)
    fill(order, "batch", 50, priority=Priority.BATCH)
    fill(order, "interactive", 50)
    started = Counter[str]()
    for _ in range(50):
        entry = order.start(first(order).id, 50)
        started[entry.tenant] += 1
    assert abs(started["batch"] - started["interactive"]) <= SMALL.quantum / 50 + 1


def test_batch_is_not_starved_by_its_own_tenant() -> None:
    """It is started when it is the oldest and its turn comes."""
    order = FairOrder(SMALL)
    fill(order, "a", 1, priority=Priority.BATCH)
    for number in range(SMALL.patience - 1):
        order.put(Entry(f"i{number}", "a", f"i{number}"))
        assert order.start(first(order).id, 10).priority is Priority.INTERACTIVE
    order.put(Entry("last", "a", "last"))
    assert first(order).id == "a0"


def test_a_conversation_starts_as_many_as_it_may() -> None:
    """Strictly one at a time, or parallel up to a bound, but always in order."""
    order = FairOrder(SMALL)
    for number in range(3):
        order.put(Entry(f"one{number}", "a", "one"))
        order.put(Entry(f"two{number}", "a", "two", parallel=2))
    started = []
    while window := order.window():
        started.append(order.start(rank(window, cold)[0].id, 1).id)
    assert sorted(started) == ["one0", "two0", "two1"]
    order.end("one0")
    assert [candidate.entry.id for candidate in order.window()] == ["one1"]
    with pytest.raises(ValueError, match="waits for others of its conversation"):
        order.start("one2", 1)


def test_a_preempted_request_is_first_of_its_conversation_again() -> None:
    """It waits at its old place, before those that came after it."""
    order = FairOrder(SMALL)
    for number in range(2):
        order.put(Entry(f"{number}", "a", "c"))
    order.start("0", 10)
    order.preempt("0")
    assert [candidate.entry.id for candidate in order.window()] == ["0"]
    assert len(order._waiting) == 2


def test_wrong_use_is_refused() -> None:
    """A request is in the order once, starts when it waits, and is charged when it runs."""
    order = FairOrder(SMALL)
    fill(order, "a", 1)
    with pytest.raises(ValueError, match="request a0 is in the order already"):
        order.put(Entry("a0", "b", "c"))
    with pytest.raises(KeyError):
        order.charge("a0", 1)
    order.start("a0", 1)
    with pytest.raises(KeyError):
        order.start("a0", 1)
    assert not order.remove("a0")
    order.end("a0")
    with pytest.raises(KeyError):
        order.end("a0")


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 8))
def test_no_slot_stays_empty(tenants: int, requests: int, looks: int) -> None:
    """Where none of the first can start, others are found until all were looked at."""
    order = FairOrder(SMALL._replace(looks=looks))
    for number in range(requests):
        priority = Priority(number % 2)
        order.put(Entry(f"{number}", f"t{number % tenants}", f"{number}", priority))
    order.start("0", 10_000)
    passed: set[str] = set()
    while window := order.window(passed=passed):
        assert len(window) <= looks
        assert not passed & {candidate.entry.id for candidate in window}
        passed |= {candidate.entry.id for candidate in window}
    assert passed == {f"{number}" for number in range(1, requests)}


def test_a_tenant_within_a_quantum_of_the_least_served_may_claim_a_slot() -> None:
    """One that is a quantum ahead may not, until the other has been served."""
    order = FairOrder(SMALL)
    fill(order, "heavy", 4)
    fill(order, "light", 3)
    order.start("heavy0", SMALL.quantum * 0.9)
    assert claimants(order) == ["light", "heavy"]
    order.start("light0", SMALL.quantum * 0.2)
    order.start("light1", SMALL.quantum * 1.7)
    assert claimants(order) == ["heavy"], "light is a quantum ahead"
    assert {each.entry.tenant for each in order.window()} == {"heavy"}
    order.start("heavy1", SMALL.quantum * 0.5)
    assert claimants(order) == ["heavy", "light"]


def test_a_tenant_that_may_not_start_is_passed_over_and_earns_nothing() -> None:
    order, spent = FairOrder(SMALL), {"a"}
    fill(order, "a", 2)
    fill(order, "b", 3)

    def able(tenant: str) -> bool:
        return tenant not in spent

    assert {each.entry.tenant for each in order.window(able)} == {"b"}
    order.start("b0", 500)
    assert [each.tenant for each in order.claimants(able)] == ["b"]
    spent.clear()
    order.window(able)
    assert order.share("a").service == 500


# -- what a decision costs -------------------------------------------------------------------


def lines_of_a_decision(tenants: int, conversations: int, requests: int) -> tuple[int, int]:
    """Count the lines of Python that a decision runs, and the prefixes it asks for."""
    order = FairOrder()
    for number in range(requests):
        name = number % conversations
        order.put(Entry(f"{number}", f"{name % tenants}", f"{name}"))
    lines = asked = 0

    def count(frame: FrameType, event: str, arg: object) -> Trace:
        nonlocal lines
        del frame, arg
        lines += event == "line"
        return count

    def cached(entry: Entry) -> int:
        nonlocal asked
        del entry
        asked += 1
        return 0

    before = sys.gettrace()
    sys.settrace(count)
    try:
        chosen = rank(order.window(), cached)[0]
        order.start(chosen.id, 300)
        order.charge(chosen.id, 2)
        order.end(chosen.id)
    finally:
        sys.settrace(before)
    return lines, asked


@pytest.mark.parametrize("tenants", [1, 25, 100])
def test_a_decision_does_not_grow_with_the_queue(tenants: int) -> None:
    """With 10,000 requests of 1,000 conversations it does what it does with 1,000 of 100."""
    few, asked_of_few = lines_of_a_decision(tenants, 100, 1_000)
    many, asked_of_many = lines_of_a_decision(tenants, 1_000, 10_000)
    assert max(asked_of_few, asked_of_many) <= Policy().looks
    assert many <= 1.2 * few + 100
    assert many < 5_000


# -- slots -----------------------------------------------------------------------------------


def slots(*tenants: str, service: dict[str, float], prompt: str = "") -> list[Slot]:
    """A batch, the oldest first; the one named computes its prompt."""
    return [
        Slot(f"{tenant}{place}", Share(tenant, service[tenant]), f"{tenant}{place}" != prompt)
        for place, tenant in enumerate(tenants)
    ]


def test_the_youngest_of_the_most_served_gives_up_its_slot() -> None:
    """Its tenant is ahead by more than the gap, and has more slots."""
    service = {"a": 500.0, "b": 900.0}
    batch = slots("a", "b", "b", "a", service=service)
    assert preemption(batch, Share("c", 100), 200) == batch[2]
    assert preemption(batch, Share("c", 100), 800) is None


@pytest.mark.parametrize(
    ("claimant", "service"), [(Share("b", 100), 900.0), (Share("c", 800), 900.0)]
)
def test_no_slot_changes_hands_without_need(claimant: Share, service: float) -> None:
    """Not for a tenant with as many slots, nor where the services are close."""
    batch = slots("a", "b", service={"a": service, "b": 100.0})
    assert preemption(batch, claimant, 200) is None


def test_a_prompt_is_not_preempted() -> None:
    """Each start brings a request nearer to its end; weights count for slots, too."""
    batch = slots("a", "a", service={"a": 900.0}, prompt="a1")
    assert preemption(batch, Share("c", 100), 200) == batch[0]
    assert preemption(slots("a", service={"a": 900.0}, prompt="a0"), Share("c", 1), 9) is None
    weighted = [slot._replace(share=Share("a", 900, 4)) for slot in batch]
    assert preemption([*weighted, *slots("c", service={"c": 1.0})], Share("c", 1), 9) is None


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(2, 4), st.integers(2, 4))
def test_slots_do_not_change_hands_all_the_time(size: int, tenants: int, quanta: int) -> None:
    """Between two preemptions of a tenant, others are served the gap less the quantum."""
    order, gap, steps, preempted = FairOrder(SMALL), quanta * SMALL.quantum, 1000, 0
    for tenant in range(tenants):
        for number in range(2 * size):
            order.put(Entry(f"{tenant}/{number}", f"{tenant}", f"{number}"))
    running: list[Entry] = []
    for _ in range(steps):
        while len(running) < size:
            running.append(order.start(first(order).id, 1))
        shares = {e.tenant: order.share(e.tenant) for e in running}
        claimant = order.claimants()[0]
        batch = [Slot(entry.id, shares[entry.tenant], decodes=True) for entry in running]
        victim = preemption(batch, claimant, gap)
        if victim is not None:
            order.preempt(victim.id)
            running = [entry for entry in running if entry.id != victim.id]
            preempted += 1
            running.append(order.start(first(order).id, 1))
            assert running[-1].tenant != victim.share.tenant
        for entry in running:
            order.charge(entry.id, 1)
    assert preempted * (gap - SMALL.quantum) <= steps * size * tenants


BATCH = st.lists(
    st.builds(
        lambda tenant, *of_slot: Slot("", Share(tenant, 0.0), *of_slot),
        st.sampled_from("abc"),
        st.booleans(),
        st.sampled_from(Priority),
        st.sampled_from("xyz"),
    ),
    max_size=8,
)


@given(BATCH, st.sampled_from("abc"), st.sampled_from("xyz"))
def test_the_youngest_batch_answer_yields_to_its_own_tenant(
    made: list[Slot], tenant: str, conversation: str
) -> None:
    batch = [slot._replace(id=f"{place}") for place, slot in enumerate(made)]
    chosen = own_preemption(batch, Share(tenant, 1e9), conversation)
    able = [
        slot
        for slot in batch
        if slot.share.tenant == tenant
        and slot.decodes
        and slot.priority is Priority.BATCH
        and not slot.is_due
        and slot.conversation != conversation
    ]
    assert chosen == (able[-1] if able else None)


@given(st.integers(1, 5), st.integers(1, 60), st.integers(0, 3))
def test_interactive_ones_go_before_what_yielded_but_not_for_ever(
    yielded: int, interactive: int, others: int
) -> None:
    """Of every few that start one is due; what starts so yields no more, see `Slot.gives_way`."""
    order = FairOrder(SMALL)
    fill(order, "a", yielded, priority=Priority.BATCH)
    for number in range(yielded):
        order.start(f"a{number}", 1)
        order.preempt(f"a{number}")
    for number in range(interactive):
        order.put(Entry(f"i{number}", "a", f"i{number}"))
    for number in range(others):
        order.put(Entry(f"other{number}", "a", f"other{number}", Priority.BATCH))
    started = [order.start(first(order).id, 1).id for _ in range(yielded + interactive + others)]
    last = max(place for place, name in enumerate(started) if name.startswith("i"))
    early = [place for place, name in enumerate(started[:last]) if not name.startswith("i")]
    gaps = [after - before for before, after in pairwise([-1, *early])]
    assert set(gaps[1:]) <= {SMALL.patience}
    assert not gaps or gaps[0] <= SMALL.patience
    batch = [name for name in started if not name.startswith("i")]
    assert batch[: len(early)] == [f"a{number}" for number in range(yielded)][: len(early)] + [
        f"other{number}" for number in range(len(early) - yielded)
    ]
    assert not order.window()


def test_of_what_ran_the_interactive_goes_on_first() -> None:
    """Where a tenant may start nothing new."""
    order = FairOrder(SMALL)
    order.put(Entry("batch", "a", "1", Priority.BATCH))
    order.put(Entry("interactive", "a", "2"))
    for name in ("batch", "interactive"):
        order.start(name, 1)
    for name in ("batch", "interactive"):
        order.preempt(name)
    ran = [each.entry.id for each in order.yielded(lambda _: True, set())]
    assert ran == ["interactive", "batch"]


def test_candidates_that_are_due_go_first() -> None:
    """Whatever is cached of the others."""
    one, two = Entry("1", "a", "1"), Entry("2", "a", "2")
    assert rank([Candidate(one), Candidate(two, due=True)], lambda e: e.id == "1") == [two, one]
