"""`umbel chat`: a conversation in the terminal."""

import asyncio
import os
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
from .signals import StopSignals

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
    signals: StopSignals,
) -> None:
    """Answer one prompt, or hold a conversation when there is none.

    Ctrl-C (SIGINT) ends an answer of a conversation; otherwise `signals` do what the caller says.

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
        lines = _Lines(sys.stdin.fileno())
        while (line := await _ask(lines)) is not None:
            await _turn(conversation, line, console, signals)


async def _turn(
    conversation: Conversation, line: str, console: Console, signals: StopSignals
) -> None:
    if line == "/new":
        conversation.reset()
        return
    # A task of its own, so that Ctrl-C ends the answer and not the conversation.
    answering = asyncio.ensure_future(_print_answer(conversation, line))
    try:
        with signals.calling(answering.cancel, signal.SIGINT):
            await answering
    except asyncio.CancelledError:
        conversing = asyncio.current_task()
        if conversing is not None and conversing.cancelling():
            raise
        console.print("\n[dim]stopped[/dim]")
    except ClientError as error:
        console.print(f"[red]{escape(str(error))}[/]")


async def _print_answer(conversation: Conversation, text: str) -> None:
    async for piece in conversation.say(text):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


class _Lines:
    """Lines from a file descriptor, read on the event loop.

    A thread that waits in `input` cannot be ended: Ctrl-C would hang until the next Enter.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._rest = b""

    async def next(self) -> str | None:
        """Wait for a line, without its end; None at the end of input."""
        while b"\n" not in self._rest:
            await self._wait()
            if not (piece := os.read(self._source, 65536)):
                break
            self._rest += piece
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(sys.stdin.encoding, errors="replace")

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._source, ready.set)
        except OSError:
            return  # a regular file, which never keeps a reader waiting
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._source)


async def _ask(lines: _Lines) -> str | None:
    """Read a non-empty line; None at the end of input."""
    while True:
        if sys.stdin.isatty():
            sys.stdout.write("> ")
            sys.stdout.flush()
        line = await lines.next()
        if line is None or line.strip() in ("/exit", "/quit"):
            return None
        if line.strip():
            return line.strip()
