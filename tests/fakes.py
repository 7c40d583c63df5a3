"""Stand-ins that carry meaning: what they were fed can be read back and checked."""

import asyncio
import threading
import weakref
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, cast

from umbel.cachestore.ledger import Size
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.state import Layout
from umbel.models.memory_profile import Held
from umbel.models.params import Row, SamplingParams, Token
from umbel.models.runner import ModelRunner
from umbel.scheduler.handoff import EventChannel
from umbel.scheduler.kv_cache_manager import KVCacheManager
from umbel.scheduler.memory import MemoryPlanner
from umbel.scheduler.order import Priority
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, Request

VOCABULARY = 1000
"""Generated tokens are below this, so a prompt of larger ones is told apart at sight."""

PATIENCE = 30.0
"""Seconds after which a test that waits for another thread has failed."""


@dataclass(eq=False)
class FakeState:
    """A sequence's state: the very tokens that it was advanced over, in order."""

    tokens: list[int] = field(default_factory=list)

    @property
    def suffix_length(self) -> int:
        """All of them are its own."""
        return len(self.tokens)


def next_token(history: Collection[int]) -> int:
    """Choose a token as a function of every token fed so far, and of their order."""
    return zlib.crc32(",".join(map(str, history)).encode()) % VOCABULARY


def reference(
    prompt: list[int], max_tokens: int, eos_ids: Collection[int] = ()
) -> tuple[list[int], FinishReason]:
    """Generate an answer the plain way: what any engine must produce, however it works."""
    output: list[int] = []
    while len(output) < max_tokens:
        token = next_token(prompt + output)
        if token in eos_ids:
            return output, FinishReason.STOP
        output.append(token)
    return output, FinishReason.LENGTH


@dataclass
class FakeOutput:
    """States that got a token each."""

    states: list[FakeState]
    errors: dict[int, BaseException] = field(default_factory=dict)


@dataclass
class FakeSample:
    """Tokens that were chosen."""

    tokens: list[int]
    errors: dict[int, BaseException] = field(default_factory=dict)

    def pending(self, place: int) -> int:
        """Name a chosen token."""
        return self.tokens[place]

    def read(self) -> list[Token]:
        """Hand them out."""
        return [Token(token) for token in self.tokens]


class FakePlan(NamedTuple):
    """The running sequences."""

    decode: list[FakeState]
    prefill: tuple[FakeState, int] | None
    completes: bool = False
    coming: int = 0
    may_copy: bool = True


class FakePlacement:
    """Holds nothing of a batch, and nothing is kept of it."""

    def capture(self, cache: object) -> Any:
        """Nothing is non-trimmable."""
        raise NotImplementedError("a fake's state has no checkpoints")

    def lease(self, cache: object, spans: object) -> None:
        """Nothing is leased."""
        raise NotImplementedError("a fake's state leases nothing")

    def own_begin(self, cache: object) -> int:
        """A fake reads nothing elsewhere."""
        del cache
        return 0

    def suffix_span(self, cache: object, tokens: int | None = None) -> None:
        """There is nothing to hand over."""

    def close(self, cache: object) -> None:
        """No sequence has a slot."""


class FakeRunner:
    """Fulfils `engine.ModelRunner` without a model.

    A fault is raised before the state advances, so `fed` is exactly what was computed.

    Attributes:
        fed: the tokens that each state was advanced over, in the order of `open`; it
            outlives the states.
        chunks: start and end of each prefill, in the order they came.
        max_completing: as `ModelRunner` has it.
        held: set once a computation waits at the gate that `hold` closed.
    """

    def __init__(self) -> None:
        self.fed: list[list[int]] = []
        self.shapes: set[tuple[int, ...]] = set()
        self.overlaps = True
        self.chunks: list[tuple[int, int]] = []
        self.max_completing = 1 << 62
        self.held = threading.Event()
        self._gate = threading.Event()
        self._gate.set()
        self._states: weakref.WeakSet[FakeState] = weakref.WeakSet()
        self._faults: dict[tuple[int, ...], BaseException] = {}
        self._state_faults: list[BaseException] = []

    @property
    def live_states(self) -> int:
        """Number of states that are still open."""
        return len(self._states)

    def fail_at(self, prompt: list[int], position: int, error: BaseException) -> None:
        """Raise when the token at `position` of this prompt and its answer is fed.

        Another request with the same tokens up to there fails alike.
        """
        answer, _ = reference(prompt, max(0, position + 1 - len(prompt)))
        self._faults[tuple((prompt + answer)[: position + 1])] = error

    def fail_next_state(self, error: BaseException) -> None:
        """Raise from the next `open`."""
        self._state_faults.append(error)

    def hold(self) -> None:
        """Make the next computation wait until `let_go`."""
        self.held.clear()
        self._gate.clear()

    def let_go(self) -> None:
        """End `hold`."""
        self._gate.set()

    def open(self, offset: int = 0, spans: object = (), checkpoint: object = None) -> FakeState:
        """Make the state of a sequence; it starts from nothing."""
        assert (offset, list(cast("list[object]", spans)), checkpoint) == (0, [], None)
        if self._state_faults:
            raise self._state_faults.pop(0)
        state = FakeState()
        self._states.add(state)
        self.fed.append(state.tokens)
        return state

    def held_by(self, caches: Iterable[FakeState]) -> Held:
        """Fakes take a byte a token."""
        return Held(sum(len(cache.tokens) for cache in caches), 0)

    @property
    def profile(self) -> Self:
        """Say itself what sequences take."""
        return self

    @property
    def placement(self) -> FakePlacement:
        """Leave state where it is."""
        return FakePlacement()

    def kept(self, tokens: int) -> int:
        """A byte a token."""
        return tokens

    def start(self, tokens: int, context: int) -> Held:
        """Tokens left to compute."""
        del context
        return Held(tokens, 0)

    def worst_case(self, context: int) -> Held:
        """All of it."""
        return Held(context, 0)

    def chunk_need(self, tokens: int, states: FakeState) -> Held:
        """Tokens computed so far."""
        del states
        return Held(tokens, 0)

    def step_need(self, states: list[FakeState]) -> Held:
        """A token each."""
        return Held(len(states), 0)

    def plan(
        self,
        decode: Sequence[FakeState],
        prefill: tuple[FakeState, int] | None,
        *,
        completes: bool,
        coming: int = 0,
        may_copy: bool,
    ) -> FakePlan:
        """Note who runs."""
        return FakePlan(list(decode), prefill, completes, coming, may_copy)

    def cost(self, plan: FakePlan) -> Held:
        """The sum of the parts."""
        parts = [self.step_need(plan.decode)] if plan.decode else []
        if plan.prefill is not None:
            state, tokens = plan.prefill
            parts.append(self.chunk_need(tokens, state))
        return Held(sum(part.nbytes for part in parts), sum(part.buffers for part in parts))

    def prefill(self, tokens: Sequence[int], cache: FakeState) -> None:
        """Advance a state over tokens."""
        start = len(cache.tokens)
        self._advance(list(tokens), cache)
        self.chunks.append((start, start + len(tokens)))

    def complete(self, tokens: Sequence[int], cache: FakeState) -> FakeOutput:
        """Do so; its next token can be chosen then."""
        if len(tokens) > self.max_completing:
            raise AssertionError("more logits than may be computed")
        self.prefill(tokens, cache)
        return FakeOutput([cache])

    def run(
        self,
        plan: FakePlan,
        caches: Sequence[FakeState],
        tokens: Sequence[int],
    ) -> FakeOutput:
        """Give each state its token; a fault is the sequence's own."""
        if plan.decode != list(caches):
            raise AssertionError("others run than were planned")
        output = FakeOutput(list(caches))
        for place, (cache, token) in enumerate(zip(caches, tokens, strict=True)):
            try:
                self._advance([token], cache)
            except BaseException as error:  # noqa: BLE001  (planted)
                output.errors[place] = error
        return output

    def sample(self, output: FakeOutput, rows: Mapping[int, Row]) -> FakeSample:
        """Choose each row's next token."""
        for place, row in rows.items():
            told = [*row.prompt, *row.output]
            if told != output.states[place].tokens:
                raise AssertionError(f"sampling is called with {told}, not with the computed rows")
        return FakeSample([next_token(output.states[place].tokens) for place in rows])

    def _advance(self, tokens: list[int], states: FakeState) -> None:
        if not self._gate.is_set():
            self.held.set()
            if not self._gate.wait(PATIENCE):
                raise AssertionError("no test released the computation")
        if not tokens:
            raise AssertionError("nothing to compute")
        for count in range(1, len(tokens) + 1) if self._faults else ():
            error = self._faults.get((*states.tokens, *tokens[:count]))
            if error is not None:
                raise error
        states.tokens.extend(tokens)


async def read(channel: EventChannel) -> list[Event]:
    """Read a channel to its end."""
    events: list[Event] = []
    async with asyncio.timeout(PATIENCE):
        while not (events and isinstance(events[-1], Finished)):
            events.append(await channel.get())
    return events


class Unkept(NamedTuple):
    """The cache, as an engine uses it."""

    runner: ModelRunner
    kv_cache: KVCacheManager
    memory: MemoryPlanner


def no_reuse(runner: FakeRunner, budget: int = 1 << 40) -> Unkept:
    """A cache that keeps nothing, for tests of what stands around it."""
    cache = PrefixCache(Layout(spans=True, checkpoints=False), budget=budget)
    model = cast("ModelRunner", runner)
    kv_cache = KVCacheManager(model, cache, interval=8192, keeps=False)
    cache.pool.resize(Size(budget, 1 << 40))
    return Unkept(model, kv_cache, MemoryPlanner(cache.pool, model))


class FakeClock:
    """A clock that only a test moves, in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Read the clock."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def make_request(
    request_id: str,
    prompt: list[int] | None = None,
    *,
    conversation: str | None = None,
    max_tokens: int = 4,
    deadline: float = float("inf"),
    tenant: str = "default",
    priority: Priority = Priority.INTERACTIVE,
) -> Request:
    """Build a request; alone in its conversation unless told otherwise."""
    return Request(
        id=request_id,
        tenant=tenant,
        conversation=request_id if conversation is None else conversation,
        prompt=[1, 2, 3] if prompt is None else prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=0),
        deadline=deadline,
        priority=priority,
    )


def busy(queue: ConversationQueue) -> set[tuple[str, str]]:
    """Tenant and conversation of what was claimed and not released."""
    return {(e.tenant, e.conversation) for _, e, _ in queue._order._running.values()}
