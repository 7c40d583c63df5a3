"""What answers of OpenAI's chat and text completions share."""

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ..http.failures import APIError
from ..requests.answer_reader import Delta
from ..requests.generation import Generation, Usage
from ..requests.generations import Generations
from .answers import COMMENT, data_event

_DONE = b"data: [DONE]\n\n"


class OpenAIAnswers(ABC):
    """Writes the answers of one completion; see `AnswerEncoder`.

    Args:
        request_id: of the request.
        generations: its answers.
        model: the name the answer carries.
        fingerprint: the model's fingerprint, sent as `system_fingerprint`.
        usage: whether a stream carries its usage.

    Attributes:
        prefix: of an answer's id.
        kind: what a whole answer is called.
        chunk_kind: what a part of one is called.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

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
        """The body of an answer that is not streamed."""
        answers = enumerate(self._generations.answers)
        choices = [self._whole_choice(choice, generation) for choice, generation in answers]
        usage = usage_of(self._generations.usage)
        return {**self._common, "object": self.kind, "choices": choices, "usage": usage}

    @abstractmethod
    def opening(self) -> bytes:
        """What a stream begins with."""

    def began(self, _choice: int) -> bytes:
        """Nothing."""
        return b""

    @abstractmethod
    def deltas(self, choice: int, deltas: list[Delta]) -> bytes:
        """A chunk for each part."""

    @abstractmethod
    def ended(self, choice: int) -> bytes:
        """The chunk that says why a choice ended."""

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end."""
        usage = usage_of(self._generations.usage)
        return (self._event([], usage=usage) if self._usage else b"") + _DONE

    def keepalive(self) -> bytes:
        """A comment."""
        return COMMENT

    def failure(self, error: APIError) -> bytes:
        """The error; no `[DONE]` follows it."""
        return b"data: " + error.body() + b"\n\n"

    @abstractmethod
    def _whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = {"object": self.chunk_kind}
        return data_event({**self._common, **kind, "choices": choices, **more})


def usage_of(used: Usage) -> dict[str, Any]:
    """OpenAI's usage, with the cached tokens always in it."""
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
    }
