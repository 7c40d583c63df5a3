"""Who sends a request: by a key, by the user at the other end of the Unix socket, or unnamed."""

import hmac
import socket
from collections.abc import Collection, Mapping

from aiohttp import hdrs, web
from yarl import URL

from ..config import (
    DEFAULT_TENANT,
    TENANT_RULE,
    Settings,
    TenantSettings,
    is_loopback,
    is_tenant_name,
)
from ..http.failures import APIError
from ..quoting import quote
from .key_file import KEY_PREFIX
from .key_ring import KeyRing
from .peer import peer_uid

TENANT_HEADER = "X-Umbel-Tenant"
KEY_TENANT = "key"
"""Who sends the `api_key` of the settings."""


def identify(request: web.Request, settings: Settings, keys: KeyRing) -> str:
    """Name the tenant of a request, or refuse it.

    A key names its tenant wherever it is sent. Without one, the file's mode has decided who may
    connect to the Unix socket, and the kernel says who did. On TCP a key must be sent once there
    are any, or were. Where there are none, a browser is refused unless its page came from this
    machine, or from an origin that may: any web page can send requests to a loopback port. A key
    for a proxy may name another tenant.

    Args:
        request: whose sender is asked for.
        settings: those in force.
        keys: that may be sent.

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
    if len(named) > 1:  # the proxy's own beside what its client sent
        raise APIError(400, f"{TENANT_HEADER} is there twice; send one", param=TENANT_HEADER)
    if not is_tenant_name(named[0]):
        message = f"{TENANT_HEADER} is {quote(named[0])}; send a name that has {TENANT_RULE}"
        raise APIError(400, message, param=TENANT_HEADER)
    return named[0]


def _by_key(request: web.Request, settings: Settings, keys: KeyRing) -> tuple[str | None, bool]:
    """Name the tenant of the key that was sent, and say whether it is a proxy's.

    What is no key of ours says nothing: many clients must send some key, and have none.
    """
    sent = _sent_key(request)
    if (key := keys.find(sent)) is not None:
        return key.tenant, key.proxy
    own = settings.api_key
    if own is not None and hmac.compare_digest(_bytes(sent), _bytes(own)):
        return KEY_TENANT, False
    if sent.startswith(KEY_PREFIX):
        raise APIError(401, "this API key is not known; was it revoked?", code="invalid_api_key")
    return None, False


def _by_connection(request: web.Request, settings: Settings, keys: KeyRing) -> str:
    """Name the tenant of a connection on which no key was sent."""
    peer = peer_socket(request)
    if peer is not None and peer.family == socket.AF_UNIX:
        return tenant_of_uid(peer_uid(peer), settings.tenants)
    exposed = settings.tcp is not None and not is_loopback(settings.tcp[0])
    if settings.api_key is not None or exposed or keys.wanted():
        message = "this daemon needs its API key: send it as 'Authorization: Bearer KEY'"
        raise APIError(401, message, code="invalid_api_key")
    _refuse_browsers(request, settings.cors_origins)
    return DEFAULT_TENANT


def tenant_of_uid(uid: int | None, tenants: Mapping[str, TenantSettings]) -> str:
    """Name the tenant that a user of this machine is; None is who is not known."""
    if uid is None:
        return DEFAULT_TENANT
    named = (name for name, tenant in tenants.items() if uid in tenant.uids)
    return next(named, f"uid:{uid}")


def peer_socket(request: web.Request) -> socket.socket | None:
    """The socket that a request came by; None once it is closed."""
    transport = request.transport
    return None if transport is None else transport.get_extra_info("socket")


def _sent_key(request: web.Request) -> str:
    bearer = request.headers.get(hdrs.AUTHORIZATION, "")
    scheme, _, token = bearer.partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return request.headers.get("x-api-key", "")


def _bytes(key: str) -> bytes:
    """A header's own bytes: what is not UTF-8 in it reaches us as surrogates."""
    return key.encode(errors="surrogateescape")


def _host_of(url: str) -> str:
    """The host of a URL; empty, and so nobody's, if it is none."""
    try:
        return URL(url).host or ""
    except ValueError:
        return ""


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
    # Images, scripts and links of a page are asked for without an origin.
    if not origin and request.headers.get("Sec-Fetch-Site", "").lower() == "cross-site":
        message = "web pages of another site may not use this daemon; open its address itself"
        raise APIError(403, message, code="bad_origin")
