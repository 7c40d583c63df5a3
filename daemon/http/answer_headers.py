"""What is known of a request from its first byte on, and what every answer says of it."""

from contextlib import ExitStack

from aiohttp import hdrs, web

from ..requests.arrivals import Arrival
from .bodies import Share
from .failures import SERVER
from .streaming import EventStream

ARRIVED_AT = web.RequestKey("arrived_at", float)
"""When its headers had been read, on the engine's clock, in seconds."""

ARRIVAL = web.RequestKey("arrival", Arrival)
"""Its place among those of its tenant that are not queued yet, once its body has come."""

REQUEST_ID = web.RequestKey("request_id", str)
"""What the request is called, in the log and in its answer's headers."""

ENTERED = web.RequestKey("entered", bool)
"""Whether the request has become a generation, which writes its own log line."""

SHARE = web.RequestKey("share", Share)
"""What the request holds of the budget of bodies."""


HELD = web.RequestKey("held", ExitStack)
"""What is given back when the request has been answered: the model that it used."""

STREAM = web.RequestKey("stream", EventStream)
"""The stream of its answer, which may begin before there is one."""

FOR_BROWSERS = web.RequestKey("for_browsers", dict[str, str])
"""Headers that tell a browser which pages may read the answer."""


def answer_headers(request: web.Request) -> dict[str, str]:
    """What every answer carries.

    The request's id goes under the names by which OpenAI's and Anthropic's SDKs know it.
    """
    name = request[REQUEST_ID]
    return {
        hdrs.SERVER: SERVER,
        "x-request-id": name,
        "request-id": name,
        **request[FOR_BROWSERS],
    }
