"""Errors as clients see them: a status and OpenAI's error shape."""

from typing import NamedTuple

import msgspec
from aiohttp import hdrs, web

from ...cachestore.errors import PinError
from ...models.errors import TemplateError, TemplateTimeoutError
from ...scheduler.errors import (
    ContextLengthExceededError,
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    QuotaSpentError,
    RequestError,
    RetryLaterError,
    UnavailableError,
)
from ..quoting import shorten

SERVER = "umbel"
"""The header `Server` of every answer."""

_LONGEST = 2000
"""Characters of a message; what is quoted in it has a bound of its own."""


class Overflow(NamedTuple):
    """How a prompt does not fit, in tokens."""

    tokens: int  # of the prompt, or a bound below that
    most: int  # that a prompt may have


class APIError(Exception):
    """A request ends with this answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",  # OpenAI's error type
        code: str | None = None,  # the machine-readable reason, if there is one
        param: str | None = None,  # the field of the request at fault
        retry_after: int | None = None,  # seconds after which a retry makes sense
        overflow: Overflow | None = None,  # of the context, if that is the fault
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shorten(message, _LONGEST)
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.overflow = overflow

    def body(self) -> bytes:
        """Return the error in OpenAI's shape."""
        named = {"type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": {"message": self.message, **named}})

    def response(self) -> web.Response:
        """Return the whole answer."""
        headers: dict[str, str] = {hdrs.SERVER: SERVER}
        if self.retry_after is not None:
            headers[hdrs.RETRY_AFTER] = str(self.retry_after)
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=headers
        )

    def raw_answer(self) -> bytes:
        """Return the whole answer as bytes, the last ones of a connection without a request."""
        response, body = self.response(), self.body()
        length: dict[str, str] = {hdrs.CONTENT_LENGTH: str(len(body)), hdrs.CONNECTION: "close"}
        lines = [f"{name}: {value}" for name, value in {**response.headers, **length}.items()]
        head = [f"HTTP/1.1 {response.status} {response.reason}", *lines, "", ""]
        return "\r\n".join(head).encode() + body


# The first row whose class fits is taken: its status, OpenAI's type, and the code.
_TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (ContextLengthExceededError, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequestError, 400, "invalid_request_error", None),
    (TemplateError, 400, "invalid_request_error", "invalid_messages"),
    (TemplateTimeoutError, 500, "server_error", "template_timeout"),
    (QueueFullError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (QuotaSpentError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (UnavailableError, 503, "server_error", "service_unavailable"),
    (DeadlineExceededError, 504, "server_error", "timeout"),
    (PinError, 409, "invalid_request_error", "cannot_pin"),
    (RequestError, 500, "server_error", "internal_error"),
)


def as_api_error(error: Exception) -> APIError:
    """Say how an error is answered; one without a row is a fault of umbel's, and a 500."""
    if isinstance(error, APIError):
        return error
    retry_after = error.retry_after if isinstance(error, RetryLaterError) else None
    overflow = None
    if isinstance(error, ContextLengthExceededError):
        overflow = Overflow(error.tokens, error.most)
    for known, status, kind, code in _TABLE:
        if isinstance(error, known):
            return APIError(
                status,
                str(error),
                kind=kind,
                code=code,
                retry_after=retry_after,
                overflow=overflow,
            )
    message = "the daemon failed on this request; its log has the details"
    return APIError(500, message, kind="server_error", code="internal_error")
