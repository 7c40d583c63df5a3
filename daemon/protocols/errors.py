"""Errors in the dialect that a request speaks; its path says which."""

from typing import Any

import msgspec
from aiohttp import web

from ..http.answer_headers import REQUEST_ID
from ..http.failures import APIError
from ..http.spellings import below_v1
from .answers import named_event

MESSAGES = "/v1/messages"
"""The path below which everything is Anthropic's."""

RESPONSES = "/v1/responses"
"""The path below which streams are of named events, each with a number."""

THREADS_UNSUPPORTED = "thread_unsupported_request"
"""Anthropic's SDK sends all messages to who answers with this code."""

_OVERLOADED = 529
# Anthropic's status where it has one of its own, and its type of error; what has no row is
# the request's fault below 500, and the daemon's from there on.
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


def error_response(request: web.Request, failure: APIError) -> web.Response:
    """Answer a request with an error, in the shape and the words that its client reads."""
    response = failure.response()
    if _speaks(request, MESSAGES):
        response.set_status(_STATUSES.get(failure.status, failure.status))
        response.body = msgspec.json.encode(messages_error(failure, request[REQUEST_ID]))
    return response


def error_event(request: web.Request, failure: APIError) -> bytes:
    """End a stream with an error, before its answer has begun."""
    if _speaks(request, MESSAGES):
        return named_event("error", messages_error(failure, request[REQUEST_ID]))
    if _speaks(request, RESPONSES):
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        return named_event("error", {"type": "error", "sequence_number": 0, **told})
    return b"data: " + failure.body() + b"\n\n"


def _speaks(request: web.Request, route: str) -> bool:
    """Whether a request's path is a route or below it."""
    return f"/v1/{below_v1(request.path)}/".startswith(f"{route}/")


def messages_error(failure: APIError, request_id: str) -> dict[str, Any]:
    """Write an error in Anthropic's shape."""
    status = _STATUSES.get(failure.status, failure.status)
    other = "invalid_request_error" if status < 500 else "api_error"  # noqa: PLR2004
    message = failure.message
    if failure.overflow is not None:  # the words in which agents look for the two numbers
        tokens, most = failure.overflow
        message = f"prompt is too long: {tokens} tokens > {most} maximum"
    error: dict[str, Any] = {"type": _TYPES.get(status, other), "message": message}
    if failure.code == THREADS_UNSUPPORTED:
        error["details"] = {"error_code": failure.code, "unsupported": [failure.param]}
    return {"type": "error", "error": error, "request_id": request_id}
