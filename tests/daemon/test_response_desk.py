"""Waiting for stored responses: never on the event loop, and never for ever."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from structlog.testing import capture_logs

from umbel.daemon.responses import desk as response_desk
from umbel.daemon.responses.desk import ResponseDesk
from umbel.daemon.responses.store import ResponseStore
from umbel.scheduler.errors import UnavailableError


class Stuck:
    """Work that waits for a disk, until it is released."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.release = threading.Event()
        self.done = False

    def __call__(self, _store: ResponseStore) -> None:
        self.began.set()
        assert self.release.wait(60)
        self.done = True


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[ResponseDesk, Stuck]]:
    desk, stuck = ResponseDesk(ResponseStore(None, 1 << 20)), Stuck()
    try:
        yield desk, stuck
    finally:
        stuck.release.set()
        await desk.close()


async def test_loop_goes_on_while_the_disk_is_stuck() -> None:
    async with opened() as (desk, stuck):
        looking = asyncio.ensure_future(desk.look(stuck))
        assert await asyncio.to_thread(stuck.began.wait, 60)
        assert not looking.done()
        stuck.release.set()
        await looking
        assert stuck.done


async def test_waits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look ends with an error; an answer goes on, and is stored all the same."""
    monkeypatch.setattr(response_desk, "_TIMEOUT", 0.05)
    async with opened() as (desk, stuck):
        await desk.keep(stuck, 0)
        assert not stuck.done
        with pytest.raises(UnavailableError, match="not read in time"):
            await desk.look(ResponseStore.total)
        stuck.release.set()
    assert stuck.done


async def test_waiting_looks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More are refused at once; a look that was given up does not count."""
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


async def test_close_finishes_what_was_begun() -> None:
    """So that a stop loses no response."""
    async with opened() as (desk, stuck):
        done = desk.leave(stuck, 0)
        assert done is not None
        closing = asyncio.ensure_future(desk.close())
        await asyncio.sleep(0)
        stuck.release.set()
        await closing
        assert done.done()
        assert stuck.done


async def test_unattended_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In number and in bytes. A response beyond it is not stored, and the log says so."""
    monkeypatch.setattr(response_desk, "_MOST_KEPT", 2)
    monkeypatch.setattr(response_desk, "_MOST_KEPT_BYTES", 10)
    stored: list[int] = []

    def note(number: int, _store: ResponseStore) -> None:
        stored.append(number)

    async with opened() as (desk, stuck):
        looking = asyncio.ensure_future(desk.look(stuck))
        assert await asyncio.to_thread(stuck.began.wait, 60)
        with capture_logs() as told:
            for number, nbytes in enumerate((6, 6, 4, 0)):
                desk.leave(partial(note, number), nbytes)
            await desk.keep(partial(note, 4), 0)
        words = ("a response is not stored", "too many responses wait to be stored")
        assert [(line["event"], line["reason"]) for line in told] == [words] * 3
        stuck.release.set()
        await desk.look(ResponseStore.total)  # what was left before it is done
        await desk.keep(partial(note, 5), 10)
        await looking
    assert stored == [0, 2, 5]


async def test_nothing_is_stored_after_the_end() -> None:
    """A look raises an error."""
    async with opened() as (desk, stuck):
        await desk.close()
        with capture_logs() as told:
            assert desk.leave(stuck, 0) is None
            await desk.keep(stuck, 0)
        assert [line["reason"] for line in told] == ["the daemon is stopping"] * 2
        with pytest.raises(UnavailableError, match="stopping"):
            await desk.look(ResponseStore.total)
    assert not stuck.done


async def test_failed_store_is_logged() -> None:
    """The answer goes on, and so does the desk."""

    def fail(_store: ResponseStore) -> None:
        raise ZeroDivisionError

    async with opened() as (desk, _):
        with capture_logs() as told:
            await desk.keep(fail, 0)
        assert [line["event"] for line in told] == ["a response is not stored"]
        assert await desk.look(ResponseStore.total) == 0
