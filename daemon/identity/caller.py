"""A request's sender, and what its headers ask for."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from aiohttp import web

from ...scheduler.order import Priority
from ..config import PriorityName, Settings, tenant_settings
from ..http.failures import APIError
from ..quoting import quote
from .conversations import named_conversation, session
from .keys import KeyRing
from .tenants import identify, is_alone, is_monitor, is_operator

PRIORITY_HEADER = "X-Umbel-Priority"
TIMEOUT_HEADER = "X-Umbel-Timeout"

_PRIORITIES: dict[str, Priority] = {
    "interactive": Priority.INTERACTIVE,
    "batch": Priority.BATCH,
}


class Caller(NamedTuple):
    """A request's sender, and what its headers ask for."""

    tenant: str
    conversation: str | None = None  # its name; None for one of the request's own
    session: str | None = None  # of an agent, which may have several conversations
    timeout: float | None = None  # seconds that the request may take; None for the daemon's limit
    priority: Priority = Priority.INTERACTIVE
    operator: bool = False  # the user that runs the daemon
    monitor: bool = False  # the tenant may see what all have
    alone: bool = False  # the daemon has one user only, who sent this over TCP

    @property
    def sees_only(self) -> str | None:
        """The tenant whose requests, state and figures it may see; None for all tenants."""
        return None if self.operator or self.monitor else self.tenant

    @property
    def watches_only(self) -> str | None:
        """The tenant that `/status` and `/metrics` show it; None for all tenants."""
        return None if self.alone else self.sees_only


def caller_of(request: web.Request, settings: Settings, keys: KeyRing) -> Caller:
    """Identify a request's sender, and read the headers.

    Raises:
        APIError: the sender may not ask, or a header has a value that is of no use.
    """
    tenant = identify(request, settings, keys)
    highest = tenant_settings(settings.tenants, tenant).priority
    return Caller(
        tenant,
        named_conversation(request.headers),
        session(request.headers),
        timeout_of(request.headers),
        priority_of(request.headers, highest, flex=False),
        operator=is_operator(request, tenant, settings.tenants),
        monitor=is_monitor(request, tenant, settings.tenants),
        alone=is_alone(request, tenant, settings),
    )


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Read the seconds that a request may take, waiting included; None if no header says so.

    Raises:
        APIError: 400, the value is no positive number.
    """
    asked = headers.get(TIMEOUT_HEADER)
    if asked is None:
        return None
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        message = f"{TIMEOUT_HEADER} is {quote(asked)}; send a positive number of seconds"
        raise APIError(400, message, param=TIMEOUT_HEADER)
    return seconds


def priority_of(headers: Mapping[str, str], highest: PriorityName, *, flex: bool) -> Priority:
    """Return a request's priority.

    Args:
        headers: of the request; one of them may name a priority.
        highest: that the tenant may have; a request that asks for more has this one.
        flex: the body asks for a slow service, as OpenAI's protocol has it. The header is
            stronger.

    Raises:
        APIError: 400, the header names none.
    """
    asked = headers.get(PRIORITY_HEADER, "batch" if flex else "interactive")
    if asked not in _PRIORITIES:
        message = f"{PRIORITY_HEADER} is {quote(asked)}; send {' or '.join(_PRIORITIES)}"
        raise APIError(400, message, param=PRIORITY_HEADER)
    return max(_PRIORITIES[asked], _PRIORITIES[highest])
