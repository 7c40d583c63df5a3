"""Whether a request may wait: what it hears where as many wait as may, or its tokens are spent."""

from .errors import QueueFullError, QuotaSpentError
from .tenants import TenantUse

RETRY_AFTER = 2
"""Seconds that a refused client is asked to wait, where nothing is known of how long it takes."""

_TIMES_FREE = 8
"""How many times as many requests of a tenant may wait as places are free; see `check_waiting`.

Where k tenants send without end, 1 of 1 + 8 k places stays free: one has 8/9 of them, two have
16/17 together. A larger power of two would leave few places beside one tenant, 1/17 for 16. A
smaller one would refuse a tenant where there is much room, at 2/3 for 2, and those who send little
need few places, as their requests start soon. The first to come has 8/9 at once, the next one 8/9
of what is left, and so on, until enough of the first have started. A tenant with fewer than 8
requests that wait may have every place there is.
"""


def check_room(use: TenantUse, limit: int, now: float) -> None:
    """Refuse a request where as many wait as may, of all tenants; see `check_waiting`.

    Raises:
        QueueFullError: it is so.
    """
    if use.waiting >= limit:
        seconds = use.drained.of_all.next_place_in(now, RETRY_AFTER)
        message = f"{limit} requests are waiting already; try again later"
        raise QueueFullError(message, retry_after=seconds)


def check_waiting(
    use: TenantUse, tenant: str, limit: int, now: float, *, placed: bool = False
) -> None:
    """Refuse a request for which there is no room.

    Once requests of several tenants have come, or where tenants are named, no tenant has all the
    room: it may have so many waiting as is a multiple of the places that are free. That is the
    dynamic threshold of a shared buffer (Choudhury and Hahne, IEEE/ACM Transactions on Networking
    6(2), 1998). Who has nothing waiting is let in wherever a place is free.

    Args:
        use: what waits already, for any model.
        tenant: whose request it is.
        limit: the most requests that may wait, of all tenants.
        now: the present time, in seconds.
        placed: it had a place among those that wait until now, and keeps it though it may be more
            than its tenant's part by now.

    Raises:
        QueueFullError: as many wait as may wait, of all or of its tenant.
    """
    use.meet(tenant)
    check_room(use, limit, now)
    most = use.agreed(tenant).waiting
    if most is not None and use.waiting_of(tenant) >= most:
        message = f"{most} requests of tenant {tenant} are waiting already; try again later"
        raise _own_full(use, tenant, message, now)
    own, free = use.waiting_of(tenant), limit - use.waiting
    if use.shared and not placed and own >= _TIMES_FREE * free:
        message = (
            f"{own} requests of tenant {tenant} are waiting already, and the places that are left "
            "are for other tenants; try again later, or send fewer at a time"
        )
        raise _own_full(use, tenant, message, now)


def _own_full(use: TenantUse, tenant: str, message: str, now: float) -> QueueFullError:
    """Make the error of a request that waits for others of its tenant to start."""
    seconds = use.drained.of(tenant).next_place_in(now, RETRY_AFTER)
    return QueueFullError(message, retry_after=seconds)


def check_tokens(use: TenantUse, tenant: str, now: float) -> None:
    """Refuse a request whose tenant has no tokens left.

    Args:
        use: what is spent already, with any model.
        tenant: whose request it is.
        now: the present time, in seconds.

    Raises:
        QuotaSpentError: its tenant has spent its tokens of this minute.
    """
    if seconds := use.quotas.refills_in(tenant, now):
        raise QuotaSpentError(
            f"tenant {tenant} has spent its {use.agreed(tenant).tokens_per_minute} tokens "
            f"a minute; there are more in {seconds} s",
            retry_after=seconds,
        )
