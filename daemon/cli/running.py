"""The run of a command, and its end where it cannot run: one sentence, and status 1 or 2."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from typer._click.globals import get_current_context

from ..errors import ClientError, FlagError
from ..lifecycle.signals import StopSignals

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], given: StopSignals | None = None) -> T:
    """Run to the end, or until a signal cancels the work: so a private daemon ends with it."""
    with given or StopSignals() as signals:
        try:
            return asyncio.run(_until_signal(work, signals))
        except ClientError as error:
            fail(error)
        except FlagError as error:
            refuse(error)
        except asyncio.CancelledError:
            if signals.first is None:
                raise
            raise typer.Exit(128 + signals.first) from None


async def _until_signal(work: Coroutine[Any, Any, T], signals: StopSignals) -> T:
    task = asyncio.ensure_future(work)
    with signals.calling(task.cancel):
        return await task


def fail(error: Exception) -> NoReturn:
    """Say what is wrong on standard error, and end with status 1."""
    say_error(str(error))
    raise typer.Exit(1)


def refuse(error: FlagError) -> NoReturn:
    """Say what is wrong with the command line, name its help, and end with status 2."""
    get_current_context().fail(str(error))


def say_error(text: str, hint: str = "") -> None:
    """Write a line about what is wrong; the hint is markup."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[red]umbel:[/] {escape(text)}{hint}"
    )


def report_console() -> Console:
    """Make what a command prints its report on: nothing is coloured or folded but by itself."""
    return Console(highlight=False, soft_wrap=True)
