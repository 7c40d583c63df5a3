"""Bounds of the queue: places for all, and a part of them for each tenant."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.cachestore.tries import SHARED
from umbel.scheduler.errors import QueueFullError
from umbel.scheduler.limits import check_waiting
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.sequence import Sequence
from umbel.scheduler.tenants import TenantUse, Terms

from ..fakes import make_request

LIMITS = st.integers(1, 400)
TENANTS = st.integers(1, 6)
TIMES = 8


class Room:
    """Places for requests to wait in, of tenants with numbers for names.

    Args:
        limit: how many places.
        known: whether requests of another tenant came before.
    """

    def __init__(self, limit: int, *, known: bool = True) -> None:
        self.limit = limit
        self.use = TenantUse()
        self.places = self.use.join()
        if known:
            self.use.meet("another")

    @property
    def free(self) -> int:
        """Number of free places."""
        return self.limit - self.use.waiting

    def accepts(self, tenant: int) -> bool:
        """Submit a request of a tenant; returns True if it waits now."""
        try:
            check_waiting(self.use, str(tenant), self.limit, 0.0)
        except QueueFullError:
            return False
        self.places.wait(str(tenant))
        return True

    def flood(self, tenants: list[int]) -> None:
        """Submit requests of tenants in turns until all are refused."""
        while sum(self.accepts(tenant) for tenant in tenants):
            pass

    def start(self, tenant: int) -> None:
        """Start one of a tenant's waiting requests, if there is one."""
        if self.use.waiting_of(str(tenant)):
            self.places.start(str(tenant))


@given(LIMITS, st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=300))
def test_who_has_nothing_waiting_has_every_place_that_is_free(
    limit: int, events: list[tuple[int, bool]]
) -> None:
    room = Room(limit)
    for tenant, sends in events:
        own, free = room.use.waiting_of(str(tenant)), room.free
        if sends:
            assert room.accepts(tenant) == (free >= 1 and own < TIMES * free)
            assert own or free < 1 or room.use.waiting_of(str(tenant)) == 1
        else:
            room.start(tenant)


@given(LIMITS, TENANTS)
def test_so_much_stays_free_beside_tenants_that_send_without_end(limit: int, heavy: int) -> None:
    """One place of 1 + 8 k beside k of them that came together, rounded up or down."""
    room = Room(limit)
    room.flood(list(range(heavy)))
    assert (limit + 1) / (1 + TIMES * heavy) - 1 <= room.free <= limit / (1 + TIMES * heavy)


@given(LIMITS, TENANTS)
def test_who_comes_later_leaves_a_part_of_what_is_left(limit: int, heavy: int) -> None:
    """A ninth each, if none starts meanwhile."""
    room = Room(limit)
    for tenant in range(heavy):
        before = room.free
        room.flood([tenant])
        assert (before + 1) / (1 + TIMES) - 1 <= room.free <= before / (1 + TIMES)


@given(LIMITS, TENANTS)
def test_whoever_came_first_gives_its_places_up(limit: int, heavy: int) -> None:
    """As theirs start, parts become equal, and as much is free as if all came together."""
    room, everybody = Room(limit), list(range(heavy))
    for tenant in everybody:
        room.flood([tenant])
    for _ in range(limit):
        for tenant in everybody:
            room.start(tenant)
            room.flood(everybody)
    waiting = [room.use.waiting_of(str(tenant)) for tenant in everybody]
    assert max(waiting) - min(waiting) <= 2 * TIMES
    assert abs(room.free - limit / (1 + TIMES * heavy)) <= 2


@given(LIMITS, st.lists(st.booleans(), max_size=50))
def test_who_is_alone_has_all_places(limit: int, starts: list[bool]) -> None:
    """`max_waiting` is what it says where there is one tenant, whatever it is called."""
    room = Room(limit, known=False)
    room.flood([0])
    for start in starts:
        if start:
            room.start(0)
        room.flood([0])
        assert room.free == 0


def test_where_tenants_are_named_nobody_is_first() -> None:
    named = [True]
    use = TenantUse(named=lambda: named[0])
    places = use.join()
    for _ in range(18):
        check_waiting(use, "0", 20, 0.0)
        places.wait("0")
    with pytest.raises(QueueFullError, match="for other tenants"):
        check_waiting(use, "0", 20, 0.0)
    named[0] = False
    check_waiting(use, "0", 20, 0.0)


def test_what_all_share_is_no_tenant() -> None:
    """A prompt that the operator shares makes a daemon with one tenant none with several."""
    use = TenantUse()
    for tenant in ("t", SHARED):
        check_waiting(use, tenant, 10, 0.0)
    assert not use.shared


def test_who_is_refused_is_known_too() -> None:
    """Its first request finds no place; from then on one that is given up is not the other's."""
    room = Room(20, known=False)
    room.flood([0])
    assert not room.accepts(1)
    for _ in range(2):
        room.start(0)
        assert not room.accepts(0)
    assert room.accepts(1)
    assert room.accepts(1)
    assert not room.accepts(1)


def test_the_refusal_says_what_is_so() -> None:
    """How many of its own wait and what to do, nothing of others', and when its own start."""
    room = Room(100)
    room.flood([0])
    room.use.drained.note("another", 90.0)
    room.use.drained.note("0", 70.0)
    with pytest.raises(QueueFullError) as refusal:
        check_waiting(room.use, "0", 100, 100.0)
    assert str(refusal.value) == (
        "89 requests of tenant 0 are waiting already, and the places that are left are for other "
        "tenants; try again later, or send fewer at a time"
    )
    assert refusal.value.retry_after == 30


def test_a_tenants_own_bound_is_asked_first() -> None:
    """It says more: which setting."""
    use = TenantUse(lambda _: Terms(waiting=1))
    use.meet("another")
    use.join().wait("a")
    with pytest.raises(QueueFullError, match="1 requests of tenant a are waiting already; try"):
        check_waiting(use, "a", 2, 0.0)


def test_who_had_a_place_keeps_it() -> None:
    """It waited for its model; others came meanwhile, so that its tenant has more than its part."""
    use = TenantUse()
    loading, queue = use.join(), ConversationQueue(20, use)
    for _ in range(20):
        check_waiting(use, "a", 20, 0.0)
        loading.wait("a")
    use.meet("another")
    for number in range(20):
        loading.leave("a")
        request = msgspec.structs.replace(make_request(f"{number}"), tenant="a")
        with pytest.raises(QueueFullError, match="for other tenants"):
            queue.put(Sequence(request))
        queue.put(Sequence(msgspec.structs.replace(request, placed=True)))
    assert (use.waiting, len(queue)) == (20, 20)
