"""Whether a request can be served at all: pure, decided before it queues."""

from collections.abc import Callable
from dataclasses import dataclass

from .errors import ContextLengthExceededError, InvalidRequestError


@dataclass(frozen=True)
class MemoryBound:
    """Why a context is shorter than the model's.

    Attributes:
        usable: bytes that the state of a request may take.
        needed: says how many a request of so many tokens takes, alone.
    """

    usable: int
    needed: Callable[[int], int]


class Admission:
    """Checks a request against the model's limits.

    Args:
        context_length: the most tokens of prompt and answer together.
        memory: what it is cut for; None where it is the model's own.
    """

    def __init__(self, context_length: int, memory: MemoryBound | None = None) -> None:
        self.context_length = context_length
        self._memory = memory

    def check_text(self, characters: int, longest_token: int) -> None:
        """Refuse a text that cannot fit however it is tokenised, before that is tried.

        Encoding tens of megabytes takes minutes and gigabytes.

        Raises:
            ContextLengthExceededError: it has more tokens than the context.
        """
        least = characters // longest_token
        if least > self.context_length:
            raise self._too_long(f"over {least}", least)

    def answer_length(self, prompt_length: int, max_tokens: int | None) -> int:
        """Say how many tokens the answer may have: what was asked for, within the context.

        A `max_tokens` that reaches beyond the context is cut, not refused: agents ask for
        a fixed large number whatever the model.

        Raises:
            InvalidRequestError: the prompt has no tokens.
            ContextLengthExceededError: the prompt leaves no room for an answer.
        """
        if prompt_length == 0:
            raise InvalidRequestError("the prompt is empty; send at least one token of text")
        room = self.context_length - prompt_length
        if room < 1:
            raise self._too_long(str(prompt_length), prompt_length)
        return room if max_tokens is None else min(max_tokens, room)

    def _too_long(self, length: str, tokens: int) -> ContextLengthExceededError:
        message = (
            f"This model's maximum context length is {self.context_length} tokens, and the "
            f"prompt has {length}: it must leave room for an answer. Shorten the prompt."
        )
        if self._memory is not None:
            message += (
                f" (The context is cut to what memory holds: so many tokens and an answer take "
                f"{self._memory.needed(tokens + 1)} bytes, and {self._memory.usable} of "
                "cache_bytes may be used.)"
            )
        return ContextLengthExceededError(message, tokens=tokens, most=self.context_length - 1)
