"""Requests of one conversation are queued in the order in which they came."""

import asyncio
import json
import random
import time

import pytest

from umbel.daemon.http.bodies import BodyBudget, Share, decode
from umbel.daemon.identity.caller import Caller
from umbel.daemon.identity.conversations import OrderKey, Place, order_keys
from umbel.daemon.protocols.completions import CompletionRequest
from umbel.daemon.protocols.generation_request import GenerationBody, GenerationRequest
from umbel.daemon.protocols.responses import ResponsesRequest
from umbel.daemon.requests.arrivals import Arrival, Arrivals, Wait
from umbel.daemon.requests.generation import Generations
from umbel.daemon.requests.prompts import Prepared
from umbel.daemon.requests.service import Service
from umbel.models.params import SamplingParams
from umbel.scheduler.errors import DeadlineExceededError
from umbel.scheduler.order import Priority
from umbel.scheduler.times import Activity

from ..fakes import FakeClock

TALK, OTHER = OrderKey("m", "conversation", "talk"), OrderKey("m", "conversation", "other")


def arrive(arrivals: Arrivals, tenant: str, name: str, within: float | None = None) -> Arrival:
    """Note that a request has come."""
    caller, wait = Caller(tenant), Wait(time.monotonic(), within)
    return arrivals.arrive(name, caller, Share(BodyBudget(1 << 20)), wait)


async def _settle() -> None:
    """Let the tasks run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_requests_of_a_conversation_keep_their_order() -> None:
    """Of one conversation, however late the first one is read; others do not wait."""
    arrivals = Arrivals()
    first, stranger, second, other = (arrive(arrivals, t, "r") for t in ("a", "b", "a", "a"))
    stranger.set_keys([TALK])
    second.set_keys([TALK])
    other.set_keys([OTHER])
    await asyncio.wait_for(stranger.wait_for_earlier(), 1)
    turns = {
        name: asyncio.create_task(each.wait_for_earlier())
        for name, each in (("2", second), ("o", other))
    }
    await _settle()
    assert not any(turn.done() for turn in turns.values()), "the first may be of either"
    first.set_keys([TALK])
    await _settle()
    assert turns["o"].done()
    assert not turns["2"].done()
    await asyncio.wait_for(first.wait_for_earlier(), 1)
    first.leave()
    await asyncio.wait_for(turns["2"], 1)
    for each in (stranger, second, other, other):
        each.leave()
    assert len(arrivals) == 0


async def test_activities_of_each_request() -> None:
    """With the seconds of each activity; a tenant sees its own requests alone."""
    clock = FakeClock()
    arrivals = Arrivals(clock)
    first = arrive(arrivals, "a", "one")
    clock.now += 2
    second, other = arrive(arrivals, "a", "two"), arrive(arrivals, "b", "three")
    first.set_keys([TALK])
    second.set_keys([TALK])
    second.model, second.conversation, second.priority = "m", "talk", Priority.BATCH
    with first.waiting(Activity.MODEL):
        clock.now += 3
        told = {row.request: (row.activity, row.seconds) for row in arrivals.describe(9)}
        assert told["one"] == ("model", {"tokenize": 2.0, "model": 3.0})
        assert told["three"] == ("tokenize", {"tokenize": 3.0})
    turn = asyncio.create_task(second.wait_for_earlier())
    await _settle()
    clock.now += 1
    rows = arrivals.describe(9, "a")
    assert [row.request for row in rows] == ["one", "two"]
    assert rows[1].activity == "conversation"
    assert (rows[1].model, rows[1].conversation, rows[1].priority) == ("m", "talk", "batch")
    assert (rows[0].model, rows[0].conversation) == (None, "one")
    assert [row.request for row in arrivals.describe(1)] == ["one"]
    first.leave()
    await turn
    assert second.seconds() == {Activity.TOKENIZE: 3.0, Activity.CONVERSATION: 1.0}
    assert arrivals.describe(9, "c") == []
    for each in (second, other):
        each.leave()
    assert arrivals.describe(9) == []


async def test_a_request_without_keys_does_not_wait() -> None:
    """A request without a name goes on at once, and so do those after it."""
    arrivals = Arrivals()
    unread, nameless, named = (arrive(arrivals, "a", "r") for _ in range(3))
    nameless.set_keys([])
    await asyncio.wait_for(nameless.wait_for_earlier(), 1)
    unread.leave()
    named.set_keys([TALK])
    await asyncio.wait_for(named.wait_for_earlier(), 1)


async def test_requests_for_different_models_do_not_wait() -> None:
    """An agent's session asks several models, of which one may be loaded for minutes."""
    arrivals = Arrivals()
    loading, loaded = (arrive(arrivals, "a", "r") for _ in range(2))
    loading.set_keys([OrderKey("large", "session", "s")])
    loaded.set_keys([OrderKey("small", "session", "s")])
    await asyncio.wait_for(loaded.wait_for_earlier(), 1)


async def test_a_request_that_gives_up_lets_others_go_on() -> None:
    """A turn that is cancelled, and a request that ends before its turn, let others go on."""
    arrivals = Arrivals()
    first, second, third = (arrive(arrivals, "a", "r") for _ in range(3))
    for each in (first, second, third):
        each.set_keys([TALK])
    turn = asyncio.create_task(second.wait_for_earlier())
    await _settle()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    second.leave()
    last = asyncio.create_task(third.wait_for_earlier())
    await _settle()
    assert not last.done()
    first.leave()
    await asyncio.wait_for(last, 1)


@pytest.mark.parametrize("seed", range(5))
async def test_any_order_of_reading(seed: int) -> None:
    """Requests with a common key leave in the order in which they came, and all do."""
    rng, arrivals = random.Random(seed), Arrivals()  # noqa: S311  (no secret)
    lines = [TALK, OTHER, OrderKey("m", "session", "s"), OrderKey("m", "response", "r")]
    gone: list[int] = []

    async def request(number: int) -> None:
        arrival = arrive(arrivals, f"tenant {number % 2}", f"{number}")
        try:
            await asyncio.sleep(rng.random() / 100)
            if rng.random() < 0.1:
                return  # its body is none
            arrival.set_keys(asked[number])
            await asyncio.sleep(rng.random() / 100)
            await arrival.wait_for_earlier()
            gone.append(number)
        finally:
            arrival.leave()

    asked = [rng.sample(lines, rng.randrange(3)) for _ in range(60)]
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(request(number))
    assert len(arrivals) == 0
    for tenant in range(2):
        for line in lines:
            one = [n for n in gone if n % 2 == tenant and line in asked[n]]
            assert one == sorted(one)


def test_order_keys() -> None:
    """A conversation by its name; else the response it goes on with, and its agent's session."""
    plain, goes_on, named = (
        decode(json.dumps({"model": "m", "input": "x", **more}).encode(), ResponsesRequest)
        for more in ({}, {"previous_response_id": "resp_1"}, {"conversation": "c"})
    )
    assert order_keys("m", None, None, plain) == []
    assert order_keys("m", None, "s", goes_on) == [
        OrderKey("m", "response", "resp_1"),
        OrderKey("m", "session", "s"),
    ]
    assert order_keys("m", "h", "s", goes_on) == [OrderKey("m", "conversation", "h")]
    assert order_keys("m", None, None, named) == [OrderKey("m", "conversation", "c")]


class Slow(Service):
    """A service that tokenises when it is told to, and queues nothing."""

    def __init__(self) -> None:
        self._request_timeout = 60.0
        self.may_read = asyncio.Event()
        self.queued: list[str] = []

    async def _prepare(self, body: GenerationBody, arrival: Arrival) -> Prepared:
        del body
        if arrival.request_id == "large":
            await self.may_read.wait()
        wanted = GenerationRequest(prompts=[[1]], sampling=SamplingParams(seed=0), max_tokens=1)
        return Prepared(wanted, [])

    def _admit(
        self,
        prepared: Prepared,
        arrival: Arrival,
        place: Place,
        *,
        kept: int = 0,
        tenant: str | None = None,
    ) -> Generations:
        del prepared, place, kept, tenant
        self.queued.append(arrival.request_id)
        return Generations([], before_queue=arrival.queue)

    async def ask(self, arrival: Arrival) -> None:
        """Generate, as handlers do."""
        arrival.set_keys([TALK])
        body = decode(b'{"prompt": "x"}', CompletionRequest)
        async with await self.generate(body, arrival):
            pass


async def test_a_request_tokenised_later_is_queued_first() -> None:
    """If it came first; a request that waited too long for it is late."""
    service, arrivals = Slow(), Arrivals()
    large, small = (arrive(arrivals, "a", name) for name in ("large", "small"))
    hasty = arrive(arrivals, "a", "hasty", within=0.01)
    asked = [asyncio.create_task(service.ask(each)) for each in (large, small)]
    with pytest.raises(DeadlineExceededError):
        await service.ask(hasty)
    assert service.queued == []
    service.may_read.set()
    await asyncio.gather(*asked)
    assert service.queued == ["large", "small"]
    hasty.leave()
    assert len(arrivals) == 0
