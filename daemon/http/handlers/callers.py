"""Who sends a request, and what its headers say of how it is to be treated."""

from aiohttp import web

from ...config import Settings, tenant_settings
from ...identity.caller import Caller
from ...identity.conversations import named_conversation, session
from ...identity.deadlines import Wait, timeout_of
from ...identity.key_ring import KeyRing
from ...identity.operators import is_alone, is_monitor, is_operator
from ...identity.priorities import priority_of
from ...identity.tenants import identify
from ..answer_headers import ARRIVED_AT, REQUEST_ID, SHARE


def caller_of(request: web.Request, settings: Settings, keys: KeyRing) -> Caller:
    """Say whose request it is.

    Args:
        request: as it came.
        settings: those in force.
        keys: that callers may send.

    Raises:
        APIError: it is nobody's who may ask, or a header has what is of no use.
    """
    tenant = identify(request, settings, keys)
    highest = tenant_settings(settings.tenants, tenant).priority
    return Caller(
        request[REQUEST_ID],
        tenant,
        named_conversation(request.headers),
        session(request.headers),
        request[ARRIVED_AT],
        request[SHARE],
        Wait(request[ARRIVED_AT], timeout_of(request.headers)),
        priority_of(request.headers, highest, flex=False),
        operator=is_operator(request, tenant, settings.tenants),
        monitor=is_monitor(request, tenant, settings.tenants),
        alone=is_alone(request, tenant, settings),
    )
