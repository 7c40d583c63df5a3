"""One chat from its first line to its last."""

import asyncio
import signal
import sys
from typing import TextIO

from rich.console import Console

from ..errors import ClientError
from ..lifecycle.signals import StopSignals
from ..terminal.console import moves
from .answer import end_line, print_answer
from .commands import command_of, ends, obey, question_of
from .conversation import Conversation, Options
from .lines import Lines, PipedLines, read_all
from .reach import Wanted, reach, wait_until_ready

_HELP = "Ctrl-C stops an answer; Ctrl-D or /exit ends; /help lists what else there is."


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
    below the one that is given. Ctrl-C (SIGINT) ends an answer of a conversation; otherwise
    `signals` do what the caller says.

    Args:
        prompt: of the command line.
        wanted: the daemon. Only on a terminal may another one stand in for it.
        lines: each line of standard input is a message.
        system: the system prompt.
        options: of all answers.
        signals: those of the command.

    Raises:
        ClientError: no daemon answers, or it refused the one prompt.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)):
        wanted = wanted._replace(otherwise=None)
    async with reach(wanted, console) as client:
        conversation = Conversation(client, system, options)
        conversation.model = wanted.model
        if lines or (prompt is None and _is_terminal(sys.stdin)):
            await _hold(conversation, console, signals)
            return
        asked = await _asked(prompt)
        try:
            await print_answer(conversation, asked, console)
        except asyncio.CancelledError:
            end_line()
            raise


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is one; a closed one is None."""
    return stream is not None and stream.isatty()


async def _asked(prompt: str | None) -> str:
    """Put together what is asked: the argument, and what a pipe has."""
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
    """Hold a conversation, with line editing where the terminal has it."""
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
    from .edited_lines import EditedLines, history_file  # noqa: PLC0415  (a pipe needs none)

    lines = EditedLines(history_file())
    # Its terminal makes a key of Ctrl-C only while a line is written.
    with signals.calling(lines.interrupt, signal.SIGINT):
        await _converse(conversation, lines, console, signals)


async def _converse(
    conversation: Conversation, lines: Lines, console: Console, signals: StopSignals
) -> int:
    """Answer line after line, to the end of input; returns how many were not answered."""
    failed = 0
    while (line := await lines.next()) is not None:
        command = command_of(line)
        if command is not None and ends(command):
            break
        if question := question_of(line, command, conversation):
            failed += not await _turn(conversation, question, console, signals)
        elif command is not None:
            await obey(command, conversation, console)
    return failed


async def _turn(
    conversation: Conversation, text: str, console: Console, signals: StopSignals
) -> bool:
    # A task of its own, so that Ctrl-C ends the answer and not the conversation.
    answering = asyncio.ensure_future(_answer(conversation, text, console))
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


async def _answer(conversation: Conversation, text: str, console: Console) -> None:
    await wait_until_ready(conversation.client, console)
    await print_answer(conversation, text, console)
