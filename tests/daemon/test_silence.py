"""Waits with one timer for all of them."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from umbel.daemon.http.exchange import Silence

SECONDS = 0.05


async def of_no_end() -> None:
    """Wait for ever."""
    await asyncio.Event().wait()


async def takes_too_long(silence: Silence, wait: Awaitable[None]) -> None:
    """Check that a wait is cut off after all of its time."""
    start = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await silence.bound(wait)
    assert asyncio.get_running_loop().time() - start >= SECONDS


def test_each_wait_is_bounded() -> None:
    """One that takes too long is cancelled, and one after it again, but none that ends in time."""
    cancelled: list[str] = []

    async def waits(name: str) -> None:
        try:
            await of_no_end()
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    async def run() -> None:
        silence = Silence(SECONDS)
        assert await silence.bound(asyncio.sleep(0, "there")) == "there"
        for name in ("first", "second"):
            await takes_too_long(silence, waits(name))
            assert await silence.bound(asyncio.sleep(0, name)) == name
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        silence.close()

    asyncio.run(run())
    assert cancelled == ["first", "second"]


def test_one_timer_serves_many_waits() -> None:
    """It is set again when it rings, for as long as the present wait has left."""
    timers: list[float] = []

    async def run() -> None:
        loop: Any = asyncio.get_running_loop()
        silence, real = Silence(SECONDS), loop.call_later

        def call_later(seconds: float, *rest: Any) -> Any:
            timers.append(seconds)
            return real(seconds, *rest)

        loop.call_later = call_later
        for _ in range(200):
            await silence.bound(asyncio.sleep(0))
        assert timers == [SECONDS]
        del loop.call_later
        await asyncio.sleep(2 * SECONDS)  # it rings while no task waits
        loop.call_later = call_later
        await takes_too_long(silence, of_no_end())
        silence.close()

    asyncio.run(run())
    assert all(0 < seconds <= SECONDS for seconds in timers)
    assert timers[:2] == [SECONDS, SECONDS]


def test_a_wait_that_began_late_has_all_its_time() -> None:
    """The timer that an earlier one set rings before, and changes nothing."""

    async def run() -> None:
        silence = Silence(SECONDS)
        await silence.bound(asyncio.sleep(0.8 * SECONDS))
        await takes_too_long(silence, of_no_end())
        silence.close()

    asyncio.run(run())


@pytest.mark.parametrize("late", [False, True], ids=["alone", "as it rings"])
def test_a_cancelled_task_stays_cancelled(*, late: bool) -> None:
    """A cancellation of the task works, also if the wait takes too long in that moment."""

    async def run() -> None:
        silence = Silence(SECONDS if late else 60.0)
        task = asyncio.ensure_future(silence.bound(of_no_end()))
        await asyncio.sleep(0)
        if late:
            silence._rang = True
            task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        silence.close()

    asyncio.run(run())


def test_no_timer_is_left() -> None:
    """A closed one holds nothing."""

    async def run() -> None:
        silence = Silence(60.0)
        await silence.bound(asyncio.sleep(0))
        timer = silence._timer
        assert timer is not None
        silence.close()
        silence.close()
        assert timer.cancelled()

    asyncio.run(run())


def test_a_task_is_needed() -> None:
    """A wait outside of a task cannot be cancelled."""

    async def run() -> None:
        silence, found = Silence(60.0), []
        work = asyncio.sleep(0)

        def outside() -> None:
            try:
                silence.bound(work).send(None)
            except RuntimeError as error:
                found.append(str(error))

        asyncio.get_running_loop().call_soon(outside)
        await asyncio.sleep(0)
        assert found == ["a wait outside of a task cannot be ended"]
        work.close()

    asyncio.run(run())
