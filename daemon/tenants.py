"""Who is at the other end of a connection."""

import hmac
import socket
import struct
import sys
from collections.abc import Collection

from aiohttp import hdrs, web
from yarl import URL

from .config import is_loopback
from .failures import APIError
from .quoting import quote

DEFAULT = "default"


def identify(
    request: web.Request, api_key: str | None, origins: Collection[str] = frozenset()
) -> str:
    """Name the tenant of a request, or refuse it.

    On the Unix socket the file's mode has decided who may connect, and the kernel says who
    did. On TCP the key decides, if there is one. A browser is refused there unless its page
    came from this machine, or from an origin that may: any web page can send requests to a
    loopback port.

    Args:
        request: whose sender is asked for.
        api_key: what callers on TCP must send, if anything.
        origins: of web pages that may use the daemon.

    Raises:
        APIError: 401 without the right key; 403 from a foreign web page or for a host name
            that is not this machine's (DNS rebinding).
    """
    peer = _peer_socket(request)
    if peer is not None and peer.family == socket.AF_UNIX:
        return _unix_tenant(peer)
    if api_key is not None:
        if not hmac.compare_digest(_bytes(_sent_key(request)), _bytes(api_key)):
            message = "this daemon needs its API key: send it as 'Authorization: Bearer KEY'"
            raise APIError(401, message, code="invalid_api_key")
        return "key"
    _refuse_browsers(request, origins)
    return DEFAULT


def _peer_socket(request: web.Request) -> socket.socket | None:
    transport = request.transport
    return None if transport is None else transport.get_extra_info("socket")


def _unix_tenant(peer: socket.socket) -> str:
    if sys.platform != "linux":
        return DEFAULT
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return f"uid:{uid}"


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
        raise APIError(
            403, f"this daemon does not answer for the host {quote(host)}", code="bad_host"
        )
    origin = request.headers.get(hdrs.ORIGIN)
    if origin and origin not in origins and not is_loopback(_host_of(origin)):
        message = f"web pages of {quote(origin)} may not use this daemon; cors_origins names some"
        raise APIError(403, message, code="bad_origin")
