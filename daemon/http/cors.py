"""What browsers are told about pages of other origins (CORS): nothing, unless some are named."""

from collections.abc import Collection

from aiohttp import hdrs, web

_METHODS = "GET, POST, DELETE"
_EXPOSED = "x-request-id, request-id, retry-after"
_MAX_AGE = "600"


class CrossOrigin:
    """Lets pages of the named origins use the daemon.

    No cookies are involved, so no credentials are allowed: a key is a header like others.

    Args:
        origins: as browsers write them.
    """

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = origins

    def headers(self, request: web.Request) -> dict[str, str]:
        """List what the answer to a request says to a browser, whatever the answer is."""
        if not self._origins:
            return {}
        headers: dict[str, str] = {hdrs.VARY: hdrs.ORIGIN}
        origin = request.headers.get(hdrs.ORIGIN, "")
        if origin in self._origins:
            headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
        return headers

    def preflight(self, request: web.Request) -> web.Response | None:
        """Answer what a browser asks before it sends a page's request; None for all else.

        It carries no key, so it is answered without one. Which headers the page will send is up
        to the page: SDKs add many of their own.
        """
        asks = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        named = request.headers.get(hdrs.ORIGIN) in self._origins
        if request.method != hdrs.METH_OPTIONS or not asks or not named:
            return None
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE,
        }
        if wanted := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
        return web.Response(status=204, headers=headers)
