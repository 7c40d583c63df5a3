"""Clients that leave with their answers unread: the hand-off over an engine of real models."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from umbel.scheduler.errors import SlowConsumerError
from umbel.scheduler.handoff import EventChannel, Handoff
from umbel.scheduler.request import Event, Finished, FinishReason, Started, TokenEvent

from ..fakes import PATIENCE, read
from ..scenario.bench import Ask, words
from .engine_harness import NAMES, SYSTEM, EngineHarness

LIMIT = 12
"""Events that may wait for a reader here."""


class Crossing:
    """A hand-off over a harness's engine, which is stepped by hand on the event loop's thread."""

    def __init__(self, harness: EngineHarness) -> None:
        self.harness = harness
        self.handoff = Handoff(harness._queue, lambda: None, channel_limit=LIMIT)
        harness.engine._publish = self.handoff.publish

    def submit(self, user: int, tokens: int) -> tuple[str, EventChannel]:
        """Send a request; returns its id and where its events come."""
        prompt = [*SYSTEM, *words(20 + 9 * user, user)]
        request = self.harness._request(Ask(prompt, tokens))
        return request.id, self.handoff.submit(request)

    async def drain(self, *channels: EventChannel) -> list[list[Event]]:
        """Step to the end; some read all the while."""
        readers = [asyncio.create_task(read(channel)) for channel in channels]
        while self.harness.engine.step():
            for _ in range(3):  # the events arrive, and are read
                await asyncio.sleep(0)
        return [await reader for reader in readers]

    def check_answer(self, user: int, events: list[Event]) -> None:
        """See that tokens are those of a cold run."""
        prompt = [*SYSTEM, *words(20 + 9 * user, user)]
        tokens = [event.token for event in events if isinstance(event, TokenEvent)]
        assert self.harness.cold(prompt, tokens).tokens == tokens


@pytest.fixture(params=NAMES)
async def crossing(request: pytest.FixtureRequest) -> AsyncIterator[Crossing]:
    """A hand-off; after the test it has no requests, and nothing is held for any."""
    with EngineHarness.of(request.param) as harness:
        publish = harness.engine._publish
        made = Crossing(harness)
        yield made
        await asyncio.wait_for(made.handoff.wait_idle(), PATIENCE)
        assert made.handoff._live == {}
        harness.engine._publish = publish


async def test_finished_and_unread(crossing: Crossing) -> None:
    """It has ended and its answer lies in the channel: leaving changes nothing any more."""
    name, channel = crossing.submit(0, 6)
    _, other = crossing.submit(1, 9)
    await crossing.drain()
    assert len(channel._events) == 8
    crossing.handoff.cancel(name)
    for user, unread, tokens in ((0, channel, 6), (1, other, 9)):
        events = await read(unread)
        assert isinstance(events[0], Started)
        assert events[-1] == Finished(FinishReason.LENGTH)
        assert len(events) == tokens + 2
        crossing.check_answer(user, events)


async def test_finished_and_not_delivered(crossing: Crossing) -> None:
    """It ends while its client leaves: the client's word is first, the rest is dropped."""
    name, channel = crossing.submit(0, 6)
    while crossing.harness.engine.step():
        pass  # the event loop gets no events
    crossing.handoff.cancel(name)
    assert await read(channel) == [Finished(FinishReason.CANCELLED)]
    await asyncio.sleep(0)
    assert not channel._events


async def test_cut_off_in_a_batch(crossing: Crossing) -> None:
    _, slow = crossing.submit(0, 40)
    others = [crossing.submit(user, 20)[1] for user in (1, 2)]
    answers = await crossing.drain(*others)
    for user, events in enumerate(answers, 1):
        assert events[-1] == Finished(FinishReason.LENGTH)
        assert len(events) == 20 + 2
        crossing.check_answer(user, events)
    unread = await read(slow)
    last = unread.pop()
    assert isinstance(last, Finished)
    assert isinstance(last.error, SlowConsumerError)
    assert len(unread) == LIMIT
    crossing.check_answer(0, unread)
