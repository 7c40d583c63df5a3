"""What a client asks for, and what it hears back: plain data that crosses threads."""

import enum

import msgspec

from ..cachestore.checkpoints import Reason
from ..models.params import Grammar, LogProbs, SamplingParams
from .errors import RequestError
from .order import Entry, Priority
from .times import Activity


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted request.

    Attributes:
        id: unique in this daemon.
        tenant: who sent it.
        conversation: its name, for logs and pins.
        prompt: token ids, at least one.
        max_tokens: the most tokens of the answer; the context has room for them.
        sampling: how its tokens are chosen.
        deadline: when it must have ended, on the engine's clock, in seconds.
        boundaries: offsets in the prompt that a next turn keeps, and what they are.
        grammar: what the answer is held to, if it is.
        priority: which requests go before it, among tenants that were served about as much.
        unit: requests of a tenant that share it start first in first out, and get their part of
            the tenant's time together; the conversation, where it is None.
        parallel: how many requests of its unit may run when it starts, itself included.
        before: seconds of what it did and waited for before it was queued.
        placed: it has waited for something else until it is queued, and was let in then.
    """

    id: str
    tenant: str
    conversation: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    deadline: float
    boundaries: list[tuple[int, Reason]] = []
    grammar: Grammar | None = None
    priority: Priority = Priority.INTERACTIVE
    unit: str | None = None
    parallel: int = 1
    before: dict[Activity, float] = {}
    placed: bool = False


def entry_of(request: Request) -> Entry:
    """A request as far as its place in the order goes."""
    return Entry(
        request.id,
        request.tenant,
        request.unit or request.conversation,
        request.priority,
        request.parallel,
    )


class FinishReason(enum.StrEnum):
    """Why no more tokens follow."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Started(msgspec.Struct, frozen=True):
    """The request left the queue.

    Attributes:
        matched: prompt tokens the trie recognised.
        cached: prompt tokens whose state was restored; the rest is left to prefill.
        at: when, on the engine's clock, in seconds.
    """

    matched: int
    cached: int
    at: float


class TokenEvent(msgspec.Struct, frozen=True):
    """One token of the answer.

    Attributes:
        at: when it was read, on the engine's clock, in seconds.
        logprobs: if the request asked for them.
    """

    token: int
    at: float
    logprobs: LogProbs | None = None


class Finished(msgspec.Struct, frozen=True):
    """The last event of every request."""

    reason: FinishReason
    error: RequestError | None = None


Event = Started | TokenEvent | Finished
