"""What a protocol's module makes of answers: events of a stream, or one body."""

from typing import Any, Protocol

import msgspec

from ..http.failures import APIError
from ..requests.answer_reader import Delta


class AnswerEncoder(Protocol):
    """Writes the answers of one request in a protocol's shapes.

    A stream is `opening`, then for each choice `began`, `deltas` and `ended`, then `closing`;
    `keepalive` may stand anywhere after the opening, and `failure` takes the place of the rest.
    """

    def opening(self) -> bytes:
        """What a stream begins with."""
        ...

    def began(self, choice: int) -> bytes:
        """An answer's request has left the queue: what was cached is known."""
        ...

    def deltas(self, choice: int, deltas: list[Delta]) -> bytes:
        """More of an answer."""
        ...

    def ended(self, choice: int) -> bytes:
        """An answer is complete."""
        ...

    def closing(self) -> bytes:
        """What a stream ends with."""
        ...

    def keepalive(self) -> bytes:
        """Says that the daemon is still at work."""
        ...

    def failure(self, error: APIError) -> bytes:
        """What a stream ends with that failed."""
        ...

    def whole(self) -> Any:
        """The body of an answer that is not streamed; all answers have ended."""
        ...


def data_event(data: Any) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(data)


COMMENT = b": keep-alive\n\n"
"""A line of a stream that clients skip."""
