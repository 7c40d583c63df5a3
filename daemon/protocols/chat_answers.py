"""Answers of OpenAI's chat completions, whole and in chunks."""

from typing import Any

from ...models.text.conversation import ToolCall
from ...models.text.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from ...scheduler.request import FinishReason
from ..requests.answer_reader import Delta
from ..requests.generation import Generation
from ..requests.logprobs import Told
from .openai_answers import OpenAIAnswers


class ChatAnswers(OpenAIAnswers):
    """Writes the answers of one chat completion."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> bytes:
        """Each choice says whose it is."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(i, delta) for i in range(len(self._generations.answers)))

    def deltas(self, choice: int, deltas: list[Delta]) -> bytes:
        """A chunk for each part."""
        return b"".join(self._delta(choice, delta) for delta in deltas)

    def ended(self, choice: int) -> bytes:
        """The chunk that says why a choice ended."""
        return self._chunk(choice, {}, finish_reason(self._generations.answers[choice]))

    def _whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        answer = generation.reader.collected()
        # Clients take null for "only calls"; without any, text may be empty and is still text.
        content = None if answer.calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_whole_call(call) for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(answer.tokens),
            "finish_reason": finish_reason(generation),
        }

    def _delta(self, choice: int, delta: Delta) -> bytes:
        match delta.event:
            case TextDelta(text=text):
                return self._chunk(choice, {"content": text}, tokens=delta.tokens)
            case ReasoningDelta(text=text):
                return self._chunk(choice, {"reasoning_content": text})
            case ToolCallStart(call=call, name=name, id=call_id):
                function = {"name": name, "arguments": ""}
                named = {"index": call, "id": call_id, "type": "function", "function": function}
                return self._chunk(choice, {"tool_calls": [named]})
            case ToolCallDelta(call=call, arguments=arguments):
                more = {"index": call, "function": {"arguments": arguments}}
                return self._chunk(choice, {"tool_calls": [more]})
        return b""

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        finish: str | None = None,
        tokens: list[Told] | None = None,
    ) -> bytes:
        shown = {"index": choice, "delta": delta, "finish_reason": finish}
        return self._event([{**shown, "logprobs": _logprobs(tokens)}])


def finish_reason(generation: Generation) -> str | None:
    """Say why an answer ended, as OpenAI does."""
    reason = generation.finish_reason
    if reason is FinishReason.STOP and generation.reader.has_calls:
        return "tool_calls"
    return reason


def _whole_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(tokens: list[Told] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {"content": [told.token for told in tokens], "refusal": None}
