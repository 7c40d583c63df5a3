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
        before = Lineage()
        for index, message in enumerate(messages):
            if message.role == "assistant":
                key = tenant, before.key(message)
                with self._lock:
                    if (answer := self._answers.get(key)) is not None:
                        self._answers.move_to_end(key)
                        found[index] = answer
            before.add(message)
        return found

    def _drop(self, key: _Key) -> None:
        if (answer := self._answers.pop(key, None)) is not None:
            self._nbytes -= answer.nbytes


class Lineage:
    """What a client repeats of the messages before an answer; it may leave out thoughts.

    Args:
        messages: from the first on.
    """

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._digest = hashlib.sha256()
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        """Go on behind a message."""
        ids = " ".join(call.id for call in message.tool_calls)
        text = f"{message.role}\0{message.content.strip()}\0{ids}\0"
        self._digest.update(text.encode(errors="replace"))

    def key(self, answer: Message) -> str:
        """Name an answer by what a client sends back of it, and of all that came before it.

        Args:
            answer: with the ids of its calls as the client got them.
        """
        if answer.tool_calls:  # their ids are drawn
            return f"call {answer.tool_calls[0].id}"
        digest = self._digest.copy()
        digest.update(answer.content.strip().encode(errors="replace"))
        return f"text {digest.hexdigest()}"
