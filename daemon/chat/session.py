"""One chat from its first line to its last."""

import asyncio
import signal
import sys
from pathlib import Path

from rich.console import Console

from ..errors import ClientError
from ..signals import StopSignals
from ..terminal.console import moves
from .answer import end_line, print_answer
from .commands import command_of, ends, obey
from .conversation import Conversation, Options
from .lines import Lines, PipedLines
from .reach import reach, wait_until_ready

_HELP = "Ctrl-C stops an answer; Ctrl-D or /exit ends; /help lists what else there is."


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
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    async with reach(socket, model, console) as client:
        conversation = Conversation(client, system, options)
        await wait_until_ready(client, console)
        if prompt is not None:
            try:
                await print_answer(conversation, prompt, console)
            except asyncio.CancelledError:
                end_line()
                raise
            return
        console.print(_HELP, style="dim")
        if not (
            console.is_terminal and moves(console) and sys.stdin.isatty() and sys.stdout.isatty()
        ):
            await _converse(conversation, PipedLines(sys.stdin.fileno()), console, signals)
            return
        from .edited_lines import EditedLines, history_file  # noqa: PLC0415  (a pipe needs none)

        lines = EditedLines(history_file())
        # Its terminal makes a key of Ctrl-C only while a line is written.
        with signals.calling(lines.interrupt, signal.SIGINT):
            await _converse(conversation, lines, console, signals)


async def _converse(
    conversation: Conversation, lines: Lines, console: Console, signals: StopSignals
) -> None:
    """Answer line after line, to the end of input."""
    while (line := await lines.next()) is not None:
        command = command_of(line)
        if command is not None and ends(command):
            return
        if command is not None:
            await obey(command, conversation, console)
        elif line.strip():
            await _turn(conversation, line.strip(), console, signals)


async def _turn(
    conversation: Conversation, text: str, console: Console, signals: StopSignals
) -> None:
    # A task of its own, so that Ctrl-C ends the answer and not the conversation.
    answering = asyncio.ensure_future(_answer(conversation, text, console))
    try:
        with signals.calling(answering.cancel, signal.SIGINT):
            await answering
    except asyncio.CancelledError:
        conversing = asyncio.current_task()
        if conversing is not None and conversing.cancelling():
            raise
        console.print("\nstopped", style="dim")
    except ClientError as error:
        console.print(str(error), style="red")


async def _answer(conversation: Conversation, text: str, console: Console) -> None:
    await wait_until_ready(conversation.client, console)
    await print_answer(conversation, text, console)
