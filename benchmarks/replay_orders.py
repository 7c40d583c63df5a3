"""Orders of eviction that were tried, on runs of tokens and not on the trie. Pure.

`ordered` with `recent` gives what the daemon's cache gives, so that the two check each other.
An order sees what a daemon could know: when and by what kind of request a run was last used,
how often, and how long its conversation paused before. It sees neither names nor the future. Two
orders, called hints, do: they show the gain of knowing it.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replay_bound import NEVER, Run, tokens_there
from replay_traces import Request

_FIRST_GUESS = 0.9  # of what is computed is used again, says a cache that has seen nothing
_GUESSED_ON = 500_000  # tokens
_MOST = 16.0  # times as fast something may age


@dataclass(eq=False)
class Note:
    """Facts about the request that used a run last.

    Attributes:
        time: seconds, when its answer was complete, or when it began if it runs.
        number: of the prompt.
        final: its answer ended the agent's turn.
        gaps: seconds between the requests before it that it goes on from.
        superseded: another request has gone on from most of its prompt, and not from its end.
        length: tokens of its prompt.
    """

    time: float
    number: int
    final: bool
    length: int
    gaps: list[float] = field(default_factory=list)
    superseded: bool = False


@dataclass(eq=False)
class Held:
    """A run in the cache, or remembered.

    Attributes:
        run: its tokens.
        parent: the run before it on every path.
        note: of its last use.
        uses: so far, evicted meanwhile or not.
        pins: prompts in flight.
        children: that have tokens in the cache.
        tokens: in the cache, the first ones.
    """

    run: Run
    parent: "Held | None"
    note: Note
    uses: int = 0
    pins: int = 0
    children: int = 0
    tokens: int = 0


@dataclass
class Habits:
    """How much of what was computed once, or was used before, is used again: tokens."""

    seen: list[float] = field(default_factory=lambda: [_GUESSED_ON, _GUESSED_ON])
    again: list[float] = field(
        default_factory=lambda: [_GUESSED_ON * _FIRST_GUESS, _GUESSED_ON * _FIRST_GUESS]
    )

    def used(self, held: Held) -> None:
        """Count a use, before it is entered."""
        if held.uses:
            self.again[held.uses > 1] += held.run.length
        self.seen[held.uses > 0] += held.run.length

    @property
    def odds(self) -> float:
        """How many times likelier it is to be used again if it was already."""
        once, often = (min(0.98, a / s) for a, s in zip(self.again, self.seen, strict=True))
        return max(1.0, min(_MOST, often / (1 - often) * (1 - once) / once))


Order = Callable[[Held, float, Habits], float]
"""The lowest goes first. Given a run, the time in seconds, and the habits."""


def recent(held: Held, _: float, __: Habits) -> float:
    """Least recently used first: the daemon's order."""
    return held.note.time


def final(seconds: float) -> Order:
    """After a final answer a person's turn is awaited: count it as so much older."""
    return lambda held, _, __: held.note.time - seconds * held.note.final


def first(seconds: float) -> Order:
    """Count a run without a continuation as so much older."""
    return lambda held, _, __: held.note.time - seconds * (not held.note.gaps)


def superseded(held: Held, _: float, __: Habits) -> float:
    """A conversation that went on elsewhere will not come back to its old end."""
    return held.note.time - 1e9 * held.note.superseded


def paced(held: Held, now: float, _: Habits) -> float:
    """Idle for long against the conversation's own pauses (two pauses of 15 s assumed)."""
    gaps = [15.0, 15.0, *held.note.gaps]
    usual = math.exp(sum(math.log(max(1.0, gap)) for gap in gaps) / len(gaps))
    return -(now - held.note.time + 1) / math.sqrt(usual)


def grown(held: Held, now: float, _: Habits) -> float:
    """The more turns it has had, the likelier the next one."""
    return -(now - held.note.time + 1) / math.sqrt(1 + len(held.note.gaps))


def frequent(held: Held, now: float, _: Habits) -> float:
    """Recency by uses, remembered after eviction."""
    return -(now - held.note.time + 1) / held.uses


def once(held: Held, now: float, _: Habits) -> float:
    """Let runs that were used once age sixteen times as fast."""
    return -(now - held.note.time + 1) * (_MOST if held.uses == 1 else 1)


def habitual(held: Held, now: float, habits: Habits) -> float:
    """Let runs that were used once age faster, by the odds seen in this cache."""
    return -(now - held.note.time + 1) * (habits.odds if held.uses == 1 else 1)


ORDERS: dict[str, Order] = {
    "recent": recent,
    "final answer 30 s": final(30),
    "final answer 300 s": final(300),
    "first turn 30 s": first(30),
    "superseded": superseded,
    "own pace": paced,
    "turns so far": grown,
    "used once ×16": once,
    "frequency": frequent,
    "used once, learned": habitual,
}


def hints(requests: Sequence[Request], paths: list[list[Run]]) -> dict[str, Order]:
    """Orders that are told something of the future."""

    def ended(held: Held, _: float, __: Habits) -> float:
        return held.note.time - 1e9 * (held.run.next_use(held.note.number) >= NEVER)

    def following(held: Held, _: float, __: Habits) -> float:
        number = paths[held.note.number][-1].next_use(held.note.number)
        return -requests[number].time if number < len(requests) else -math.inf

    return {"hint: never again": ended, "hint: next turn": following}


class Cache:
    """A cache of `budget` tokens that evicts in some order."""

    def __init__(self, budget: int, order: Order) -> None:
        self._budget = budget
        self._order = order
        self._habits = Habits()
        self._known: dict[Run, Held] = {}
        self._there: dict[Held, None] = {}
        self._size = 0

    def begin(self, path: list[Run], note: Note) -> int:
        """Serve a prompt; return how many tokens of it were there."""
        known = [self._known[run] for run in path if run in self._known]
        note.gaps = _gaps(known, note)
        hits = min(note.length - 1, tokens_there([held.tokens for held in known], path))
        parent: Held | None = None
        for run in path:
            held = self._known.setdefault(run, Held(run, parent, note))
            self._habits.used(held)
            self._fill(held)
            held.note = note
            held.uses += 1
            held.pins += 1
            parent = held
        self._evict(note.time)
        return hits

    def _fill(self, held: Held) -> None:
        if not held.tokens and held.parent is not None:
            held.parent.children += 1
        self._there[held] = None
        self._size += held.run.length - held.tokens
        held.tokens = held.run.length

    def end(self, path: list[Run], note: Note, now: float) -> None:
        """Release a prompt."""
        note.time = now
        for run in path:
            self._known[run].pins -= 1
        self._evict(now)

    def _evict(self, now: float) -> None:
        if self._size <= self._budget:
            return
        heap = [self._victim(held, now) for held in self._there if _exposed(held)]
        heapq.heapify(heap)
        while heap and self._size > self._budget:
            *_, held = heapq.heappop(heap)
            gone = min(held.tokens, self._size - self._budget)
            held.tokens -= gone
            self._size -= gone
            if held.tokens:
                return
            del self._there[held]
            if (parent := held.parent) is not None:
                parent.children -= 1
                if _exposed(parent):
                    heapq.heappush(heap, self._victim(parent, now))

    def _victim(self, held: Held, now: float) -> tuple[float, int, int, Held]:
        return self._order(held, now, self._habits), held.note.number, -held.run.end, held


def _exposed(held: Held) -> bool:
    return not held.pins and not held.children


def _gaps(known: list[Held], note: Note) -> list[float]:
    """The pauses so far of the conversation that a prompt goes on with, if it does."""
    if not known:
        return []
    before, shared = known[-1].note, known[-1].run.end
    if shared < before.length:
        before.superseded |= 2 * shared >= before.length
        return []
    return [*before.gaps, note.time - before.time]


def ordered(
    requests: Sequence[Request], paths: list[list[Run]], budget: int, order: Order
) -> list[int]:
    """Tokens of each prompt that an order has in a budget of tokens."""
    cache = Cache(budget, order)
    hits: list[int] = []
    flying: list[tuple[float, int, Note]] = []
    for number, request in enumerate(requests):
        while flying and flying[0][0] <= request.time:
            until, ended, note = heapq.heappop(flying)
            cache.end(paths[ended], note, until)
        note = Note(request.time, number, request.final, request.length)
        hits.append(cache.begin(paths[number], note))
        heapq.heappush(flying, (request.until, number, note))
    return hits
