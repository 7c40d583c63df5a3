"""aiohttp's side of one connection, with errors of broken HTTP in the daemon's own words."""

from http import HTTPStatus

import structlog
from aiohttp import web

from ..quoting import shorten
from .failures import APIError

log = structlog.get_logger()


class WireProtocol(web.RequestHandler):
    """Reads requests and writes answers; what is not HTTP gets a JSON error like all else."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be read, and close the connection.

        Raises:
            ConnectionError: an answer has begun, so that none can be given.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already") from exc
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("handler failed", status=status, exc_info=exc)
            failure = APIError(status, HTTPStatus(status).phrase, kind="server_error")
        else:
            reason = shorten((message or HTTPStatus(status).phrase).partition("\n")[0])
            failure = APIError(status, f"this is not HTTP: {reason}", code="invalid_http")
            log.info("refused", status=status, code=failure.code, message=failure.message)
        response = failure.response()
        response.force_close()
        return response
