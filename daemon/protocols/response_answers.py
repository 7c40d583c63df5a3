"""Answers of OpenAI's responses, whole and as events."""

from collections.abc import Iterable
from typing import Any

from ...scheduler.request import FinishReason
from ..http.failures import APIError
from ..requests.answer_reader import Delta
from ..requests.generations import Generations
from .answers import named_event
from .response_object import ResponseObject, Status
from .response_output import Event, Output

_STATUS: dict[FinishReason | None, Status] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ERROR: "failed",
    FinishReason.CANCELLED: "cancelled",
}
# There is no event of its own for an answer that was cancelled.
_LAST = {"completed": "response.completed", "failed": "response.failed"}


class ResponseAnswers:
    """Writes the answer of one response; see `AnswerEncoder`.

    Args:
        response: makes the object that events carry.
        generations: its one answer.
        output: takes the answer's items.

    Attributes:
        last: the object as it was when the answer ended; None until then.
    """

    def __init__(self, response: ResponseObject, generations: Generations, output: Output) -> None:
        self.last: dict[str, Any] | None = None
        self._response = response
        self._generations = generations
        self._output = output
        self._sequence = 0

    @property
    def has_begun(self) -> bool:
        """Whether any event has been written."""
        return self._sequence > 0

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed; it has ended."""
        return self.last or self.settle()

    def opening(self) -> bytes:
        """The response is there, and is being made."""
        return self._lifecycle("response.created") + self.keepalive()

    def began(self, _choice: int) -> bytes:
        """Nothing."""
        return b""

    def deltas(self, _choice: int, deltas: list[Delta]) -> bytes:
        """An event for each part, and those around it."""
        return b"".join(self._events(self._output.take(delta)) for delta in deltas)

    def take(self, deltas: list[Delta]) -> None:
        """Take more of an answer that is not streamed."""
        for delta in deltas:
            self._output.take(delta)

    def ended(self, _choice: int) -> bytes:
        """The last item is complete."""
        return self._events(self._end_items())

    def closing(self) -> bytes:
        """The whole response."""
        last = self.whole()
        return self._event(_LAST.get(last["status"], "response.incomplete"), {"response": last})

    def keepalive(self) -> bytes:
        """An event: there are clients that do not count comments."""
        return self._lifecycle("response.in_progress")

    def failure(self, error: APIError) -> bytes:
        """The response with its error."""
        return self._event("response.failed", {"response": self.settle(error)})

    def settle(self, error: APIError | None = None) -> dict[str, Any]:
        """Make the object as it stays. What is not complete then never will be.

        Args:
            error: for which the answer ended.
        """
        self._end_items()
        reason = self._generations.answers[0].finish_reason
        status = "failed" if error else _STATUS.get(reason, "cancelled")
        usage = self._generations.usage
        self.last = self._response.make(status, self._output.items, usage, error)
        return self.last

    def _end_items(self) -> list[Event]:
        complete = self._generations.answers[0].finish_reason is FinishReason.STOP
        return self._output.end(complete=complete)

    def _lifecycle(self, name: str) -> bytes:
        return self._event(name, {"response": self._response.make("in_progress")})

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._event(event["type"], event) for event in events)

    def _event(self, name: str, fields: Event) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named_event(name, {"type": name, "sequence_number": number, **fields})
