"""Remembers what was generated until a client sends it back, within a budget of bytes."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from .conversation import Message
from .history import Answer

_Key = tuple[str, str]


class AnswerStore:
    """Answers by tenant and key; what was used longest ago goes first. Any thread may use it.

    Args:
        budget: bytes for all tenants together; an answer that exceeds it alone is not kept.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._answers: OrderedDict[_Key, Answer] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """About what the answers take in memory."""
        return self._nbytes

    def put(self, tenant: str, key: str, answer: Answer) -> None:
        """Remember an answer in place of an older one with the same key."""
        with self._lock:
            self._drop((tenant, key))
            self._answers[tenant, key] = answer
            self._nbytes += answer.nbytes
            while self._nbytes > self._budget:
                self._drop(next(iter(self._answers)))

    def find(self, tenant: str, messages: Sequence[Message]) -> dict[int, Answer]:
        """Find the answers of a conversation, by the index of their messages."""
        found = {}
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            key = tenant, answer_key(message, messages[index - 1] if index else None)
            with self._lock:
                if (answer := self._answers.get(key)) is not None:
                    self._answers.move_to_end(key)
                    found[index] = answer
        return found

    def _drop(self, key: _Key) -> None:
        if (answer := self._answers.pop(key, None)) is not None:
            self._nbytes -= answer.nbytes


def answer_key(message: Message, before: Message | None) -> str:
    """Name an answer by what a client sends back of it.

    Args:
        message: with the ids of its calls as the client got them.
        before: the last message of its prompt.
    """
    if message.tool_calls:
        return f"call {message.tool_calls[0].id}"
    digest = hashlib.sha256(message.content.strip().encode())
    if before is not None:
        digest.update(f"\0{before.role}\0{before.content}".encode())
    return f"text {digest.hexdigest()}"
