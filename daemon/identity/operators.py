"""Who runs the daemon: whoever may see what all tenants have, and declare prompts shared."""

import socket
from collections.abc import Mapping

from aiohttp import web

from ..config import DEFAULT_TENANT, Settings, TenantSettings, is_loopback
from ..http.failures import APIError
from .peer import is_operators, peer_uid
from .tenants import TENANT_HEADER, peer_socket, tenant_of_uid


def is_operator(request: web.Request, tenant: str, tenants: Mapping[str, TenantSettings]) -> bool:
    """Whether a request comes from the daemon's own user, or root, over the Unix socket.

    Args:
        request: whose sender is asked for.
        tenant: as `tenants.identify` names the sender. One that a key or a proxy names is no
            operator, on the Unix socket either.
        tenants: the tables of the settings.
    """
    peer = peer_socket(request)
    if peer is None or peer.family != socket.AF_UNIX or TENANT_HEADER in request.headers:
        return False
    return tenant == tenant_of_uid(peer_uid(peer), tenants) and is_operators(peer)


def is_monitor(request: web.Request, tenant: str, tenants: Mapping[str, TenantSettings]) -> bool:
    """Whether a request's tenant may see what all have, by a table of its own.

    Args:
        request: whose sender is asked for.
        tenant: as `tenants.identify` names it; one that a proxy names is none.
        tenants: the tables of the settings; what `default` says holds for nobody else.
    """
    own = tenants.get(tenant)
    return own is not None and own.monitor and TENANT_HEADER not in request.headers


def is_alone(request: web.Request, tenant: str, settings: Settings) -> bool:
    """Whether a request comes over TCP to a daemon of one user: without keys, on loopback.

    A daemon with tables of tenants has several users.

    Args:
        request: whose sender is asked for.
        tenant: as `tenants.identify` names it, which has refused it where keys are asked for.
        settings: those in force.
    """
    peer = peer_socket(request)
    return (
        tenant == DEFAULT_TENANT
        and peer is not None
        and peer.family != socket.AF_UNIX
        and settings.tcp is not None
        and is_loopback(settings.tcp[0])
        and not settings.tenants
        and TENANT_HEADER not in request.headers
    )


def refuse_tenants(*, operator: bool, what: str) -> None:
    """Refuse what only the operator may do.

    Raises:
        APIError: 403, to anybody else.
    """
    if not operator:
        message = f"only the user that runs the daemon may {what}, over the Unix socket"
        raise APIError(403, message, code="operator_only")
