"""Answers of OpenAI's chat and text completions, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ...models.text.conversation import ToolCall
from ...models.text.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from ...scheduler.request import FinishReason
from ..http.failures import APIError
from ..requests.answer_reader import Delta, TokenLogProb, Told
from ..requests.generation import Generation, Generations, Usage
from .answers import COMMENT, data_event

_DONE = b"data: [DONE]\n\n"


class OpenAIAnswers(ABC):
    """Writes the answers of one completion; see `AnswerEncoder`.

    Args:
        request_id: of the request.
        generations: its answers.
        model: the name the answer carries.
        fingerprint: the model's fingerprint, sent as `system_fingerprint`.
        usage: True if a stream ends with its usage.
    """

    prefix: ClassVar[str]
    """Of an answer's id."""
    kind: ClassVar[str]
    """The `object` of a whole answer."""
    chunk_kind: ClassVar[str]
    """The `object` of a chunk."""
    empty: ClassVar[dict[str, Any]]
    """The part of a chunk that adds nothing to its choice."""

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
            "id": request_id.replace("req", self.prefix, 1),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        answers = enumerate(self._generations.answers)
        choices = [self._whole_choice(choice, generation) for choice, generation in answers]
        usage = _usage(self._generations.usage)
        return {**self._common, "object": self.kind, "choices": choices, "usage": usage}

    @abstractmethod
    def opening(self) -> bytes:
        """Begin a stream."""

    def began(self, _choice: int) -> bytes:
        """Write nothing."""
        return b""

    def deltas(self, choice: int, deltas: list[Delta]) -> bytes:
        """Write a chunk for each part."""
        return b"".join(self._delta(choice, delta) for delta in deltas)

    def ended(self, choice: int) -> bytes:
        """Write the chunk with the reason why the answer ended."""
        return self._chunk(choice, self.empty, finish_reason(self._generations.answers[choice]))

    def closing(self) -> bytes:
        """Write the usage, if it was asked for, and the end."""
        usage = _usage(self._generations.usage)
        return (self._event([], usage=usage) if self._usage else b"") + _DONE

    def keepalive(self) -> bytes:
        """Write a comment."""
        return COMMENT

    def failure(self, error: APIError) -> bytes:
        """Write the error; no `[DONE]` follows it."""
        return b"data: " + error.body() + b"\n\n"

    @abstractmethod
    def _delta(self, choice: int, delta: Delta) -> bytes: ...

    @abstractmethod
    def _whole_choice(self, index: int, generation: Generation) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, tokens: list[Told] | None) -> dict[str, Any] | None: ...

    def _chunk(
        self,
        choice: int,
        part: dict[str, Any],
        finish: str | None = None,
        tokens: list[Told] | None = None,
    ) -> bytes:
        about = {"finish_reason": finish, "logprobs": self._logprobs(tokens)}
        return self._event([{"index": choice, **part, **about}])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = {"object": self.chunk_kind}
        return data_event({**self._common, **kind, "choices": choices, **more})


class ChatAnswers(OpenAIAnswers):
    """Writes the answers of one chat completion."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    empty: ClassVar[dict[str, Any]] = {"delta": {}}

    def opening(self) -> bytes:
        """Write the role of each choice."""
        part = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(i, part) for i in range(len(self._generations.answers)))

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
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": finish_reason(generation),
        }

    def _delta(self, choice: int, delta: Delta) -> bytes:
        part: dict[str, Any]
        match delta.event:
            case TextDelta(text=text):
                part = {"content": text}
            case ReasoningDelta(text=text):
                part = {"reasoning_content": text}
            case ToolCallStart(call=call, name=name, id=call_id):
                function = {"name": name, "arguments": ""}
                named = {"index": call, "id": call_id, "type": "function", "function": function}
                part = {"tool_calls": [named]}
            case ToolCallDelta(call=call, arguments=arguments):
                more = {"index": call, "function": {"arguments": arguments}}
                part = {"tool_calls": [more]}
            case _:
                return b""
        return self._chunk(choice, {"delta": part}, tokens=delta.tokens)

    def _logprobs(self, tokens: list[Told] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {"content": [told.token for told in tokens], "refusal": None}


class CompletionAnswers(OpenAIAnswers):
    """Writes the answers of one text completion."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    empty: ClassVar[dict[str, Any]] = {"text": ""}

    def opening(self) -> bytes:
        """Write a comment: text completions have no first event."""
        return COMMENT

    def _whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        answer = generation.reader.collected()
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": generation.finish_reason,
        }

    def _delta(self, choice: int, delta: Delta) -> bytes:
        if not isinstance(delta.event, TextDelta):
            return b""
        return self._chunk(choice, {"text": delta.event.text}, tokens=delta.tokens)

    def _logprobs(self, tokens: list[Told] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "tokens": [told.token.token for told in tokens],
            "token_logprobs": [told.token.logprob for told in tokens],
            "top_logprobs": [_by_text(told.token) for told in tokens],
            "text_offset": [told.place for told in tokens],
        }


def finish_reason(generation: Generation) -> str | None:
    """Return the reason why an answer ended, in OpenAI's words."""
    reason = generation.finish_reason
    if reason is FinishReason.STOP and generation.reader.has_calls:
        return "tool_calls"
    return reason


def _whole_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _by_text(chosen: TokenLogProb) -> dict[str, float]:
    """Map texts of the likeliest tokens to log-probabilities, the chosen token's among them.

    Of two tokens with one text, the likelier counts.
    """
    by_text: dict[str, float] = {}
    for token in (*chosen.top_logprobs, chosen):
        by_text.setdefault(token.token, token.logprob)
    return by_text


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
    }
