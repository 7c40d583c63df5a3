"""Requests of one conversation are queued in the order in which they came."""

import asyncio
import json
import random
import time
from contextlib import AsyncExitStack

import pytest

from umbel.daemon.http.bodies import BodyBudget
from umbel.daemon.http.decoding import decode
from umbel.daemon.identity.caller import Caller
from umbel.daemon.identity.conversations import lines_of
from umbel.daemon.identity.deadlines import Wait
from umbel.daemon.protocols.completions import CompletionRequest
from umbel.daemon.protocols.generation_request import GenerationBody, GenerationRequest
from umbel.daemon.protocols.responses import ResponsesRequest
from umbel.daemon.requests.arrivals import Arrival, Arrivals, Line
from umbel.daemon.requests.generations import Generations
from umbel.daemon.requests.prompts import Prepared
from umbel.daemon.requests.service import Service
from umbel.models.params import SamplingParams
from umbel.scheduler.errors import DeadlineExceededError
from umbel.scheduler.order import Priority
from umbel.scheduler.times import Activity

from ..fakes import FakeClock

TALK, OTHER = Line("m", "conversation", "talk"), Line("m", "conversation", "other")


async def _settle() -> None:
    """Let whoever can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_came_first_goes_first() -> None:
    """Of one conversation, however late the first one is read; others do not wait."""
    arrivals = Arrivals()
    first, stranger, second, other = (arrivals.arrive(t, "r") for t in ("a", "b", "a", "a"))
    stranger.know([TALK])
    second.know([TALK])
    other.know([OTHER])
    await asyncio.wait_for(stranger.turn(), 1)
    turns = {name: asyncio.create_task(each.turn()) for name, each in (("2", second), ("o", other))}
    await _settle()
    assert not any(turn.done() for turn in turns.values()), "the first may be of either"
    first.know([TALK])
    await _settle()
    assert turns["o"].done()
    assert not turns["2"].done()
    await asyncio.wait_for(first.turn(), 1)
    first.leave()
    await asyncio.wait_for(turns["2"], 1)
    for each in (stranger, second, other, other):
        each.leave()
    assert len(arrivals) == 0


async def test_each_says_what_it_waits_for() -> None:
    """And for how long it did what before; a tenant hears of its own alone."""
    clock = FakeClock()
    arrivals = Arrivals(clock)
    first = arrivals.arrive("a", "one")
    clock.now += 2
    second, other = arrivals.arrive("a", "two"), arrivals.arrive("b", "three")
    first.know([TALK])
    second.know([TALK])
    second.model, second.conversation, second.priority = "m", "talk", Priority.BATCH
    with first.waiting(Activity.MODEL):
        clock.now += 3
        told = {row.request: (row.activity, row.seconds) for row in arrivals.describe(9)}
        assert told["one"] == ("model", {"tokenize": 2.0, "model": 3.0})
        assert told["three"] == ("tokenize", {"tokenize": 3.0})
    turn = asyncio.create_task(second.turn())
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


async def test_who_follows_nobody_waits_for_nobody() -> None:
    """A request without a name goes on at once, and so do those after it."""
    arrivals = Arrivals()
    unread, nameless, named = (arrivals.arrive("a", "r") for _ in range(3))
    nameless.know([])
    await asyncio.wait_for(nameless.turn(), 1)
    unread.leave()
    named.know([TALK])
    await asyncio.wait_for(named.turn(), 1)


async def test_who_waits_for_another_model_keeps_nobody() -> None:
    """An agent's session asks several models, of which one may be loaded for minutes."""
    arrivals = Arrivals()
    loading, loaded = (arrivals.arrive("a", "r") for _ in range(2))
    loading.know([Line("large", "session", "s")])
    loaded.know([Line("small", "session", "s")])
    await asyncio.wait_for(loaded.turn(), 1)


async def test_who_gives_up_keeps_nobody() -> None:
    """A turn that is cancelled, and a request that ends before its turn, let others go on."""
    arrivals = Arrivals()
    first, second, third = (arrivals.arrive("a", "r") for _ in range(3))
    for each in (first, second, third):
        each.know([TALK])
    turn = asyncio.create_task(second.turn())
    await _settle()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    second.leave()
    last = asyncio.create_task(third.turn())
    await _settle()
    assert not last.done()
    first.leave()
    await asyncio.wait_for(last, 1)


@pytest.mark.parametrize("seed", range(5))
async def test_any_order_of_reading(seed: int) -> None:
    """Whoever is read when: each line leaves in the order in which it came, and all do."""
    rng, arrivals = random.Random(seed), Arrivals()  # noqa: S311  (no secret)
    lines = [TALK, OTHER, Line("m", "session", "s"), Line("m", "response", "r")]
    gone: list[int] = []

    async def request(number: int) -> None:
        arrival = arrivals.arrive(f"tenant {number % 2}", f"{number}")
        try:
            await asyncio.sleep(rng.random() / 100)
            if rng.random() < 0.1:
                return  # its body is none
            arrival.know(asked[number])
            await asyncio.sleep(rng.random() / 100)
            await arrival.turn()
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


def test_what_a_request_follows() -> None:
    """A conversation by its name; else the response it goes on with, and its agent's session."""
    plain, goes_on, named = (
        decode(json.dumps({"model": "m", "input": "x", **more}).encode(), ResponsesRequest)
        for more in ({}, {"previous_response_id": "resp_1"}, {"conversation": "c"})
    )
    assert lines_of("m", None, None, plain) == []
    assert lines_of("m", None, "s", goes_on) == [
        Line("m", "response", "resp_1"),
        Line("m", "session", "s"),
    ]
    assert lines_of("m", "h", "s", goes_on) == [Line("m", "conversation", "h")]
    assert lines_of("m", None, None, named) == [Line("m", "conversation", "c")]


class Slow(Service):
    """A service that tokenises when it is told to, and queues nothing."""

    def __init__(self) -> None:
        self._request_timeout = 60.0
        self.may_read = asyncio.Event()
        self.queued: list[str] = []

    async def _prepare(self, body: GenerationBody, caller: Caller) -> Prepared:
        del body
        if caller.request_id == "large":
            await self.may_read.wait()
        wanted = GenerationRequest(prompts=[[1]], sampling=SamplingParams(seed=0), max_tokens=1)
        return Prepared(wanted, [])

    def _admit(self, prepared: Prepared, caller: Caller, kept: int = 0) -> Generations:
        del prepared, kept
        self.queued.append(caller.request_id)
        return Generations([], before_queue=caller.queued)

    async def ask(self, name: str, arrival: Arrival, within: float | None = None) -> None:
        """Have a request generate, as handlers do."""
        async with AsyncExitStack() as stack:
            await self.enter(stack, name, arrival, within)

    async def enter(
        self, stack: AsyncExitStack, name: str, arrival: Arrival, within: float | None = None
    ) -> None:
        """Have it generate until the stack ends."""
        body = decode(b'{"prompt": "x"}', CompletionRequest)
        share = stack.enter_context(BodyBudget(1 << 20).share())
        wait = Wait(time.monotonic(), within)
        caller = Caller(name, "a", "talk", None, 0.0, share, wait, arrival=arrival)
        await stack.enter_async_context(await self.generate(body, caller))


async def test_what_is_tokenised_later_is_queued_first() -> None:
    """If it came first; who has waited for it as long as it may hears so."""
    service, arrivals = Slow(), Arrivals()
    large, small, hasty = (arrivals.arrive("a", "r") for _ in range(3))
    for each in (large, small, hasty):
        each.know([TALK])
    asked = [asyncio.create_task(service.ask("large", large))]
    asked.append(asyncio.create_task(service.ask("small", small)))
    with pytest.raises(DeadlineExceededError):
        await service.ask("hasty", hasty, within=0.01)
    assert service.queued == []
    service.may_read.set()
    await asyncio.gather(*asked)
    assert service.queued == ["large", "small"]
    hasty.leave()
    assert len(arrivals) == 0
