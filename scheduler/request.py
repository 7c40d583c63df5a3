"""Requests and the events of their answers: plain data that crosses threads."""

import enum

import msgspec

from ..cachestore.checkpoints import Reason
from ..models.params import Grammar, LogProbs, SamplingParams
from .errors import RequestError
from .order import Entry, Priority
from .times import Activity


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted request."""

    id: str  # unique in this daemon
    tenant: str  # who sent it
    conversation: str  # its name, for logs and pins
    prompt: list[int]  # token ids, at least one
    max_tokens: int  # the most tokens of the answer; the context has room for them
    sampling: SamplingParams  # how its tokens are chosen
    deadline: float  # when it must have ended, on the engine's clock, in seconds
    # offsets in the prompt that a next turn keeps, and what they are
    boundaries: list[tuple[int, Reason]] = []
    grammar: Grammar | None = None  # what the answer is held to, if it is
    # which requests go before it, among tenants that were served about as much
    priority: Priority = Priority.INTERACTIVE
    # requests of a tenant that share it start first in first out, and get their part of the
    # tenant's time together; the conversation, where it is None
    unit: str | None = None
    parallel: int = 1  # how many requests of its unit may run when it starts, itself included
    before: dict[Activity, float] = {}  # seconds of what it did and waited for before it was queued
    placed: bool = False  # it has waited for something else until it is queued, and was let in then


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
    """The request left the queue."""

    matched: int  # prompt tokens the trie recognised
    cached: int  # prompt tokens whose state was restored; the rest is left to prefill
    at: float  # when, on the engine's clock, in seconds


class TokenEvent(msgspec.Struct, frozen=True):
    """One token of the answer."""

    token: int
    at: float  # when it was read, on the engine's clock, in seconds
    logprobs: LogProbs | None = None  # if the request asked for them


class Finished(msgspec.Struct, frozen=True):
    """The last event of every request."""

    reason: FinishReason
    error: RequestError | None = None


Event = Started | TokenEvent | Finished
