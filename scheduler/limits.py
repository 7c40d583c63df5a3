"""Limits of requests: what fits the context, how many may wait, and the errors of those refused."""

from collections.abc import Callable
from dataclasses import dataclass

from .errors import (
    ContextLengthExceededError,
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    QuotaSpentError,
    UnavailableError,
)
from .sequence import Sequence, SequenceStatus
from .tenants import TenantUse

RETRY_AFTER = 2  # seconds that a refused client waits, where nothing is known of how long it takes
_TIMES_FREE = 8
"""How many times as many requests of a tenant may wait as places are free; see `check_waiting`.

Where k tenants send without end, 1 of 1 + 8 k places stays free: one has 8/9 of them, two have
16/17 together. A larger factor would leave few places beside one tenant; a smaller one would
refuse a tenant where there is much room. A tenant with fewer than 8 that wait may have every place.
"""


def check_room(use: TenantUse, limit: int, now: float) -> None:
    """Refuse a request by `QueueFullError` where as many wait as may, of all tenants."""
    if use.waiting >= limit:
        seconds = use.drained.next_place_in(now, RETRY_AFTER)
        message = f"{limit} requests are waiting already; try again later"
        raise QueueFullError(message, retry_after=seconds)


def check_waiting(
    use: TenantUse, tenant: str, limit: int, now: float, *, placed: bool = False
) -> None:
    """Refuse a request for which there is no room, by `QueueFullError`.

    Once requests of several tenants have come, or where tenants are named, no tenant has all the
    room: it may have so many waiting as is a multiple of the places that are free. That is the
    dynamic threshold of a shared buffer (Choudhury and Hahne, IEEE/ACM Transactions on Networking
    6(2), 1998). A request that is `placed` waited already, and keeps its place.
    """
    use.meet(tenant)
    check_room(use, limit, now)
    most, own, free = use.agreed(tenant).waiting, use.waiting_of(tenant), limit - use.waiting
    if most is not None and own >= most:
        message = f"{most} requests of tenant {tenant} are waiting already; try again later"
    elif use.shared and not placed and own >= _TIMES_FREE * free:
        message = (
            f"{own} requests of tenant {tenant} are waiting already, and the places that are left "
            "are for other tenants; try again later, or send fewer at a time"
        )
    else:
        return
    seconds = use.drained.next_place_in(now, RETRY_AFTER, tenant)
    raise QueueFullError(message, retry_after=seconds)


def check_tokens(use: TenantUse, tenant: str, now: float) -> None:
    """Refuse a request by `QuotaSpentError` whose tenant has no tokens left, with any model."""
    if seconds := use.quotas.refills_in(tenant, now):
        raise QuotaSpentError(
            f"tenant {tenant} has spent its {use.agreed(tenant).tokens_per_minute} tokens "
            f"a minute; there are more in {seconds} s",
            retry_after=seconds,
        )


def no_room(needed: int, usable: int, pinned: int) -> UnavailableError:
    """Make the error of a request for which there is no memory at present.

    All are bytes: needed to start, usable, and those that pins of its own tenant hold.
    """
    return UnavailableError(
        f"memory is short: the request needs {needed} bytes of {usable} that may be used at present"
        + (f", of which your pins hold {pinned}: unpin something, or" if pinned else ";")
        + " try again later",
        retry_after=RETRY_AFTER,
    )


def late(sequence: Sequence) -> DeadlineExceededError:
    """Make the error of a request whose deadline has passed."""
    state = "waited" if sequence.status is SequenceStatus.WAITING else "ran"
    return DeadlineExceededError(f"the request still {state} when its time was over")


@dataclass(frozen=True)
class MemoryBound:
    """Why a context is shorter than the model's."""

    usable: int  # bytes that the state of a request may take
    needed: Callable[[int], int]  # says how many a request of so many tokens takes, alone


class Admission:
    """Checks a request against the context, which may be cut for what `memory` holds."""

    def __init__(self, context_length: int, memory: MemoryBound | None = None) -> None:
        self.context_length = context_length
        self._memory = memory

    def check_text(self, characters: int, longest_token: int) -> None:
        """Refuse a text that cannot fit however it is tokenised, before that is tried.

        Encoding tens of megabytes takes minutes and gigabytes. Raises `ContextLengthExceededError`.
        """
        least = characters // longest_token
        if least > self.context_length:
            raise self._too_long(f"over {least}", least)

    def answer_length(self, prompt_length: int, max_tokens: int | None) -> int:
        """Say how many tokens the answer may have: what was asked for, within the context.

        A `max_tokens` beyond the context is cut, not refused: agents ask for a fixed large number.

        Raises:
            InvalidRequestError: the prompt has no tokens.
            ContextLengthExceededError: the prompt leaves no room for an answer.
        """
        if prompt_length == 0:
            raise InvalidRequestError("the prompt is empty; send at least one token of text")
        room = self.context_length - prompt_length
        if room < 1:
            raise self._too_long(str(prompt_length), prompt_length)
        return room if max_tokens is None else min(max_tokens, room)

    def _too_long(self, length: str, tokens: int) -> ContextLengthExceededError:
        message = (
            f"This model's maximum context length is {self.context_length} tokens, and the "
            f"prompt has {length}: it must leave room for an answer. Shorten the prompt."
        )
        if self._memory is not None:
            message += (
                f" (The context is cut to what memory holds: so many tokens and an answer take "
                f"{self._memory.needed(tokens + 1)} bytes, and {self._memory.usable} of "
                "cache_bytes may be used.)"
            )
        return ContextLengthExceededError(message, tokens=tokens, most=self.context_length - 1)
