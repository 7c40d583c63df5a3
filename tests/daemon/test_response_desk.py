"""Waiting for stored responses: never on the event loop, and never for ever."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from umbel.daemon import response_desk
from umbel.daemon.response_desk import ResponseDesk
from umbel.daemon.response_store import ResponseStore
from umbel.scheduler.errors import UnavailableError


class Stuck:
    """Work that waits for a disk, until it is released."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.release = threading.Event()
        self.done = False

    def __call__(self, _store: ResponseStore) -> None:
        """Wait."""
        self.began.set()
        assert self.release.wait(60)
        self.done = True


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[ResponseDesk, Stuck]]:
    """Open a desk over a store in memory."""
    desk, stuck = ResponseDesk(ResponseStore(None, 1 << 20)), Stuck()
    try:
        yield desk, stuck
    finally:
        stuck.release.set()
        await desk.close()


async def test_the_loop_goes_on() -> None:
    """While the disk does not answer."""
    async with opened() as (desk, stuck):
        looking = asyncio.ensure_future(desk.look(stuck))
        assert await asyncio.to_thread(stuck.began.wait, 60)
        assert not looking.done()
        stuck.release.set()
        await looking
        assert stuck.done


async def test_waits_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks hears of it; an answer goes on, and is stored all the same."""
    monkeypatch.setattr(response_desk, "_TIMEOUT", 0.05)
    async with opened() as (desk, stuck):
        await desk.keep(stuck)
        assert not stuck.done
        with pytest.raises(UnavailableError, match="not read in time"):
            await desk.look(ResponseStore.total)
        stuck.release.set()
    assert stuck.done


async def test_few_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are refused at once; who has left does not count."""
    monkeypatch.setattr(response_desk, "_MOST_WAITING", 2)
    async with opened() as (desk, stuck):
        first = asyncio.ensure_future(desk.look(stuck))
        second = asyncio.ensure_future(desk.look(ResponseStore.total))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="too many"):
            await desk.look(ResponseStore.total)
        second.cancel()
        await asyncio.wait([second])
        stuck.release.set()
        assert await desk.look(ResponseStore.total) == 0
        await first


async def test_what_was_begun_is_finished_before_it_closes() -> None:
    """So that a stop loses no response."""
    async with opened() as (desk, stuck):
        done = desk.submit(stuck)
        closing = asyncio.ensure_future(desk.close())
        await asyncio.sleep(0)
        stuck.release.set()
        await closing
        assert done.done()
        assert stuck.done
