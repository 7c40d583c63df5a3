"""Loaded, waiting and leaving models: the pool over a loader that only notes."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.daemon.config import ModelSettings
from umbel.daemon.http.failures import APIError
from umbel.daemon.lifecycle.display import Display
from umbel.daemon.lifecycle.service_manager import ServiceManager, StartUp
from umbel.daemon.models.pool import ModelPool
from umbel.daemon.models.slot import ModelSlot, Resident
from umbel.daemon.observability.status import status
from umbel.daemon.requests.arrivals import Arrivals, Wait
from umbel.daemon.requests.workers import Workers
from umbel.models.errors import ModelNotFoundError
from umbel.models.load.watch import Progress
from umbel.scheduler.errors import (
    DeadlineExceededError,
    QueueFullError,
    QuotaSpentError,
    UnavailableError,
)
from umbel.scheduler.tenants import TenantUse, Terms

from ..fakes import PATIENCE, FakeClock

ROOM = 2
"""Models of weight 1 that memory holds."""


class FakeLoader:
    """Loads in no time, or when it is let; says what must never be."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.order: list[str] = []
        self.failing: set[str] = set()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.weights: dict[str, int] = {}
        self._at_work = 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._at_work += 1
        assert self._at_work == 1, "two loads race"
        yield
        self._at_work -= 1

    async def open(self, slot: ModelSlot, begin: Any, downloaded: Any) -> int:
        """Find it."""
        begin("downloading")
        downloaded(Progress(1, 2))
        begin("loading")
        if slot.name in self.failing:
            raise ModelNotFoundError(f"no {slot.name}")
        return self.weights.get(slot.name, 1)

    def fits(self, weights: int, beside: list[int]) -> bool:
        """True if there is room."""
        return sum(beside) + weights <= ROOM

    async def load(self, slot: ModelSlot, begin: Any) -> Resident:
        """Load it."""
        begin("measuring")
        with self._alone():
            await self.may_load.wait()
            await asyncio.sleep(0)
        self.loaded.add(slot.name)
        self.order.append(f"+{slot.name}")
        slot.weight_bytes = self.weights.get(slot.name, 1)
        assert len(self.loaded) <= ROOM
        return Resident(cast("Any", SimpleNamespace(name=slot.name)), *cast("Any", (None, None)))

    def bound_tenants(self) -> None:
        """No tenant has bounds here."""

    async def drop(self, slot: ModelSlot) -> None:
        """Forget a load."""
        self.order.append(f"!{slot.name}")

    async def unload(self, slot: ModelSlot) -> None:
        """Unload it."""
        assert slot.users == 0, "a request uses it"
        with self._alone():
            await asyncio.sleep(0)
        slot.resident = None
        self.loaded.discard(slot.name)
        self.order.append(f"-{slot.name}")


class World:
    """A pool of some models."""

    def __init__(
        self, *names: str, waiting: int = 100, timeout: float = PATIENCE, **own: Any
    ) -> None:
        self.clock = FakeClock()
        self.loader = FakeLoader()
        slots = [ModelSlot(name, own.get(name, ModelSettings()), self.clock) for name in names]
        self.slots = {slot.name: slot for slot in slots}
        workers, told = Workers(1, 1.0, TenantUse()), StartUp(ServiceManager(None), 1.0, Display())
        self.tenant_use = TenantUse(lambda tenant: self.terms.get(tenant, Terms()))
        self.terms: dict[str, Terms] = {}
        self.pool = ModelPool(
            slots,
            cast("Any", self.loader),
            workers,
            told,
            self.tenant_use,
            most_waiting=waiting,
            timeout=timeout,
        )

    async def use(
        self,
        name: str,
        until: asyncio.Event | None = None,
        tenant: str = "default",
        wait: Wait | None = None,
    ) -> str:
        """Use a model for as long as nothing happens; returns who served."""
        wait = wait or Wait(time.monotonic())
        with ExitStack() as held:
            service = await self.pool.use(self.slots[name], tenant, held, wait)
            assert name in self.loader.loaded
            await (asyncio.sleep(0) if until is None else until.wait())
            assert name in self.loader.loaded, "it went under its user"
            self.clock.advance(1)
            return cast("Any", service).name  # type: ignore[no-any-return]


async def settle() -> None:
    """Let everything go on that can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_all_who_ask_share_one_load() -> None:
    """However many ask at once."""
    world = World("a", "b")
    assert await asyncio.gather(*(world.use("b") for _ in range(20))) == ["b"] * 20
    assert world.loader.order == ["+b"]


async def test_the_one_used_longest_ago_goes() -> None:
    """Not the one that was loaded first."""
    world = World("a", "b", "c")
    for name in ("a", "b", "a", "c"):
        await world.use(name)
    assert world.loader.order == ["+a", "+b", "-b", "+c"]


async def test_nobody_is_unloaded_under_its_users() -> None:
    world, over = World("a", "b", "c"), asyncio.Event()
    await world.use("b")
    using = [asyncio.create_task(world.use(name, over)) for name in ("a", "b")]
    await settle()
    asked = asyncio.create_task(world.use("c"))
    await settle()
    late = asyncio.create_task(world.use("a"))
    await settle()
    assert world.slots["a"].residence == "unloading"
    assert not asked.done()
    assert not late.done()
    over.set()
    assert await asyncio.gather(*using, asked, late) == ["a", "b", "c", "a"]
    assert world.loader.order == ["+b", "+a", "-a", "+c", "-b", "+a"]


async def test_pinned_ones_leave_no_room() -> None:
    pinned = ModelSettings(pinned=True)
    world = World("a", "b", "c", a=pinned, b=pinned)
    await world.use("a")
    await world.use("b")
    for _ in range(2):
        with pytest.raises(UnavailableError, match="a, b stay loaded: they are pinned"):
            await world.use("c")
    assert await world.use("a") == "a"


async def test_a_failure_is_told_to_all_and_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for each who asks: a load may take minutes to fail."""
    world = World("a", "b")
    world.loader.failing.add("b")
    for _ in range(3):
        with pytest.raises(UnavailableError, match="b cannot be loaded: no b"):
            await world.use("b")
    assert world.loader.order == ["!b"]
    held, wait = ExitStack(), Wait(time.monotonic())
    with held, pytest.raises(UnavailableError) as refusal:
        await world.pool.use(world.slots["b"], "a tenant", held, wait, sees_why=False)
    assert str(refusal.value) == "b cannot be loaded; the daemon's log says why"
    told = [
        status(world.pool, Arrivals(), "ready", None, tenant=tenant).models[1].failure
        for tenant in (None, "a tenant")
    ]
    assert told == ["no b", "it cannot be loaded"], "a reason may name folders"
    world.loader.failing.clear()
    monkeypatch.setattr("umbel.daemon.models.pool._RETRY", 0.0)
    assert await world.use("b") == "b"
    assert world.slots["b"].failure is None


async def test_waiting_is_bounded_in_number_and_time() -> None:
    """By the same bounds as for a place in the queue."""
    world = World("a", waiting=2, timeout=0.05)
    world.loader.may_load.clear()
    asked = [asyncio.create_task(world.use("a")) for _ in range(2)]
    await settle()
    assert (world.tenant_use.waiting, world.slots["a"].phase) == (2, "measuring")
    with pytest.raises(QueueFullError):
        await world.use("a")
    for task in asked:
        with pytest.raises(DeadlineExceededError, match="a was not loaded in time"):
            await task
    assert world.tenant_use.waiting == 0
    world.loader.may_load.set()
    assert await world.use("a") == "a"


async def test_a_tenants_bound_holds_for_what_waits_for_models_too() -> None:
    """Together with what waits in queues; others are not refused for it."""
    world = World("a", "b")
    world.terms["t"] = Terms(waiting=3)
    queued = world.tenant_use.join()
    queued.wait("t")
    world.loader.may_load.clear()
    asked = [asyncio.create_task(world.use(name, tenant="t")) for name in ("a", "b")]
    await settle()
    with pytest.raises(QueueFullError, match="3 requests of tenant t are waiting"):
        await world.use("a", tenant="t")
    asked.append(asyncio.create_task(world.use("a")))
    await settle()
    world.loader.may_load.set()
    assert await asyncio.gather(*asked) == ["a", "b", "a"]
    assert world.tenant_use.waiting == 1


async def test_a_request_waits_for_a_model_as_long_as_it_asks() -> None:
    """From its arrival on, and no longer than the daemon allows; then its place is free."""
    world = World("a")
    world.loader.may_load.clear()
    now = time.monotonic()
    for wait in (Wait(now, 0.05), Wait(now - 2 * PATIENCE), Wait(now - 10, 5)):
        with pytest.raises(DeadlineExceededError, match="a was not loaded in time"):
            await world.use("a", wait=wait)
        assert world.tenant_use.waiting == 0
    world.loader.may_load.set()
    assert await world.use("a", wait=Wait(now, PATIENCE)) == "a"


async def test_one_keeps_its_place_until_it_is_queued() -> None:
    world, over = World("a"), asyncio.Event()
    world.terms["t"] = Terms(waiting=1)
    world.loader.may_load.clear()
    wait = Wait(time.monotonic())
    asked = asyncio.create_task(world.use("a", over, tenant="t", wait=wait))
    await settle()
    world.loader.may_load.set()
    await settle()
    assert world.slots["a"].users == 1
    assert world.tenant_use.waiting_of("t") == 1
    wait.give_place_back()
    wait.give_place_back()
    assert world.tenant_use.waiting_of("t") == 0
    over.set()
    assert await asked == "a"
    assert world.tenant_use.waiting == 0


async def test_nothing_is_loaded_for_whose_tokens_are_spent() -> None:
    """Nor unloaded for it; what is loaded says so itself."""
    world = World("a", "b", "c")
    world.terms["t"] = Terms(tokens_per_minute=60)
    await world.use("a")
    await world.use("b")
    world.tenant_use.quotas.charge("t", 120, time.monotonic())
    with pytest.raises(QuotaSpentError, match="tenant t has spent"):
        await world.use("c", tenant="t")
    assert world.loader.order == ["+a", "+b"]
    assert world.tenant_use.waiting == 0
    assert await world.use("a", tenant="t") == "a"


async def test_one_who_leaves_as_it_is_admitted_is_counted_no_more() -> None:
    """Else the model could never be unloaded."""
    world = World("a")
    world.loader.may_load.clear()
    asked = [asyncio.create_task(world.use("a")) for _ in range(3)]
    await settle()
    world.slots["a"].admit_waiters()
    for task in asked:
        task.cancel()
    await settle()
    assert world.slots["a"].users == 0


async def test_who_waited_first_is_admitted_first() -> None:
    """Turns of a conversation that came while it was loaded stay in order."""
    world = World("a")
    world.loader.may_load.clear()
    admitted: list[int] = []

    async def use(number: int) -> None:
        await world.use("a")
        admitted.append(number)

    asked = [asyncio.create_task(use(number)) for number in range(20)]
    await settle()
    world.loader.may_load.set()
    await asyncio.gather(*asked)
    assert admitted == list(range(20))


async def test_one_who_leaves_harms_no_other() -> None:
    """The load goes on for the rest."""
    world = World("a")
    world.loader.may_load.clear()
    leaving, staying = (asyncio.create_task(world.use("a")) for _ in range(2))
    await settle()
    leaving.cancel()
    await settle()
    world.loader.may_load.set()
    assert await staying == "a"
    assert world.tenant_use.waiting == 0


async def test_nobody_waits_for_a_daemon_that_stops() -> None:
    world = World("a", "b")
    await world.use("a")
    world.loader.may_load.clear()
    asked = asyncio.create_task(world.use("b"))
    await settle()
    await world.pool.close()
    for name in ("b", "a"):
        with pytest.raises(UnavailableError, match="the daemon is stopping"):
            await (asked if name == "b" else world.use(name))
    assert world.slots["b"].loading is None


async def test_idle_ones_are_unloaded() -> None:
    """After their own time; those without one, and those in use, stay."""
    idle = ModelSettings(unload_after=10)
    world, over = World("a", "b", b=idle), asyncio.Event()
    using = asyncio.create_task(world.use("b", over))
    await settle()
    await world.use("a")
    sweeping = asyncio.create_task(world.pool.unload_idle())
    world.clock.advance(1000)
    await asyncio.sleep(0.6)
    assert world.loader.order == ["+b", "+a"]
    over.set()
    await using
    world.clock.advance(11)
    for _ in range(300):
        if len(world.loader.order) == 3:
            break
        await asyncio.sleep(0.1)
    assert world.loader.order == ["+b", "+a", "-b"]
    sweeping.cancel()


def test_names_lead_to_models() -> None:
    """A model's own names are stronger than aliases; an alias to nowhere is the default."""

    async def look() -> None:
        world = World("a", "b", b=ModelSettings(aliases=["bee", "a"]))
        world.pool.aliases = {"x": "b", "y": "default", "b": "a"}
        found = {name: slot.name for name, slot in world.pool.names().items()}
        assert found == {"a": "b", "b": "b", "bee": "b", "x": "b", "y": "a"}
        assert [world.pool.find(name).name for name in (None, "", "default")] == ["a"] * 3
        with pytest.raises(APIError, match="serves 'a', 'b'"):
            world.pool.find("z")

    asyncio.run(look())


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5)), max_size=40))
def test_any_order_of_requests_is_served(asks: list[tuple[str, int]]) -> None:
    """Each by its model, never more than there is room for, and none waits for ever."""

    async def serve() -> None:
        world = World(*"abcd", d=ModelSettings(pinned=True))

        async def one(name: str, turns: int) -> str:
            for _ in range(turns):
                await asyncio.sleep(0)
            return await world.use(name)

        answers = await asyncio.wait_for(asyncio.gather(*(one(*ask) for ask in asks)), PATIENCE)
        assert answers == [name for name, _ in asks]
        assert "-d" not in world.loader.order

    asyncio.run(serve())
