"""Stand-ins that carry meaning: what they were fed can be read back and checked."""

import asyncio
import threading
import weakref
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from umbel.cachestore.governor import Governor
from umbel.cachestore.ledger import Size
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.state import Layout
from umbel.models.params import Row, SamplingParams, Token
from umbel.scheduler.handoff import EventChannel
from umbel.scheduler.memory import MemoryPlanner
from umbel.scheduler.request import Event, Finished, FinishReason, Request
from umbel.scheduler.reuse import PrefixReuse

VOCABULARY = 1000
"""Generated tokens are below this, so a prompt of larger ones is told apart at sight."""

PATIENCE = 30.0
"""Seconds after which a test that waits for another thread has failed."""


@dataclass(eq=False)
class FakeState:
    """A sequence's state: the very tokens that it was advanced over, in order."""

    tokens: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Hold nothing of a batch."""


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
class FakeFed:
    """States that were fed a token each."""

    states: list[FakeState]
    errors: dict[int, BaseException] = field(default_factory=dict)


@dataclass
class FakeChoice:
    """Tokens that were chosen."""

    tokens: list[int]
    errors: dict[int, BaseException] = field(default_factory=dict)

    def read(self) -> list[Token]:
        """Hand them out."""
        return [Token(token) for token in self.tokens]


class FakeForward:
    """Fulfils `engine.Forward` without a model.

    A fault is raised before the state advances, so `fed` is exactly what was computed.

    Attributes:
        fed: the tokens that each state was advanced over, in the order of `open`; it
            outlives the states.
        chunks: start and end of each prefill, in the order they came.
        held: set once a computation waits at the gate that `hold` closed.
    """

    def __init__(self) -> None:
        self.fed: list[list[int]] = []
        self.shapes: set[tuple[int, ...]] = set()
        self.overlaps = True
        self.chunks: list[tuple[int, int]] = []
        self.held = threading.Event()
        self._gate = threading.Event()
        self._gate.set()
        self._states: weakref.WeakSet[FakeState] = weakref.WeakSet()
        self._faults: dict[tuple[int, ...], BaseException] = {}
        self._state_faults: list[BaseException] = []

    @property
    def live_states(self) -> int:
        """How many states somebody still holds."""
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
        """Have the next computation wait until `let_go`."""
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

    def held_by(self, states: Iterable[FakeState]) -> tuple[int, int]:
        """Fakes take a byte a token."""
        return sum(len(state.tokens) for state in states), 0

    def kept_bytes(self, tokens: int) -> int:
        """A byte a token."""
        return tokens

    def start_need(self, tokens: int, context: int) -> tuple[int, int]:
        """What is left to compute."""
        del context
        return tokens, 0

    def promise(self, context: int) -> tuple[int, int]:
        """All of it."""
        return context, 0

    def chunk_need(self, tokens: int, states: FakeState) -> tuple[int, int]:
        """What is computed."""
        del states
        return tokens, 0

    def step_need(self, states: list[FakeState]) -> tuple[int, int]:
        """A token each."""
        return len(states), 0

    def prefill(self, tokens: list[int], states: FakeState) -> None:
        """Advance `states` over `tokens`."""
        start = len(states.tokens)
        self._advance(tokens, states)
        self.chunks.append((start, start + len(tokens)))

    def feed(self, entries: list[tuple[FakeState, int]]) -> FakeFed:
        """Feed each state its token; a fault is the entry's own."""
        fed = FakeFed([states for states, _ in entries])
        for number, (states, token) in enumerate(entries):
            try:
                self._advance([token], states)
            except BaseException as error:  # noqa: BLE001  (planted)
                fed.errors[number] = error
        return fed

    def choose(self, fed: FakeFed, rows: dict[int, Row]) -> FakeChoice:
        """Choose each row's next token."""
        for number, row in rows.items():
            told = [*row.prompt, *row.output]
            if told != fed.states[number].tokens:
                raise AssertionError(f"sampling hears of {told}, not of what was fed")
        return FakeChoice([next_token(fed.states[number].tokens) for number in rows])

    def drawn(self, choice: FakeChoice, index: int) -> int:
        """Name a chosen token."""
        return choice.tokens[index]

    def _advance(self, tokens: list[int], states: FakeState) -> None:
        if not self._gate.is_set():
            self.held.set()
            if not self._gate.wait(PATIENCE):
                raise AssertionError("nobody let the computation go")
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
    """What an engine asks of the cache's side."""

    reuse: PrefixReuse
    memory: MemoryPlanner


def no_reuse(forward: FakeForward, budget: int = 1 << 40) -> Unkept:
    """A cache that keeps nothing, for tests of what stands around it."""
    cache = PrefixCache(Layout(spans=True, checkpoints=False), budget=budget)
    reuse = PrefixReuse(forward, cache, fingerprint="fake", interval=8192, keeps=False)
    governor = Governor(cache, Size(budget, 1 << 40))
    return Unkept(reuse, MemoryPlanner(governor, forward, fixed_chunks=False))


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
) -> Request:
    """Build a request; alone in its conversation unless told otherwise."""
    return Request(
        id=request_id,
        tenant="default",
        conversation=request_id if conversation is None else conversation,
        prompt=[1, 2, 3] if prompt is None else prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=0),
        deadline=deadline,
    )
