"""One chat from its first line to its last, with a running daemon or a private one."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import NamedTuple, TextIO

from rich.console import Console

from ..cli.client import Client
from ..cli.private import private_daemon
from ..config import DEFAULT_MODEL
from ..errors import ClientError
from ..lifecycle.signals import StopSignals
from ..terminal.console import moves
from ..terminal.display import StartView
from .answer import end_line, print_answer
from .conversation import Conversation, Options, command_of, model_names, obey, question_of
from .lines import EditedLines, PipedLines, edited_session, read_all

_HELP = "Ctrl-C stops an answer; Ctrl-D or /exit ends; /help lists what else there is."
_POLL = 0.2  # seconds


class Wanted(NamedTuple):
    """The daemon for a chat.

    Attributes:
        socket: of a running daemon.
        model: of the answers; None for the daemon's default.
        private: the model of a private daemon, if one is asked for.
        otherwise: the model of a private daemon if no daemon answers; None if the user asked for
            a certain model.
    """

    socket: Path
    model: str | None = None
    private: str | None = None
    otherwise: str | None = None


async def chat(
    prompt: str | None,
    *,
    wanted: Wanted,
    lines: bool,
    system: str | None,
    options: Options,
    signals: StopSignals,
) -> None:
    """Answer one prompt, or hold a conversation.

    A conversation has a terminal, or `lines`. Otherwise standard input, to its end, is the prompt,
    below the given one. Ctrl-C (SIGINT) ends an answer of a conversation; otherwise the caller
    handles `signals`.

    Args:
        prompt: of the command line.
        wanted: the daemon. Only on a terminal may a private one replace it.
        lines: each line of standard input is a message.
        system: the system prompt.
        options: of all answers.
        signals: of the command.

    Raises:
        ClientError: no daemon answers, or it refused the one prompt.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)):
        wanted = wanted._replace(otherwise=None)
    async with _reach(wanted, console) as client:
        conversation = Conversation(client, system, options, wanted.model)
        if lines or (prompt is None and _is_terminal(sys.stdin)):
            await _hold(conversation, console, signals)
            return
        question = await _question(prompt)
        try:
            await print_answer(conversation, question, console)
        except asyncio.CancelledError:
            end_line()
            raise


def _is_terminal(stream: TextIO | None) -> bool:
    """Return True if a standard stream is a terminal; a closed one is None."""
    return stream is not None and stream.isatty()


@asynccontextmanager
async def _reach(wanted: Wanted, console: Console) -> AsyncIterator[Client]:
    """Connect to the daemon, or start a private one, and wait until it serves.

    Raises:
        ClientError: no daemon answers, or it does not have the model.
    """
    words, name = "Starting a private daemon", wanted.private
    if name is None:
        async with Client(wanted.socket) as client:
            try:
                await client.get("/health")
            except ClientError as error:
                if wanted.otherwise is None:
                    advice = "umbel chat --private starts one for this chat"
                    raise ClientError(f"{error}; {advice}") from error
            else:
                await _wait_until_ready(client, console)
                await _check_model(client, wanted.model)
                yield client
                return
        words = f"No daemon on {wanted.socket}; starting a private one"
        name = wanted.otherwise
    console.print(f"{words} with {name} …", style="dim")
    with closing(StartView(console)) as view:
        async with private_daemon(str(name), view.show) as client:
            view.close()
            yield client


async def _wait_until_ready(client: Client, console: Console) -> None:
    ready = await client.get("/ready")
    if ready["status"] != "loading":
        return
    with closing(StartView(console)) as view:
        while ready["status"] == "loading":
            view.show(ready)
            await asyncio.sleep(_POLL)
            ready = await client.get("/ready")


async def _check_model(client: Client, model: str | None) -> None:
    if model is None:
        return
    names = await model_names(client)
    if model not in (*names, DEFAULT_MODEL):
        raise ClientError(
            f"the daemon on {client.path} has no model {model}; it has: {', '.join(names)}; "
            "umbel chat --private --model loads another"
        )


async def _question(prompt: str | None) -> str:
    """Put the argument and the piped text together."""
    piped = ""
    if sys.stdin is not None and not sys.stdin.isatty():  # closed, it is None
        piped = await read_all(sys.stdin.fileno())
    parts = [part for part in (prompt, piped.rstrip("\n")) if part and part.strip()]
    if not parts:
        raise ClientError(
            "there is nothing to ask: no prompt is given, and standard input is empty"
        )
    return "\n\n".join(parts)


async def _hold(conversation: Conversation, console: Console, signals: StopSignals) -> None:
    """Hold a conversation, with line editing if the terminal has it."""
    if sys.stdin is None:
        raise ClientError("standard input is closed: there is nothing to ask")
    if not _is_terminal(sys.stdin):
        failed = await _converse(conversation, PipedLines(sys.stdin.fileno()), console, signals)
        if failed:
            raise ClientError(
                f"{failed} {'question was' if failed == 1 else 'questions were'} not answered"
            )
        return
    console.print(_HELP, style="dim")
    if not (console.is_terminal and moves(console) and _is_terminal(sys.stdout)):
        await _converse(conversation, PipedLines(sys.stdin.fileno()), console, signals)
        return
    lines = EditedLines(edited_session())
    # Its terminal makes a key of Ctrl-C only while a line is written.
    with signals.calling(lines.interrupt, signal.SIGINT):
        await _converse(conversation, lines, console, signals)


async def _converse(
    conversation: Conversation,
    lines: PipedLines | EditedLines,
    console: Console,
    signals: StopSignals,
) -> int:
    """Answer line after line, to the end of input; return the number of failed questions."""
    failed = 0
    while (line := await lines.next()) is not None:
        command = command_of(line)
        if command is not None and command.ends:
            break
        if question := question_of(line, command, conversation):
            failed += not await _turn(conversation, question, console, signals)
        elif command is not None:
            await obey(command, conversation, console)
    return failed


async def _turn(
    conversation: Conversation, text: str, console: Console, signals: StopSignals
) -> bool:
    async def answer() -> None:
        await _wait_until_ready(conversation.client, console)
        await print_answer(conversation, text, console)

    # A task of its own, so that Ctrl-C ends the answer and not the conversation.
    answering = asyncio.ensure_future(answer())
    try:
        with signals.calling(answering.cancel, signal.SIGINT):
            await answering
            return True
    except asyncio.CancelledError:
        conversing = asyncio.current_task()
        if conversing is not None and conversing.cancelling():
            raise
        console.print("\nstopped", style="dim")
    except ClientError as error:
        console.print(str(error), style="red")
    return False
