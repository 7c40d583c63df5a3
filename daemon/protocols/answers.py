"""Answers as bytes: the encoder of a protocol, and server-sent events."""

from typing import Any, Protocol

import msgspec

from ..http.failures import APIError
from ..requests.answer_reader import Delta

COMMENT = b": keep-alive\n\n"
"""A line of a stream that clients skip."""


class AnswerEncoder(Protocol):
    """Writes the answers of one request.

    A stream is `opening`, then for each choice `began`, `deltas` and `ended`, then `closing`.
    `keepalive` may stand anywhere after the opening; `failure` replaces the rest.
    """

    def opening(self) -> bytes:
        """Begin a stream."""

    def began(self, choice: int) -> bytes:
        """Note that an answer has left the queue: its cached tokens are known."""

    def deltas(self, choice: int, deltas: list[Delta]) -> bytes:
        """Write the next parts of an answer."""

    def ended(self, choice: int) -> bytes:
        """Complete an answer."""

    def closing(self) -> bytes:
        """End a stream."""

    def keepalive(self) -> bytes:
        """Show that the daemon still works."""

    def failure(self, error: APIError) -> bytes:
        """End a stream that failed."""

    def whole(self) -> Any:
        """Return the body of an answer that is not streamed; all answers have ended."""


def data_event(data: Any) -> bytes:
    """Write a server-sent event without a name."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """Write a server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(data)
