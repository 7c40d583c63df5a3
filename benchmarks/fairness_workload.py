"""Tenants and their conversations: one that floods and many light ones, or all of them heavy."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

LIGHT = 26
"""Tenants beside the heavy one, as in the trace of VTC's artifact: 27 clients of LMSYS's arena."""

_MESSAGE, _ANSWER = 136, 256  # tokens, means of that trace
_LONGEST = 4  # means; longer ones are cut
_SPREAD = 0.9  # sigma of the logarithm of both
_TURNS = 4  # mean
_MOST_TURNS = 12
_THINK = 5.0  # seconds, mean


class Segment(NamedTuple):
    """A part of a prompt that others may begin with, too.

    Attributes:
        key: names it and all before it.
        tokens: how many it has.
    """

    key: tuple[object, ...]
    tokens: int


class Turn(NamedTuple):
    """A request of a conversation, in tokens, and the seconds before the next one."""

    message: int
    answer: int
    think: float


@dataclass(frozen=True)
class Conversation:
    """Requests of one agent, one turn after another.

    Attributes:
        name: among all of the run.
        tenant: its number; 0 is the heavy one.
        start: of its first turn, in seconds.
        system: the prompt it shares with others of its tenant.
        turns: what it asks.
    """

    name: int
    tenant: int
    start: float
    system: Segment
    turns: tuple[Turn, ...]


@dataclass
class Job:
    """A request on its way through the server.

    Attributes:
        conversation: whose turn it is.
        turn: its number there.
        path: its prompt, and after a preemption what it had answered.
        arrived: when, in seconds.
        left: prompt tokens to compute.
        answered: tokens, and how many of them are in `path`.
        queued: seconds until it first started; None before.
        started: how many of all jobs had started before it.
    """

    conversation: Conversation
    turn: int
    path: list[Segment]
    arrived: float
    left: int = 0
    answered: int = 0
    kept: int = 0
    queued: float | None = None
    started: int = 0
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.conversation.name}/{self.turn}"

    @property
    def tenant(self) -> int:
        """The number of its tenant."""
        return self.conversation.tenant

    @property
    def answer(self) -> int:
        """Tokens of its whole answer."""
        return self.conversation.turns[self.turn].answer

    @property
    def prompt(self) -> int:
        """Tokens that must be there before it decodes."""
        return sum(segment.tokens for segment in self.path)


class Workload(NamedTuple):
    """Arrivals, the same for every order.

    Attributes:
        conversations: by their start.
        seconds: in which they start.
        tenants: how many.
        has_light: whether all but the first ask for little.
    """

    conversations: tuple[Conversation, ...]
    seconds: float
    tenants: int
    has_light: bool


def skewed(seed: int, seconds: float, heavy: float, light: float) -> Workload:
    """One tenant floods, the others ask for little; some of them for more than others.

    Args:
        seed: of all that is drawn.
        seconds: in which conversations start.
        heavy: the first tenant's requests a second.
        light: those of all others together.
    """
    rates = [heavy, *(light * share for share in _skew())]
    return _workload(seed, seconds, rates, has_light=True)


def hoarded(seed: int, seconds: float, heavy: float, light: float) -> Workload:
    """The same, but the first tenant's answers are sixteen times as long: they fill the slots."""
    rates = [heavy, *(light * share for share in _skew())]
    return _workload(seed, seconds, rates, has_light=True, longer=16)


def crowded(seed: int, seconds: float, rate: float, tenants: int = 8) -> Workload:
    """All ask for more than their part, the last one for three times as much as the first."""
    shares = [1 + 2 * number / (tenants - 1) for number in range(tenants)]
    rates = [rate * share / sum(shares) for share in shares]
    return _workload(seed, seconds, rates, has_light=False)


def _skew() -> list[float]:
    shares = [1 / (1 + number) for number in range(LIGHT)]
    return [share / sum(shares) for share in shares]


def _workload(
    seed: int, seconds: float, rates: list[float], *, has_light: bool, longer: int = 1
) -> Workload:
    rng = random.Random(seed)  # noqa: S311 - arrivals, not secrets
    found = [
        conversation
        for tenant, rate in enumerate(rates)
        for conversation in _conversations(
            rng, tenant, rate / _TURNS, seconds, _ANSWER * (1 if tenant else longer)
        )
    ]
    ordered = tuple(sorted(found, key=lambda conversation: conversation.start))
    return Workload(ordered, seconds, len(rates), has_light)


def _conversations(
    rng: random.Random, tenant: int, rate: float, seconds: float, answer: int
) -> Iterator[Conversation]:
    systems = [Segment((tenant, number), rng.randrange(500, 2500)) for number in range(3)]
    now = rng.expovariate(rate)
    while now < seconds:
        count = min(_MOST_TURNS, 1 + int(rng.expovariate(1 / (_TURNS - 0.5))))
        turns = tuple(
            Turn(_length(rng, _MESSAGE), _length(rng, answer), rng.expovariate(1 / _THINK))
            for _ in range(count)
        )
        yield Conversation(rng.getrandbits(48), tenant, now, rng.choice(systems), turns)
        now += rng.expovariate(rate)


def _length(rng: random.Random, mean: int) -> int:
    drawn = rng.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)
    return max(1, min(_LONGEST * mean, round(drawn)))
