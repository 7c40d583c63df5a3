"""The threads that decode, render and tokenise."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

from umbel.daemon.http.bodies import SMALL_BODY
from umbel.daemon.requests.arrivals import Wait
from umbel.daemon.requests.workers import AbandonedError, Check, Workers
from umbel.scheduler.errors import DeadlineExceededError, QueueFullError
from umbel.scheduler.tenants import TenantUse, Terms

PATIENCE = 30.0
SMALL, LARGE = 10, SMALL_BODY + 1


class Stages:
    """Work in two stages, of which the first takes as long as it is told."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.ended: str | None = None

    def __call__(self, check: Check) -> str:
        """Do both."""
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        try:
            check()
        except AbandonedError:
            self.ended = "abandoned"
            raise
        self.ended = "done"
        return "done"


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[Workers]:
    """Workers for which four may wait."""
    made = Workers(4, PATIENCE, TenantUse())
    yield made
    made.close()


async def begun(stages: Stages) -> None:
    """Wait until work is under way."""
    assert await asyncio.to_thread(stages.begun.wait, PATIENCE)


async def test_the_result_of_the_work_is_returned(workers: Workers) -> None:
    """And raises what it raises."""
    assert await workers.run(lambda _: threading.current_thread().name, SMALL, "t") != "MainThread"
    with pytest.raises(ZeroDivisionError):
        await workers.run(lambda _: 1 // 0, LARGE, "t")


async def test_large_bodies_do_not_keep_small_ones_waiting(workers: Workers) -> None:
    """One large body is at work and others wait for its thread: small ones pass."""
    large = [Stages() for _ in range(3)]
    tasks = [asyncio.create_task(workers.run(each, LARGE, "t")) for each in large]
    await begun(large[0])
    assert await workers.run(lambda _: "small", SMALL, "t") == "small"
    assert [each.begun.is_set() for each in large] == [True, False, False]
    for each in large:
        each.go_on.set()
    assert await asyncio.gather(*tasks) == ["done"] * 3


async def test_an_abandoned_request_frees_its_thread_at_the_next_stage(workers: Workers) -> None:
    """Running work ends there; waiting work never begins."""
    running, waiting, after = Stages(), Stages(), Stages()
    tasks = [asyncio.create_task(workers.run(each, LARGE, "t")) for each in (running, waiting)]
    await begun(running)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    running.go_on.set()
    after.go_on.set()
    assert await workers.run(after, LARGE, "t") == "done"
    assert (running.ended, waiting.begun.is_set()) == ("abandoned", False)


async def test_abandoned_work_is_released(workers: Workers) -> None:
    """The body of a request that was cancelled while it waited for a thread is not kept."""
    first = Stages()
    running = asyncio.create_task(workers.run(first, LARGE, "t"))
    await begun(first)
    left = Stages()
    kept = weakref.ref(left)
    task = asyncio.create_task(workers.run(left, LARGE, "t"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    del left, task
    gc.collect()
    assert kept() is None
    first.go_on.set()
    assert await running == "done"


async def test_cancelling_starts_no_more_threads(workers: Workers) -> None:
    """However many leave in the middle of their work, there are only so many threads."""
    crowd = [Stages() for _ in range(50)]
    for each in crowd:
        task = asyncio.create_task(workers.run(each, SMALL, "t"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert sum(each.begun.is_set() for each in crowd) <= 2
    assert sum(t.name.startswith("umbel-text") for t in threading.enumerate()) <= 3
    for each in crowd:
        each.go_on.set()


async def test_the_time_is_bounded() -> None:
    """A late request fails at once, also in the middle of a stage, and the work ends."""
    workers, late = Workers(4, 0.05, TenantUse()), Stages()
    with pytest.raises(DeadlineExceededError):
        await workers.run(late, LARGE, "t")
    late.go_on.set()
    await asyncio.to_thread(workers._large._threads.shutdown)
    assert late.ended == "abandoned"
    workers.close()


async def test_a_request_waits_as_long_as_it_asks(workers: Workers) -> None:
    """From its arrival on, and no longer than the daemon allows."""
    now = time.monotonic()
    for wait in (Wait(now, 0.05), Wait(now - 2 * PATIENCE), Wait(now - 10, 5)):
        late = Stages()
        with pytest.raises(DeadlineExceededError, match="not tokenised in time"):
            await workers.run(late, SMALL, "t", wait)
        late.go_on.set()
    assert await workers.run(lambda _: "done", SMALL, "t", Wait(now, PATIENCE)) == "done"


async def test_one_that_has_a_place_is_not_refused(workers: Workers) -> None:
    """It waited for a model, and is counted where it did."""
    first = [Stages() for _ in range(2)]
    running = [asyncio.create_task(workers.run(each, SMALL, "t")) for each in first]
    for each in first:
        await begun(each)
    workers.most_waiting = 0
    wait = Wait(time.monotonic())
    with pytest.raises(QueueFullError):
        await workers.run(lambda _: None, SMALL, "t", wait)
    wait.take_place(lambda: None)
    let_in = [
        asyncio.create_task(workers.run(lambda _: "done", SMALL, "t", wait)),
        asyncio.create_task(workers.run(lambda _: "done", SMALL, "t", admitted=True)),
    ]
    await asyncio.sleep(0)
    for each in first:
        each.go_on.set()
    assert await asyncio.gather(*let_in, *running) == ["done"] * 4


async def test_a_request_counted_elsewhere_counts_once() -> None:
    """A request with a place keeps it while it waits for a thread; others take one there."""
    use = TenantUse()
    elsewhere, workers, first = use.join(), Workers(9, PATIENCE, use), Stages()
    running = asyncio.create_task(workers.run(first, LARGE, "t"))
    await begun(first)
    assert use.waiting == 0, "a thread was free"
    elsewhere.wait("t")
    wait = Wait(time.monotonic())
    wait.take_place(lambda: elsewhere.leave("t"))
    tasks = [asyncio.create_task(workers.run(first, LARGE, "t", each)) for each in (wait, None)]
    await asyncio.sleep(0)
    assert use.waiting == 2
    first.go_on.set()
    await asyncio.gather(running, *tasks)
    assert use.waiting == 1
    workers.close()


async def test_a_free_thread_refuses_no_request() -> None:
    """A tenant that may have one waiting has as many at once as there are threads."""
    workers = Workers(9, PATIENCE, TenantUse(lambda _: Terms(waiting=1)))
    pair = [workers.run(lambda _: "done", SMALL, "t") for _ in range(2)]
    assert await asyncio.gather(*pair) == ["done"] * 2
    workers.close()


async def test_failed_work_releases_its_body(workers: Workers) -> None:
    """At once, not when garbage is collected: its bytes are given back to the budget."""

    class Body:
        """The content of a request."""

    def fail(body: Body) -> None:
        raise ZeroDivisionError(str(body))

    async def ask() -> "weakref.ref[Body]":
        body = Body()
        with suppress(ZeroDivisionError):
            await workers.run(lambda _: fail(body), LARGE, "t")
        return weakref.ref(body)

    gc.disable()
    try:
        kept = await ask()
        await asyncio.to_thread(workers._large._threads.shutdown)
        assert kept() is None
    finally:
        gc.enable()


async def test_an_abandoned_request_takes_no_turn() -> None:
    """A tenant whose requests were cancelled is next as soon as one that sent none."""
    workers, first = Workers(100, PATIENCE, TenantUse()), Stages()
    order: list[str] = []
    running = asyncio.create_task(workers.run(first, LARGE, "other"))
    await begun(first)
    left = [asyncio.create_task(workers.run(first, LARGE, "t")) for _ in range(20)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    others = [workers.run(lambda _: order.append("other"), LARGE, "other") for _ in range(20)]
    live = workers.run(lambda _: order.append("t"), LARGE, "t")
    tasks = [asyncio.create_task(each) for each in (*others, live)]
    await asyncio.sleep(0)
    first.go_on.set()
    await asyncio.gather(running, *tasks)
    assert order.index("t") <= 1
    workers.close()


async def test_the_number_that_waits_is_bounded(workers: Workers) -> None:
    """As many may wait for a thread as may wait for the engine, together."""
    crowd = [Stages() for _ in range(5)]
    tasks = [asyncio.create_task(workers.run(each, LARGE, "t")) for each in crowd]
    await begun(crowd[0])
    with pytest.raises(QueueFullError, match="4 requests are waiting"):
        await workers.run(lambda _: None, SMALL, "t")
    for each in crowd:
        each.go_on.set()
    assert await asyncio.gather(*tasks) == ["done"] * 5
    use = TenantUse()
    elsewhere = use.join()
    for _ in range(4):
        elsewhere.wait("another")
    with pytest.raises(QueueFullError, match="4 requests are waiting"):
        await Workers(4, PATIENCE, use).run(lambda _: None, SMALL, "t")


async def test_tenants_take_turns() -> None:
    """One that comes late does not wait behind all that another has sent."""
    workers, first = Workers(100, PATIENCE, TenantUse()), Stages()
    order: list[str] = []

    async def ask(name: str, tenant: str) -> None:
        await workers.run(lambda _: order.append(name), LARGE, tenant)

    running = asyncio.create_task(workers.run(first, LARGE, "heavy"))
    await begun(first)
    tasks = [asyncio.create_task(ask(f"heavy {n}", "heavy")) for n in range(20)]
    tasks += [asyncio.create_task(ask(f"light {n}", "light")) for n in range(2)]
    await asyncio.sleep(0)
    first.go_on.set()
    await asyncio.gather(running, *tasks)
    assert order[:4] == ["heavy 0", "light 0", "heavy 1", "light 1"]
    assert order[4:] == [f"heavy {n}" for n in range(2, 20)]
    workers.close()


async def test_slow_work_of_a_tenant_leaves_a_thread_to_others() -> None:
    """However much it has sent: another's begins at once, and its own goes on afterwards."""
    workers = Workers(100, PATIENCE, TenantUse())
    slow = [Stages() for _ in range(4)]
    tasks = [asyncio.create_task(workers.run(each, SMALL, "heavy")) for each in slow]
    for each in slow[:2]:
        await begun(each)
    assert await workers.run(lambda _: "light", SMALL, "light") == "light"
    assert [each.begun.is_set() for each in slow] == [True, True, False, False]
    others = [Stages() for _ in range(2)]
    tasks += [
        asyncio.create_task(workers.run(each, SMALL, tenant))
        for each, tenant in zip(others, ("light", "third"), strict=True)
    ]
    await begun(others[0])
    for each in slow[:2]:
        each.go_on.set()
    for each in (others[1], slow[2]):
        await begun(each)
    assert not slow[3].begun.is_set(), "all three threads are taken"
    for each in (*slow, *others):
        each.go_on.set()
    assert await asyncio.gather(*tasks) == ["done"] * 6
    workers.close()


async def test_places_are_left_for_others() -> None:
    """A tenant that sends without end does not fill the queue of work: another is let in."""
    use = TenantUse(named=lambda: True)
    workers, first = Workers(18, PATIENCE, use), Stages()
    tasks: list[asyncio.Task[str]] = [asyncio.create_task(workers.run(first, LARGE, "heavy"))]
    await begun(first)
    crowd = [asyncio.create_task(workers.run(first, LARGE, "heavy")) for _ in range(30)]
    await asyncio.sleep(0)
    refused = [task for task in crowd if task.done()]
    assert len(refused) == 30 - 16
    with pytest.raises(QueueFullError, match="are for other tenants"):
        await refused[0]
    tasks += [task for task in crowd if task not in refused]
    tasks.append(asyncio.create_task(workers.run(first, LARGE, "light")))
    first.go_on.set()
    assert await asyncio.gather(*tasks) == ["done"] * len(tasks)
    assert use.waiting == 0
    await asyncio.gather(*refused, return_exceptions=True)
    workers.close()


async def test_closing_cancels_waiting_work() -> None:
    """Work that has not begun is cancelled, and counts no more."""
    use = TenantUse()
    workers, first = Workers(4, PATIENCE, use), Stages()
    tasks = [asyncio.create_task(workers.run(first, LARGE, "t")) for _ in range(3)]
    await begun(first)
    workers.close()
    ended = await asyncio.wait_for(asyncio.gather(*tasks[1:], return_exceptions=True), PATIENCE)
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2
    first.go_on.set()
    assert await tasks[0] == "done"
    assert use.waiting == 0
