"""Answers of Anthropic's messages, whole and as events."""

from typing import Any, Literal

from msgspec import Raw

from ...models.text.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from ...models.text.json_text import close_json
from ...scheduler.request import FinishReason
from ..http.failures import APIError
from ..requests.answer_reader import Delta, Part
from ..requests.generation import Generation, Generations
from .answers import named_event
from .content import sign
from .errors import messages_error

BlockKind = Literal["text", "thinking", "tool_use"]
StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class MessageAnswers:
    """Writes the answer of one message; see `AnswerEncoder`.

    Args:
        request_id: of the request.
        generations: its one answer.
        model: the name the answer carries.
        max_tokens: that the client allowed.
        shows_thinking: True if the answer has the text of the model's thinking; else only the
            signature carries it.
    """

    def __init__(
        self,
        request_id: str,
        generations: Generations,
        model: str,
        *,
        max_tokens: int | None,
        shows_thinking: bool,
    ) -> None:
        self._request_id = request_id
        (self._generation,) = generations.answers
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._common = {
            "id": request_id.replace("req-", "msg_", 1),
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._started = False
        self._blocks = 0
        self._open: BlockKind | None = None
        self._hidden: list[str] = []

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        return {
            **self._common,
            "content": [self._block(p) for p in self._generation.reader.collected().parts],
            **self._end(),
            "usage": _usage(self._generation),
        }

    def opening(self) -> bytes:
        """Write nothing: the first event has the cached tokens, which are known later."""
        return b""

    def began(self, _choice: int) -> bytes:
        """Write the message, still empty."""
        if self._started:
            return b""
        self._started = True
        message: dict[str, Any] = {
            **self._common,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._generation),
        }
        return _event("message_start", message=message)

    def deltas(self, choice: int, deltas: list[Delta]) -> bytes:
        """Write deltas of blocks, which begin and end as needed."""
        return self.began(choice) + b"".join(self._delta(delta.event) for delta in deltas)

    def ended(self, choice: int) -> bytes:
        """End the last block, and write the reason why the answer ended."""
        told = _event("message_delta", delta=self._end(), usage=_usage(self._generation))
        return self.began(choice) + self._close() + told

    def closing(self) -> bytes:
        """Write the last event."""
        return _event("message_stop")

    def keepalive(self) -> bytes:
        """Write a ping."""
        return _event("ping")

    def failure(self, error: APIError) -> bytes:
        """Write the error; no `message_stop` follows it."""
        return named_event("error", messages_error(error, self._request_id))

    def _delta(self, event: OutputEvent) -> bytes:
        match event:
            case TextDelta(text=text) if text:
                return self._begin("text", text="") + self._more("text_delta", text=text)
            case ReasoningDelta(text=text):
                return self._begin("thinking", thinking="", signature="") + self._thought(text)
            case ToolCallStart(name=name, id=call_id):
                return self._close() + self._begin("tool_use", id=call_id, name=name, input={})
            case ToolCallDelta(arguments=arguments):
                return self._more("input_json_delta", partial_json=arguments)
            case ToolCallEnd():
                return self._close()
        return b""

    def _thought(self, text: str) -> bytes:
        """Show thinking, or keep it for the signature and send a sign of life."""
        if self._shows_thinking:
            return self._more("thinking_delta", thinking=text)
        self._hidden.append(text)
        return self.keepalive()

    def _begin(self, kind: BlockKind, **empty: Any) -> bytes:
        """Begin a block unless one of this kind is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        block = {"type": kind, **empty}
        return closed + _event("content_block_start", index=self._blocks, content_block=block)

    def _more(self, kind: str, **delta: str) -> bytes:
        shown = {"type": kind, **delta}
        return _event("content_block_delta", index=self._blocks, delta=shown)

    def _close(self) -> bytes:
        """End the open block, if there is one; thinking is signed first."""
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._more("signature_delta", signature=sign("".join(self._hidden)))
            self._hidden = []
        stopped = _event("content_block_stop", index=self._blocks)
        self._open = None
        self._blocks += 1
        return signed + stopped

    def _block(self, part: Part) -> dict[str, Any]:
        match part:
            case ReasoningDelta(text=text):
                shown, hidden = (text, "") if self._shows_thinking else ("", text)
                return {"type": "thinking", "thinking": shown, "signature": sign(hidden)}
            case TextDelta(text=text):
                return {"type": "text", "text": text}
            case call:
                # As the model wrote it; one that was cut is closed as the SDKs close its stream.
                arguments = Raw(close_json(call.arguments).encode())
                return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

    def _end(self) -> dict[str, Any]:
        sequence = self._generation.reader.stop_sequence
        return {"stop_reason": self._stop_reason(), "stop_sequence": sequence}

    def _stop_reason(self) -> StopReason:
        generation = self._generation
        if generation.reader.stop_sequence is not None:
            return "stop_sequence"
        if generation.finish_reason is FinishReason.LENGTH:
            cut = generation.request.max_tokens < (self._max_tokens or 0)
            return "model_context_window_exceeded" if cut else "max_tokens"
        return "tool_use" if generation.reader.has_calls else "end_turn"


def _usage(generation: Generation) -> dict[str, Any]:
    """Write Anthropic's usage, whose input tokens leave out the cached ones."""
    used = generation.usage
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_read_input_tokens": used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
    }


def _event(kind: str, **data: Any) -> bytes:
    return named_event(kind, {"type": kind, **data})
