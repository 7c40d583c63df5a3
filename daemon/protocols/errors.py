"""Errors in the dialect that a request speaks; its path says which."""

import re
from typing import Any

import msgspec
from aiohttp import web

from ..http.failures import APIError
from .answers import named_event

MESSAGES = "/v1/messages"
"""The path of Anthropic's routes, whose errors have Anthropic's shape."""

RESPONSES = "/v1/responses"
"""The path whose streams have named and numbered events."""

THREADS_UNSUPPORTED = "thread_unsupported_request"
"""Error code on which Anthropic's SDK sends all messages again."""

_SPELLED = re.compile(r"/+(?:v1/+)*")  # beginnings of paths that stand for /v1/
_OVERLOADED = 529
# Anthropic's statuses and error types. Without a row, the type is `invalid_request_error` below
# 500 and `api_error` from there on.
_STATUSES = {503: _OVERLOADED}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def error_response(path: str, request_id: str, failure: APIError) -> web.Response:
    """Answer a request with an error in the shape that its path promises."""
    response = failure.response()
    if _is_below(path, MESSAGES):
        response.set_status(_STATUSES.get(failure.status, failure.status))
        response.body = msgspec.json.encode(messages_error(failure, request_id))
    return response


def error_event(path: str, request_id: str, failure: APIError) -> bytes:
    """End a stream with an error before its answer has begun."""
    if _is_below(path, MESSAGES):
        return named_event("error", messages_error(failure, request_id))
    if _is_below(path, RESPONSES):
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        return named_event("error", {"type": "error", "sequence_number": 0, **told})
    return b"data: " + failure.body() + b"\n\n"


def messages_error(failure: APIError, request_id: str) -> dict[str, Any]:
    """Write an error in Anthropic's shape."""
    status = _STATUSES.get(failure.status, failure.status)
    other = "invalid_request_error" if status < 500 else "api_error"  # noqa: PLR2004
    message = failure.message
    if failure.overflow is not None:  # agents look for the two numbers in exactly these words
        tokens, most = failure.overflow
        message = f"prompt is too long: {tokens} tokens > {most} maximum"
    error: dict[str, Any] = {"type": _TYPES.get(status, other), "message": message}
    if failure.code == THREADS_UNSUPPORTED:
        error["details"] = {"error_code": failure.code, "unsupported": [failure.param]}
    return {"type": "error", "error": error, "request_id": request_id}


def _is_below(path: str, route: str) -> bool:
    """Return True if a path is a route or below it, however its beginning is spelled."""
    below_v1 = re.sub("/+", "/", _SPELLED.sub("", path, count=1)).removesuffix("/")
    return f"/v1/{below_v1}/".startswith(f"{route}/")
