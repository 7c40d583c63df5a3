"""A request's sender: which tenant it is, whether it runs the daemon, and which terms it has.

A sender is known by a key, by its user at the other end of the Unix socket, or not at all.
"""

import hmac
import os
import socket
import struct
import sys
from collections.abc import Callable, Collection, Mapping

from aiohttp import hdrs, web
from yarl import URL

from ...cachestore.pool import TenantBounds
from ...cachestore.tries import SHARED
from ...scheduler.tenants import TenantUse, Terms
from ..config import (
    DEFAULT_TENANT,
    TENANT_RULE,
    Settings,
    TenantSettings,
    is_loopback,
    is_tenant_name,
    tenant_settings,
)
from ..http.failures import APIError
from ..quoting import quote
from .keys import KEY_PREFIX, KeyRing

TENANT_HEADER = "X-Umbel-Tenant"
KEY_TENANT = "key"
"""The tenant of the settings' `api_key`."""

# struct ucred of Linux: pid, uid, gid.
_UCRED = struct.Struct("iII")
# struct xucred of macOS (sys/ucred.h): version, uid, the number of groups, and 16 groups.
_XUCRED = struct.Struct("=IIhxx16I")
_XUCRED_VERSION = 0
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_ROOT = 0


# -- the other end of a connection ---------------------------------------------------------------


def peer_uid(peer: socket.socket, platform: str = sys.platform) -> int | None:
    """Ask the kernel which user connected a Unix socket; None if the system does not say.

    It is the user that connected, even if another has the connection now.
    """
    if platform == "linux":
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(credentials)[1])
    if platform != "darwin":
        return None
    credentials = peer.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
    if len(credentials) < _XUCRED.size:
        return None
    version, uid, *_ = _XUCRED.unpack_from(credentials)
    return int(uid) if version == _XUCRED_VERSION else None


def is_operators(peer: socket.socket) -> bool:
    """Return True if the daemon's own user, or root, is at the other end of a connection."""
    if peer.family != socket.AF_UNIX:
        return False
    uid = peer_uid(peer)
    return uid is None or uid in (os.getuid(), _ROOT)  # None: the socket's mode alone decides


def peer_name(peer: socket.socket) -> str:
    """Name the other end of a connection: its address, or its user."""
    if peer.family == socket.AF_UNIX:
        return f"uid:{peer_uid(peer)}"
    try:
        return str(peer.getpeername()[0])
    except OSError:  # it has left already
        return ""


def _socket_of(request: web.Request) -> socket.socket | None:
    """Return the socket that a request came by; None once it is closed."""
    transport = request.transport
    return None if transport is None else transport.get_extra_info("socket")


# -- which tenant ----------------------------------------------------------------------------------


def identify(request: web.Request, settings: Settings, keys: KeyRing) -> str:
    """Name the tenant of a request, or refuse it.

    A key names its tenant on every socket. Without one, the file's mode has decided who may
    connect to the Unix socket, and the kernel names the user. On TCP a key must be sent once
    there are any, or were. If there are none, a browser is refused unless its page came from this
    machine, or from an origin that may: any web page can send requests to a loopback port. The
    holder of a proxy's key may name another tenant.

    Raises:
        APIError: 401 without a right key; 403 from a foreign web page, for a host name that is not
            this machine's (DNS rebinding), or for a tenant that is named without a proxy's key;
            400 for a tenant's name that is none, or for two.
    """
    tenant, proxy = _by_key(request, settings, keys)
    if tenant is None:
        tenant = _by_connection(request, settings, keys)
    named = request.headers.getall(TENANT_HEADER, [])
    if not named:
        return tenant
    if not proxy:
        message = f"only who sends a key made with --proxy may send {TENANT_HEADER}; leave it out"
        raise APIError(403, message, code="not_a_proxy", param=TENANT_HEADER)
    if len(named) > 1:  # the proxy's own beside its client's
        raise APIError(400, f"{TENANT_HEADER} is there twice; send one", param=TENANT_HEADER)
    if not is_tenant_name(named[0]):
        message = f"{TENANT_HEADER} is {quote(named[0])}; send a name that has {TENANT_RULE}"
        raise APIError(400, message, param=TENANT_HEADER)
    return named[0]


def _by_key(request: web.Request, settings: Settings, keys: KeyRing) -> tuple[str | None, bool]:
    """Name the tenant of the key that was sent, and say whether it is a proxy's.

    A key of another service says nothing: many clients must send some key, and have none.
    """
    bearer = request.headers.get(hdrs.AUTHORIZATION, "")
    scheme, _, token = bearer.partition(" ")
    is_bearer = scheme.lower() == "bearer"
    sent = token.strip() if is_bearer else request.headers.get("x-api-key", "")
    if (key := keys.find(sent)) is not None:
        return key.tenant, key.proxy
    own = settings.api_key
    if own is not None and hmac.compare_digest(_bytes(sent), _bytes(own)):
        return KEY_TENANT, False
    if sent.startswith(KEY_PREFIX):
        raise APIError(401, "this API key is not known; was it revoked?", code="invalid_api_key")
    return None, False


def _bytes(key: str) -> bytes:
    """Return a header's own bytes: those that are no UTF-8 reach us as surrogates."""
    return key.encode(errors="surrogateescape")


def _by_connection(request: web.Request, settings: Settings, keys: KeyRing) -> str:
    """Name the tenant of a connection on which no key was sent."""
    peer = _socket_of(request)
    if peer is not None and peer.family == socket.AF_UNIX:
        return tenant_of_uid(peer_uid(peer), settings.tenants)
    exposed = settings.tcp is not None and not is_loopback(settings.tcp[0])
    if settings.api_key is not None or exposed or keys.wanted():
        message = "this daemon needs its API key: send it as 'Authorization: Bearer KEY'"
        raise APIError(401, message, code="invalid_api_key")
    _refuse_browsers(request, settings.cors_origins)
    return DEFAULT_TENANT


def tenant_of_uid(uid: int | None, tenants: Mapping[str, TenantSettings]) -> str:
    """Name the tenant that a user of this machine is; None is a user that is not known."""
    if uid is None:
        return DEFAULT_TENANT
    named = (name for name, tenant in tenants.items() if uid in tenant.uids)
    return next(named, f"uid:{uid}")


def _refuse_browsers(request: web.Request, origins: Collection[str]) -> None:
    host = _host_of(f"http://{request.host}")
    if not is_loopback(host):
        message = (
            f"this daemon does not answer for the host {quote(host)} without a key; make one with "
            "`umbel keys add NAME`, and send it as 'Authorization: Bearer KEY'"
        )
        raise APIError(403, message, code="bad_host")
    origin = request.headers.get(hdrs.ORIGIN)
    if origin and origin not in origins and not is_loopback(_host_of(origin)):
        message = f"web pages of {quote(origin)} may not use this daemon; cors_origins names some"
        raise APIError(403, message, code="bad_origin")
    # A page's images, scripts and links are fetched without an origin.
    if not origin and request.headers.get("Sec-Fetch-Site", "").lower() == "cross-site":
        message = "web pages of another site may not use this daemon; open its address itself"
        raise APIError(403, message, code="bad_origin")


def _host_of(url: str) -> str:
    """Return the host of a URL; empty, and so no one's, if it is none."""
    try:
        return URL(url).host or ""
    except ValueError:
        return ""


# -- what the tenant may do ------------------------------------------------------------------------


def is_operator(request: web.Request, tenant: str, tenants: Mapping[str, TenantSettings]) -> bool:
    """Return True for the daemon's own user, or root, over the Unix socket.

    A tenant that a key or a proxy names is no operator, on the Unix socket either.
    """
    peer = _socket_of(request)
    if peer is None or peer.family != socket.AF_UNIX or TENANT_HEADER in request.headers:
        return False
    return tenant == tenant_of_uid(peer_uid(peer), tenants) and is_operators(peer)


def is_monitor(request: web.Request, tenant: str, tenants: Mapping[str, TenantSettings]) -> bool:
    """Return True if a table of the tenant's own lets it see all tenants' requests and state.

    The table of `default` lets no other tenant do so, and a tenant that a proxy names is none.
    """
    own = tenants.get(tenant)
    return own is not None and own.monitor and TENANT_HEADER not in request.headers


def is_alone(request: web.Request, tenant: str, settings: Settings) -> bool:
    """Return True for a request over TCP to a daemon of one user: without keys, on loopback.

    A daemon with tables of tenants has several users.
    """
    peer = _socket_of(request)
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
    """Refuse anyone but the operator, by an APIError 403."""
    if not operator:
        message = f"only the user that runs the daemon may {what}, over the Unix socket"
        raise APIError(403, message, code="operator_only")


class TenantTerms:
    """The settings of each tenant at present, as the scheduler and the cache read them.

    Prompts that all tenants share have no bounds.

    Attributes:
        use: the tenants' use of all models together.
    """

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self.use = TenantUse(self.terms, self.names_tenants)

    @property
    def floors(self) -> int:
        """The sum of the bytes of state that tenants keep in any case."""
        return sum(tenant.floor for tenant in self._settings().tenants.values())

    def bounds(self, tenant: str) -> TenantBounds:
        """Return the bounds of a tenant's state."""
        if tenant == SHARED:
            return TenantBounds()
        found = tenant_settings(self._settings().tenants, tenant)
        return TenantBounds(found.floor, found.ceiling, found.disk_budget)

    def terms(self, tenant: str) -> Terms:
        """Return the terms of a tenant's requests."""
        if tenant == SHARED:
            return Terms()
        found = tenant_settings(self._settings().tenants, tenant)
        return Terms(found.weight, found.running, found.waiting, found.tokens_per_minute)

    def names_tenants(self) -> bool:
        """Return True if a tenant besides `default` has a table, so that several are expected."""
        return any(name != DEFAULT_TENANT for name in self._settings().tenants)
