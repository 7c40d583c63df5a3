"""Answers of OpenAI's chat completions, whole and in chunks."""

import time
from typing import Any

from ...models.text.conversation import ToolCall
from ...models.text.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from ...scheduler.request import FinishReason
from ..answer_reader import Delta
from ..failures import APIError
from ..generation import Generation, Usage
from ..generations import Generations
from ..logprobs import Told
from .answers import COMMENT, data_event

DONE = b"data: [DONE]\n\n"


class ChatAnswers:
    """Writes the answers of one chat completion; see `AnswerEncoder`.

    Args:
        request_id: of the request.
        generations: its answers.
        model: the name the answer carries.
        fingerprint: the model's fingerprint, sent as `system_fingerprint`.
        usage: whether a stream carries its usage.
    """

    def __init__(
        self,
        request_id: str,
        generations: Generations,
        model: str,
        fingerprint: str,
        *,
        usage: bool,
    ) -> None:
        self._generations = generations
        self._usage = usage
        self._common = {
            "id": request_id.replace("req", "chatcmpl", 1),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [_whole_choice(i, g) for i, g in enumerate(self._generations.answers)],
            "usage": usage_of(self._generations.usage),
        }

    def opening(self) -> bytes:
        """Each choice says whose it is."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(i, delta) for i in range(len(self._generations.answers)))

    def began(self, _choice: int) -> bytes:
        """Nothing."""
        return b""

    def deltas(self, choice: int, deltas: list[Delta]) -> bytes:
        """A chunk for each part."""
        return b"".join(self._delta(choice, delta) for delta in deltas)

    def ended(self, choice: int) -> bytes:
        """The chunk that says why a choice ended."""
        return self._chunk(choice, {}, finish_reason(self._generations.answers[choice]))

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end."""
        usage = usage_of(self._generations.usage)
        return (self._event([], usage=usage) if self._usage else b"") + DONE

    def keepalive(self) -> bytes:
        """A comment."""
        return COMMENT

    def failure(self, error: APIError) -> bytes:
        """The error; no `[DONE]` follows it."""
        return b"data: " + error.body() + b"\n\n"

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

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = {"object": "chat.completion.chunk"}
        return data_event({**self._common, **kind, "choices": choices, **more})


def finish_reason(generation: Generation) -> str | None:
    """Say why an answer ended, as OpenAI does."""
    reason = generation.finish_reason
    if reason is FinishReason.STOP and generation.reader.has_calls:
        return "tool_calls"
    return reason


def usage_of(used: Usage) -> dict[str, Any]:
    """OpenAI's usage, with the cached tokens always in it."""
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
    }


def _whole_choice(index: int, generation: Generation) -> dict[str, Any]:
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


def _whole_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(tokens: list[Told] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {"content": [told.token for told in tokens], "refusal": None}
