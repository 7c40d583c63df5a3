"""Whether a request may wait: what it hears where as many wait as may, or its tokens are spent."""

from .errors import QueueFullError, QuotaSpentError
from .fairness.use import TenantUse

RETRY_AFTER = 2
"""Seconds that a refused client is asked to wait, where nothing is known of how long it takes."""


def queue_full(limit: int, retry_after: int = RETRY_AFTER) -> QueueFullError:
    """Make the error of a request for which there is no room."""
    message = f"{limit} requests are waiting already; try again later"
    return QueueFullError(message, retry_after=retry_after)


def check_waiting(use: TenantUse, tenant: str, limit: int, now: float) -> None:
    """Refuse a request for which there is no room.

    Args:
        use: what waits already, for any model.
        tenant: whose request it is.
        limit: the most requests that may wait, of all tenants.
        now: the present time, in seconds.

    Raises:
        QueueFullError: as many wait as may wait, of all or of its tenant.
    """
    most = use.agreed(tenant).waiting
    if use.waiting >= limit:
        raise queue_full(limit, use.drained.of_all.next_place_in(now, RETRY_AFTER))
    if most is not None and use.waiting_of(tenant) >= most:
        message = f"{most} requests of tenant {tenant} are waiting already; try again later"
        seconds = use.drained.of(tenant).next_place_in(now, RETRY_AFTER)
        raise QueueFullError(message, retry_after=seconds)


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
