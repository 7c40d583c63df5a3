"""Web pages: which may use the daemon, and what their browsers are told."""

import tempfile
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from .running import Reply, RunningDaemon, running

PAGE = "https://app.example"
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ALLOW = "Access-Control-Allow-Origin"
EXPOSED = "x-request-id, request-id, retry-after"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module")
def open_daemon(long_tiny_dir: Path) -> Iterator[RunningDaemon]:
    """A daemon that a page may use, on TCP without a key."""
    flags = ("--port", "0", "--cors-origin", PAGE)
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), long_tiny_dir, *flags) as daemon,
    ):
        yield daemon


def over_tcp(
    daemon: RunningDaemon,
    method: str,
    route: str,
    headers: Mapping[str, str],
    body: Any = None,
) -> Reply:
    """Send a request as a browser does."""
    connection = HTTPConnection("127.0.0.1", daemon.tcp_port(), timeout=60)
    try:
        raw = None if body is None else msgspec.json.encode(body)
        connection.request(method, route, raw, dict(headers))
        response = connection.getresponse()
        return Reply(response.status, dict(response.headers), response.read())
    finally:
        connection.close()


def test_a_named_page_is_served(open_daemon: RunningDaemon) -> None:
    """Whole answers, streams, errors of handlers, and of routes that are none."""
    for route, body, status in (
        (CHAT, ASK, 200),
        (CHAT, ASK | {"stream": True}, 200),
        (CHAT, ASK | {"max_tokens": 0}, 400),
        ("/v1/nothing", ASK, 404),
    ):
        reply = over_tcp(open_daemon, "POST", route, {"Origin": PAGE}, body)
        assert reply.status == status
        assert reply.headers.get(ALLOW) == PAGE
        assert reply.headers["Access-Control-Expose-Headers"] == EXPOSED
        assert reply.headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in reply.headers


def test_other_pages_are_refused(open_daemon: RunningDaemon) -> None:
    """Origins are compared whole: a part of a named one is another page."""
    for origin in ("https://app.example.evil.example", "http://app.example", f"{PAGE}:8443"):
        reply = over_tcp(open_daemon, "POST", CHAT, {"Origin": origin}, ASK)
        assert (reply.status, reply.json()["error"]["code"]) == (403, "bad_origin")
        assert "cors_origins" in reply.json()["error"]["message"]
        assert reply.headers.get(ALLOW) is None
        assert reply.headers["Vary"] == "Origin"


def test_requests_embedded_by_other_sites_are_refused(open_daemon: RunningDaemon) -> None:
    """An image or a script is asked for without an origin; who opens the address is no page."""
    for route in ("/status", "/v1/models", "/v1/models/tiny", "/v1/models/none", "/cache/nodes"):
        reply = over_tcp(open_daemon, "GET", route, {"Sec-Fetch-Site": "cross-site"})
        assert (reply.status, reply.json()["error"]["code"]) == (403, "bad_origin")
    reply = over_tcp(open_daemon, "POST", "/cache/clear", {"Sec-Fetch-Site": "Cross-Site"})
    assert reply.status == 403
    named = {"Sec-Fetch-Site": "cross-site", "Origin": PAGE}
    assert over_tcp(open_daemon, "GET", "/status", named).status == 200
    for site in ("none", "same-origin", "same-site"):
        assert over_tcp(open_daemon, "GET", "/status", {"Sec-Fetch-Site": site}).status == 200
    health = over_tcp(open_daemon, "GET", "/health", {"Sec-Fetch-Site": "cross-site"})
    assert health.status == 200, "it tells a page no more than that the port is open"


def test_preflight(open_daemon: RunningDaemon) -> None:
    """A named page may send what headers it likes; others hear what they heard before."""
    reply = over_tcp(open_daemon, "OPTIONS", CHAT, PREFLIGHT)
    assert (reply.status, reply.body) == (204, b"")
    told = {
        name: value for name, value in reply.headers.items() if "access-control" in name.lower()
    }
    assert told == {
        ALLOW: PAGE,
        "Access-Control-Expose-Headers": EXPOSED,
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": PREFLIGHT["Access-Control-Request-Headers"],
        "Access-Control-Max-Age": "600",
    }
    other = over_tcp(open_daemon, "OPTIONS", CHAT, PREFLIGHT | {"Origin": "https://evil.example"})
    assert (other.status, other.headers.get(ALLOW)) == (405, None)
    no_preflight = over_tcp(open_daemon, "OPTIONS", CHAT, {"Origin": PAGE})
    assert no_preflight.status == 405


def test_a_rebound_name_stays_out(open_daemon: RunningDaemon) -> None:
    """The host must still be this machine, whatever the page."""
    headers = {"Origin": PAGE, "Host": "evil.example"}
    reply = over_tcp(open_daemon, "POST", CHAT, headers, ASK)
    error = reply.json()["error"]
    assert (reply.status, error["code"]) == (403, "bad_host")
    assert "without a key; make one with `umbel keys add NAME`" in error["message"]


def test_off_by_default(tiny_daemon: RunningDaemon) -> None:
    """Without named origins browsers get no headers, on this machine's own pages too."""
    own = over_tcp(tiny_daemon, "POST", CHAT, {"Origin": "http://localhost:3000"}, ASK)
    assert (own.status, own.headers.get(ALLOW), own.headers.get("Vary")) == (200, None, None)
    foreign = over_tcp(tiny_daemon, "POST", CHAT, {"Origin": PAGE}, ASK)
    assert (foreign.status, foreign.headers.get(ALLOW)) == (403, None)
    assert over_tcp(tiny_daemon, "OPTIONS", CHAT, PREFLIGHT).status == 405


def test_a_named_page_needs_the_key(long_tiny_dir: Path, short_path: Path) -> None:
    """With a key set a preflight is answered without it, and the request is not."""
    env = {"UMBEL_API_KEY": "secret", "UMBEL_CORS_ORIGINS": PAGE}
    with running(short_path, long_tiny_dir, "--port", "0", env=env) as daemon:
        assert over_tcp(daemon, "OPTIONS", CHAT, PREFLIGHT).status == 204
        refused = over_tcp(daemon, "POST", CHAT, {"Origin": PAGE}, ASK)
        assert (refused.status, refused.headers.get(ALLOW)) == (401, PAGE)
        key = {"Origin": PAGE, "Authorization": "Bearer secret"}
        assert over_tcp(daemon, "POST", CHAT, key, ASK).status == 200
