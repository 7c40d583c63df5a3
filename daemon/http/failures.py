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
    """How a prompt does not fit, in tokens.

    Attributes:
        tokens: of the prompt, or a bound below that.
        most: what a prompt may have.
    """

    tokens: int
    most: int


class APIError(Exception):
    """A request ends with this answer.

    Attributes:
        status: the HTTP status.
        message: what is wrong, and what to change.
        kind: OpenAI's error type.
        code: the machine-readable reason, if there is one.
        param: the field of the request at fault, if it is one.
        retry_after: seconds after which trying again makes sense.
        overflow: of the context, if that is what is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        overflow: Overflow | None = None,
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
        """The error in OpenAI's shape."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        """The whole answer."""
        response = web.Response(
            status=self.status,
            body=self.body(),
            content_type="application/json",
            headers={hdrs.SERVER: SERVER},
        )
        if self.retry_after is not None:
            response.headers["Retry-After"] = str(self.retry_after)
        return response

    def raw_answer(self) -> bytes:
        """The whole answer as bytes, for a connection without a request; it is the last one."""
        response, body = self.response(), self.body()
        headers = {
            **response.headers,
            hdrs.CONTENT_LENGTH: str(len(body)),
            hdrs.CONNECTION: "close",
        }
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = [f"HTTP/1.1 {response.status} {response.reason}", *lines, "", ""]
        return "\r\n".join(head).encode() + body


class _Row(NamedTuple):
    """How one kind of error is answered."""

    error: type[Exception]
    status: int
    kind: str
    code: str | None


# The first row whose class fits is taken.
_TABLE = (
    _Row(ContextLengthExceededError, 400, "invalid_request_error", "context_length_exceeded"),
    _Row(InvalidRequestError, 400, "invalid_request_error", None),
    _Row(TemplateError, 400, "invalid_request_error", "invalid_messages"),
    _Row(TemplateTimeoutError, 500, "server_error", "template_timeout"),
    _Row(QueueFullError, 429, "rate_limit_error", "rate_limit_exceeded"),
    _Row(QuotaSpentError, 429, "rate_limit_error", "rate_limit_exceeded"),
    _Row(UnavailableError, 503, "server_error", "service_unavailable"),
    _Row(DeadlineExceededError, 504, "server_error", "timeout"),
    _Row(PinError, 409, "invalid_request_error", "cannot_pin"),
    _Row(RequestError, 500, "server_error", "internal_error"),
)


def as_api_error(error: Exception) -> APIError:
    """Say how an error is answered; what has no row is a fault of ours, and a 500."""
    if isinstance(error, APIError):
        return error
    retry_after = error.retry_after if isinstance(error, RetryLaterError) else None
    overflow = (
        Overflow(error.tokens, error.most)
        if isinstance(error, ContextLengthExceededError)
        else None
    )
    for row in _TABLE:
        if isinstance(error, row.error):
            return APIError(
                row.status,
                str(error),
                kind=row.kind,
                code=row.code,
                retry_after=retry_after,
                overflow=overflow,
            )
    return APIError(
        500,
        "the daemon failed on this request; its log has the details",
        kind="server_error",
        code="internal_error",
    )
