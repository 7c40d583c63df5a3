"""What is known of a request from its first byte on, and what every answer says of it."""

from aiohttp import web

from .bodies import Share

REQUEST_ID = web.RequestKey("request_id", str)
"""What the request is called, in the log and in its answer's headers."""

ENTERED = web.RequestKey("entered", bool)
"""Whether the request has become a generation, which writes its own log line."""

SHARE = web.RequestKey("share", Share)
"""What the request holds of the budget of bodies."""


def answer_headers(request: web.Request) -> dict[str, str]:
    """The request's id under the names by which OpenAI's and Anthropic's SDKs know it."""
    return {"x-request-id": request[REQUEST_ID], "request-id": request[REQUEST_ID]}
