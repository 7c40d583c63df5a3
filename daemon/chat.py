"""`umbel chat`: a conversation in the terminal."""

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from .client import Client, ClientError
from .private import private_daemon

_HELP = "Ctrl-C stops an answer; Ctrl-D or /exit ends; /new starts over."


class Options(NamedTuple):
    """How answers are made."""

    max_tokens: int | None
    temperature: float


class Conversation:
    """The messages so far, and the name under which the daemon knows them."""

    def __init__(self, client: Client, system: str | None, options: Options) -> None:
        self._client = client
        self._system = system
        self._options = options
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self._name = f"chat-{secrets.token_hex(6)}"
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    async def say(self, text: str) -> AsyncIterator[str]:
        """Send a message and stream the answer; both are remembered, also a cut-off one.

        Raises:
            ClientError: the daemon refused or failed; the message is forgotten again.
        """
        self._messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            async for chunk in self._client.chat(
                self._messages,
                conversation=self._name,
                max_tokens=self._options.max_tokens,
                temperature=self._options.temperature,
            ):
                answer.append(chunk.text)
                yield chunk.text
        except ClientError:
            self._messages.pop()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._messages.append({"role": "assistant", "content": "".join(answer)})
            raise
        self._messages.append({"role": "assistant", "content": "".join(answer)})


@asynccontextmanager
async def _reach(socket: Path, model: str | None, console: Console) -> AsyncIterator[Client]:
    """Use the daemon on the socket if it runs and no model was asked for, else a private one."""
    if model is None and socket.exists():
        async with Client(socket) as client:
            try:
                await client.get("/health")
            except ClientError:
                pass
            else:
                yield client
                return
    name = model or "smollm2"
    console.print(f"[dim]No daemon on {socket}; starting a private one with {name} …[/dim]")
    async with private_daemon(name) as client:
        yield client


async def chat(
    prompt: str | None,
    *,
    socket: Path,
    model: str | None,
    system: str | None,
    options: Options,
) -> None:
    """Answer one prompt, or hold a conversation when there is none.

    Raises:
        ClientError: no daemon answers, or it refused the one prompt.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    async with _reach(socket, model, console) as client:
        conversation = Conversation(client, system, options)
        if prompt is not None:
            await _print_answer(conversation, prompt)
            return
        console.print(f"[dim]{_HELP}[/dim]")
        while (line := await _ask()) is not None:
            await _turn(conversation, line, console)


async def _turn(conversation: Conversation, line: str, console: Console) -> None:
    if line == "/new":
        conversation.reset()
        return
    # A task of its own, so that Ctrl-C ends the answer and not the conversation.
    answering = asyncio.ensure_future(_print_answer(conversation, line))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, answering.cancel)
    try:
        await answering
    except asyncio.CancelledError:
        console.print("\n[dim]stopped[/dim]")
    except ClientError as error:
        console.print(f"[red]{escape(str(error))}[/]")
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _print_answer(conversation: Conversation, text: str) -> None:
    async for piece in conversation.say(text):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


async def _ask() -> str | None:
    """Read a non-empty line; None at the end of input."""
    while True:
        try:
            line = await asyncio.to_thread(input, "> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if line.strip() in ("/exit", "/quit"):
            return None
        if line.strip():
            return line.strip()
