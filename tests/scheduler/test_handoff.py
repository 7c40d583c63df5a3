"""The crossing between the event loop and the MLX thread."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from umbel.scheduler.engine import Engine
from umbel.scheduler.errors import QueueFullError, SlowConsumerError, UnavailableError
from umbel.scheduler.handoff import EventChannel, Handoff
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, Started, TokenEvent
from umbel.scheduler.sequence import Sequence
from umbel.scheduler.thread import MLXThread

from ..fakes import PATIENCE, FakeRunner, make_request, no_reuse, read, reference

CHANNEL_LIMIT = 16
QUEUE_LIMIT = 200


class Service:
    """A hand-off, a real thread, and an engine over a fake model. Made on the event loop."""

    def __init__(self, *, queue_limit: int = QUEUE_LIMIT, max_batch: int = 4) -> None:
        self.runner = FakeRunner()
        self.thread = MLXThread(on_exit=lambda: None)
        self.queue = ConversationQueue(queue_limit)
        self.handoff = Handoff(self.queue, self.thread.wake, channel_limit=CHANNEL_LIMIT)
        self.engine = Engine(
            *no_reuse(self.runner),
            self.queue,
            self.handoff.publish,
            eos_ids=frozenset(),
            prefill_chunk=4,
            clock=lambda: 100.0,
            max_batch=max_batch,
        )
        self.thread.start()
        self.thread.attach(self.engine.step)

    async def wait_held(self) -> None:
        """Wait until the engine is stuck in a computation."""
        assert await asyncio.to_thread(self.runner.held.wait, PATIENCE)

    async def wait_at_rest(self) -> None:
        """Wait until the engine has let every sequence go."""
        while self.runner.live_states:  # noqa: ASYNC110  (the engine announces no such thing)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop the thread, whatever it does."""
        self.runner.let_go()
        await asyncio.to_thread(self.thread.stop, PATIENCE)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """Run a service for the length of a test."""
    running = Service()
    yield running
    await running.close()


@pytest.fixture
async def single() -> AsyncIterator[Service]:
    """Run a service that computes one request at a time and lets three wait."""
    running = Service(queue_limit=3, max_batch=1)
    yield running
    await running.close()


def answer(prompt: list[int], max_tokens: int = 4) -> list[Event]:
    """List the events of a request that goes well."""
    tokens, reason = reference(prompt, max_tokens)
    return [Started(0, 0, 100.0), *(TokenEvent(token, 100.0) for token in tokens), Finished(reason)]


def error_of(events: list[Event]) -> object:
    """Find the error that a request ended with."""
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.ERROR
    return events[-1].error


class TestChannel:
    """One request's events on their way to one reader."""

    async def test_events_come_in_order(self) -> None:
        """The reader gets what was delivered, also what came before it asked."""
        channel = EventChannel(4)
        sent: list[Event] = [
            Started(2, 1, 100.0),
            TokenEvent(5, 100.0),
            Finished(FinishReason.STOP),
        ]
        for event in sent:
            assert channel.deliver(event)
        assert await read(channel) == sent

    async def test_a_waiting_reader_is_woken(self) -> None:
        """A reader may be there first."""
        channel = EventChannel(4)
        reader = asyncio.create_task(channel.get())
        await asyncio.sleep(0)
        assert not reader.done()
        channel.deliver(TokenEvent(5, 100.0))
        assert await reader == TokenEvent(5, 100.0)

    async def test_the_channel_is_bounded_but_for_the_end(self) -> None:
        """One event too many is refused and not kept; the end always fits."""
        channel = EventChannel(2)
        assert channel.deliver(TokenEvent(1, 100.0))
        assert channel.deliver(TokenEvent(2, 100.0))
        assert not channel.deliver(TokenEvent(3, 100.0))
        assert channel.deliver(Finished(FinishReason.LENGTH))
        assert await read(channel) == [
            TokenEvent(1, 100.0),
            TokenEvent(2, 100.0),
            Finished(FinishReason.LENGTH),
        ]

    async def test_nothing_follows_the_end(self) -> None:
        channel = EventChannel(4)
        channel.deliver(Finished(FinishReason.CANCELLED))
        assert channel.deliver(TokenEvent(1, 100.0))
        assert channel.deliver(Finished(FinishReason.STOP))
        assert await channel.get() == Finished(FinishReason.CANCELLED)
        assert not channel._events

    async def test_a_reader_that_gives_up_loses_nothing(self) -> None:
        """A `get` that was cancelled takes no event with it."""
        channel = EventChannel(4)
        reader = asyncio.create_task(channel.get())
        await asyncio.sleep(0)
        channel.deliver(TokenEvent(1, 100.0))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await channel.get() == TokenEvent(1, 100.0)


class TestRequests:
    """The way there and back."""

    async def test_events_cross_in_order(self, service: Service) -> None:
        """A client hears the start, each token, and the end, as they were computed."""
        channel = service.handoff.submit(make_request("a", [1, 2, 3, 4, 5, 6], max_tokens=9))
        assert await read(channel) == answer([1, 2, 3, 4, 5, 6], 9)
        await service.handoff.wait_idle()

    async def test_an_idle_engine_is_woken_each_time(self, service: Service) -> None:
        """Request after request finds the engine asleep, and is served."""
        for number in range(200):
            channel = service.handoff.submit(make_request(str(number), [number], max_tokens=1))
            assert await read(channel) == answer([number], 1)

    async def test_two_hundred_at_once_all_end(self, service: Service) -> None:
        """A crowd in twenty conversations: everyone gets the right answer, or its cancellation."""

        async def serve(number: int) -> None:
            prompt = [number, *range(number % 7)]
            request = make_request(str(number), prompt, conversation=f"c{number % 20}")
            channel = service.handoff.submit(request)
            if number % 5:
                assert await read(channel) == answer(prompt)
                return
            await asyncio.sleep(0)
            service.handoff.cancel(request.id)
            events = await read(channel)
            assert events[:-1] == answer(prompt)[: len(events) - 1]
            assert events[-1] in (
                Finished(FinishReason.CANCELLED),
                Finished(FinishReason.LENGTH),
            )

        await asyncio.gather(*(serve(number) for number in range(200)))
        await asyncio.wait_for(service.handoff.wait_idle(), PATIENCE)
        await service.wait_at_rest()
        assert len(service.queue) == 0

    async def test_a_fault_reaches_its_own_client(self, service: Service) -> None:
        service.runner.fail_at([1, 2, 3], 3, ValueError("broken"))
        bad, good = (
            service.handoff.submit(make_request("bad", [1, 2, 3])),
            service.handoff.submit(make_request("good", [4, 5, 6])),
        )
        assert "broken" in str(error_of(await read(bad)))
        assert await read(good) == answer([4, 5, 6])

    async def test_a_full_queue_refuses(self, single: Service) -> None:
        """At the bound a client is told to come back; nothing is left behind of its request."""
        single.runner.hold()
        channels = [single.handoff.submit(make_request("0"))]
        await single.wait_held()
        channels += [single.handoff.submit(make_request(str(n))) for n in (1, 2, 3)]
        with pytest.raises(QueueFullError) as refusal:
            single.handoff.submit(make_request("4"))
        assert refusal.value.retry_after > 0
        single.runner.let_go()
        for channel in channels:
            assert await read(channel) == answer([1, 2, 3])
        await asyncio.wait_for(single.handoff.wait_idle(), PATIENCE)
        assert await read(single.handoff.submit(make_request("4"))) == answer([1, 2, 3])


class TestCancel:
    """Clients that go away."""

    async def test_a_waiting_request_ends_at_once(self, single: Service) -> None:
        """Its end does not wait for the busy thread, and it is never computed."""
        single.runner.hold()
        running = single.handoff.submit(make_request("running"))
        await single.wait_held()
        waiting = single.handoff.submit(make_request("waiting", [7, 8]))
        single.handoff.cancel("waiting")
        assert await read(waiting) == [Finished(FinishReason.CANCELLED)]
        assert len(single.queue) == 0
        single.runner.let_go()
        assert await read(running) == answer([1, 2, 3])
        assert len(single.runner.fed) == 1

    async def test_a_running_request_stops_computing(self, single: Service) -> None:
        """The client is answered at once; the engine frees the state at its next step."""
        single.runner.hold()
        running = single.handoff.submit(make_request("a", list(range(9)), conversation="c"))
        await single.wait_held()
        following = single.handoff.submit(make_request("b", [7, 8], conversation="c"))
        single.handoff.cancel("a")
        assert (await read(running))[-1] == Finished(FinishReason.CANCELLED)
        single.runner.let_go()
        assert await read(following) == answer([7, 8])
        assert single.runner.fed[0] == list(range(4))

    async def test_cancelling_is_idempotent(self, service: Service) -> None:
        """Unknown, ended and already cancelled requests are left as they are."""
        channel = service.handoff.submit(make_request("a"))
        assert await read(channel) == answer([1, 2, 3])
        service.handoff.cancel("a")
        service.handoff.cancel("a")
        service.handoff.cancel("unknown")
        assert not channel._events


class TestSlowReaders:
    """Clients that do not read."""

    async def test_a_slow_reader_is_cut_off_and_others_go_on(self, service: Service) -> None:
        """At the bound it loses the rest of its answer, in words; memory and neighbours do not."""
        slow = service.handoff.submit(make_request("slow", [9], max_tokens=500))
        others = [
            service.handoff.submit(make_request(str(n), [n], max_tokens=CHANNEL_LIMIT - 2))
            for n in range(6)
        ]
        await asyncio.wait_for(service.handoff.wait_idle(), PATIENCE)
        events = await read(slow)
        assert len(events) == CHANNEL_LIMIT + 1
        assert events[:-1] == answer([9], 500)[:CHANNEL_LIMIT]
        assert isinstance(error_of(events), SlowConsumerError)
        for number, channel in enumerate(others):
            assert await read(channel) == answer([number], CHANNEL_LIMIT - 2)
        await service.wait_at_rest()

    async def test_its_conversation_goes_on(self, service: Service) -> None:
        service.handoff.submit(make_request("slow", [9], conversation="c", max_tokens=500))
        following = service.handoff.submit(make_request("next", [1, 2], conversation="c"))
        assert await read(following) == answer([1, 2])


class TestStopping:
    """The daemon's end, from gentle to firm."""

    async def test_who_waits_is_refused_and_who_runs_may_finish(self, single: Service) -> None:
        """Waiting and new requests are sent elsewhere; the running one gets its answer."""
        single.runner.hold()
        running = single.handoff.submit(make_request("running"))
        await single.wait_held()
        waiting = [single.handoff.submit(make_request(str(n))) for n in range(3)]
        single.handoff.refuse_waiting()
        for channel in waiting:
            events = await read(channel)
            assert len(events) == 1
            assert isinstance(error_of(events), UnavailableError)
        with pytest.raises(UnavailableError):
            single.handoff.submit(make_request("new"))
        single.handoff.refuse_waiting()

        idle = asyncio.create_task(single.handoff.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        single.runner.let_go()
        assert await read(running) == answer([1, 2, 3])
        await asyncio.wait_for(idle, PATIENCE)

    async def test_who_still_runs_can_be_ended(self, service: Service) -> None:
        service.runner.hold()
        channels = [service.handoff.submit(make_request(str(n), [n, 1])) for n in range(6)]
        await service.wait_held()
        service.handoff.end_running()
        await asyncio.wait_for(service.handoff.wait_idle(), PATIENCE)
        for channel in channels:
            assert isinstance(error_of(await read(channel)), UnavailableError)
        service.runner.let_go()
        await service.wait_at_rest()
        assert len(service.queue) == 0

    async def test_an_idle_service_need_not_be_waited_for(self, service: Service) -> None:
        """Nothing was ever submitted, so nothing is live."""
        await asyncio.wait_for(service.handoff.wait_idle(), PATIENCE)
        service.handoff.end_running()
        service.handoff.refuse_waiting()


def test_publishing_to_a_loop_that_has_ended_is_harmless() -> None:
    """The thread may finish a step after the loop is gone; that step must not fail."""
    sequence = Sequence(make_request("a"))

    async def make() -> Handoff:
        return Handoff(ConversationQueue(1), lambda: None, channel_limit=1)

    handoff = asyncio.run(make())
    handoff.publish([(sequence, Finished(FinishReason.STOP))])
