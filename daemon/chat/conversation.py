"""What was said so far, and what is said next."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NamedTuple

from ..cli.client import Client, StreamEvent
from ..errors import ClientError

if TYPE_CHECKING:
    from pathlib import Path

Message = dict[str, str]


class Options(NamedTuple):
    """How answers are made.

    Attributes:
        max_tokens: after which an answer is cut off.
        temperature: of sampling; None for the model's own.
    """

    max_tokens: int
    temperature: float | None


class Conversation:
    """The messages so far, and the name under which the daemon knows them.

    Attributes:
        system: the system prompt, if there is one. It may change.
        model: which model answers; None for the daemon's own choice. It may change.
        client: of the daemon.
        saved: the file that it was written to, if it was.
        options: how answers are made.
    """

    def __init__(self, client: Client, system: str | None, options: Options) -> None:
        self.client = client
        self.system = system
        self.model: str | None = None
        self.saved: Path | None = None
        self.options = options
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self._name = f"chat-{secrets.token_hex(6)}"
        self._messages: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """What a request has: the system prompt and all that was said."""
        system = [{"role": "system", "content": _readable(self.system)}] if self.system else []
        return [*system, *self._messages]

    def take_back(self) -> str | None:
        """Forget the last question and its answer; return the question, or None without one."""
        if not self._messages:
            return None
        *self._messages, question, _ = self._messages
        return question["content"]

    async def say(self, text: str) -> AsyncIterator[StreamEvent]:
        """Send a message and stream the answer; both are remembered, also a cut-off one.

        Raises:
            ClientError: the daemon refused or failed; the message is forgotten again.
        """
        self._messages.append({"role": "user", "content": _readable(text)})
        answer: list[str] = []
        try:
            async for event in self.client.chat(
                self.messages,
                conversation=self._name,
                model=self.model,
                max_tokens=self.options.max_tokens,
                temperature=self.options.temperature,
            ):
                answer.append(event.text)
                yield event
        except ClientError:
            self._messages.pop()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._messages.append({"role": "assistant", "content": "".join(answer)})
            raise
        self._messages.append({"role": "assistant", "content": "".join(answer)})


def _readable(text: str) -> str:
    """Read what the locale could not read of the command line, as LC_ALL=C cannot, as UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
