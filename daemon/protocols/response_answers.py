"""Answers of OpenAI's responses: the response object, whole and in events."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from ...scheduler.request import FinishReason
from ..http.failures import APIError
from ..requests.answer_reader import Delta
from ..requests.generation import Generations, Usage
from .answers import named_event
from .openai_fields import bound_of
from .response_output import Event, Output
from .responses import ResponsesRequest

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

_STATUS: dict[FinishReason | None, Status] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ERROR: "failed",
    FinishReason.CANCELLED: "cancelled",
}
# A cancelled answer has no event of its own.
_LAST = {"completed": "response.completed", "failed": "response.failed"}
_TOO_LONG = "context_length_exceeded"
_BUSY = frozenset({429, 503})


class ResponseObject:
    """Makes the response objects of one request.

    Args:
        response_id: its id.
        model: the name the answer carries.
        body: of the request; all that is needed of it is read at once.
        tools: the offered tools, as the client sent them.
    """

    def __init__(
        self, response_id: str, model: str, body: ResponsesRequest, tools: Sequence[Raw]
    ) -> None:
        reasoning, text, named = body.reasoning, body.text, body.conversation_name
        self._fixed: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "conversation": {"id": named} if named else None,
            "instructions": body.instructions,
            "max_output_tokens": bound_of(max_output_tokens=body.max_output_tokens),
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": body.summary},
            "service_tier": "flex" if body.flex else "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {
                "format": msgspec.to_builtins(text and text.format) or {"type": "text"},
                "verbosity": (text and text.verbosity) or "medium",
            },
            "tool_choice": body.tool_choice or "auto",
            "tools": list(tools),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def make(
        self,
        status: Status,
        output: Sequence[Any] = (),
        usage: Usage | None = None,
        error: APIError | None = None,
    ) -> dict[str, Any]:
        """Make the object as it is now."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._fixed,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _error(error),
            "incomplete_details": cut,
            "output": list(output),
            "usage": None if usage is None else _usage(usage),
        }


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
        """True once an event has been written."""
        return self._sequence > 0

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed; it has ended."""
        return self.last or self._settle()

    def opening(self) -> bytes:
        """Write that the response was created, and is in progress."""
        return self._lifecycle("response.created") + self.keepalive()

    def began(self, _choice: int) -> bytes:
        """Write nothing."""
        return b""

    def deltas(self, _choice: int, deltas: list[Delta]) -> bytes:
        """Write the events of each part."""
        return b"".join(self._events(self._output.take(delta)) for delta in deltas)

    def take(self, deltas: list[Delta]) -> None:
        """Take parts of an answer that is not streamed."""
        for delta in deltas:
            self._output.take(delta)

    def ended(self, _choice: int) -> bytes:
        """Complete the last item."""
        return self._events(self._end_items())

    def closing(self) -> bytes:
        """Write the whole response."""
        last = self.whole()
        return self._event(_LAST.get(last["status"], "response.incomplete"), {"response": last})

    def keepalive(self) -> bytes:
        """Write an event: some clients do not count comments."""
        return self._lifecycle("response.in_progress")

    def failure(self, error: APIError) -> bytes:
        """Write the response with its error."""
        return self._event("response.failed", {"response": self._settle(error)})

    def _settle(self, error: APIError | None = None) -> dict[str, Any]:
        """Make the object as it stays; items that are not complete stay so."""
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


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }


def _error(error: APIError) -> dict[str, Any]:
    """Write an error with one of the few codes that clients of responses know."""
    if error.code == _TOO_LONG:
        code = _TOO_LONG
    elif error.status in _BUSY:
        code = "rate_limit_exceeded"
    else:
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # noqa: PLR2004
    return {"code": code, "message": error.message}
