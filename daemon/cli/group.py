"""Commands as `umbel` has them: their run, their errors in one style, and suggestions."""

import asyncio
import errno
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from typer._click.exceptions import ClickException
from typer._click.globals import get_current_context
from typer.core import TyperGroup

from ..errors import ClientError, FlagError
from ..lifecycle.signals import StopSignals

T = TypeVar("T")

_TWINS: Mapping[str, str] = {"ls": "list", "list": "ls"}
_ADVICE: Mapping[str, str] = {
    "run": "umbel serve runs the daemon, and umbel chat talks to it",
    "start": "umbel serve runs the daemon, and umbel service install makes it a service",
    "status": "umbel ps lists requests, umbel top shows the daemon, and umbel service status the "
    "service",
    "pull": "umbel models pull gets a model",
    "rm": "umbel models rm deletes a model",
    "restart": "umbel stop ends the daemon, and umbel serve runs it again",
}
"""Advice about commands that other programs have."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to standard output; files name themselves in theirs."""


def run(work: Coroutine[Any, Any, T], given: StopSignals | None = None) -> T:
    """Run a command to its end, or until a signal cancels it. Errors are one sentence."""
    with given or StopSignals() as signals:

        async def until_signal() -> T:
            task = asyncio.ensure_future(work)
            with signals.calling(task.cancel):
                return await task

        try:
            return asyncio.run(until_signal())
        except ClientError as error:
            fail(error)
        except FlagError as error:
            refuse(error)
        except asyncio.CancelledError:
            if signals.first is None:
                raise
            raise typer.Exit(128 + signals.first) from None


def fail(error: Exception) -> NoReturn:
    """Print an error, and end with status 1."""
    _print_error(str(error))
    raise typer.Exit(1)


def refuse(error: FlagError) -> NoReturn:
    """Print a fault of the command line and the name of its help, and end with status 2."""
    get_current_context().fail(str(error))


def _print_error(text: str, hint: str = "") -> None:
    """Print an error; the hint is markup."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[red]umbel:[/] {escape(text)}{hint}"
    )


def report_console() -> Console:
    """Make a console for a report: it colours and folds nothing by itself."""
    return Console(highlight=False, soft_wrap=True)


class Group(TyperGroup):
    """A group of commands. `ls` and `list` are one; an unknown command gets advice.

    A faulty command line ends with status 2, and one line on standard error.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command by its name, or by the other name of it."""
        found = super().get_command(ctx, cmd_name)
        if found is None and (twin := _TWINS.get(cmd_name)) is not None:
            found = super().get_command(ctx, twin)
        if found is None and ctx.parent is None and (advice := _ADVICE.get(cmd_name)) is not None:
            ctx.fail(f"No such command '{cmd_name}': {advice}.")
        if found is not None:
            _hide_types_of_flags(found.get_params(ctx))
        return found

    def get_params(self, ctx: Any) -> list[Any]:
        """List the options of the group itself."""
        params = super().get_params(ctx)
        _hide_types_of_flags(params)
        return params

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002  (as in the class above)
        windows_expand_args: bool = True,  # noqa: FBT001, FBT002
        **extra: Any,
    ) -> Any:
        """Run the command line, and end the process in standalone mode."""
        run = partial(super().main, args, prog_name, complete_var, False)
        if not standalone_mode:
            return run(windows_expand_args, **extra)
        try:
            status = run(windows_expand_args, **extra)
        except ClickException as error:
            _end(error)
        except typer.Abort:
            status = 1
        except OSError as error:
            if error.errno not in _FULL or error.filename is not None:
                raise
            _discard_output()
            _print_error(f"standard output cannot be written: {error.strerror}")
            status = 1
        sys.exit(status if isinstance(status, int) else 0)


def _end(error: ClickException) -> NoReturn:
    context = getattr(error, "ctx", None)
    if type(error).__name__ != "NoArgsIsHelpError":  # it has shown the help
        hint = "" if context is None else f" [dim]({escape(context.command_path)} --help)[/]"
        _print_error(error.format_message(), hint)
    sys.exit(error.exit_code)


def _discard_output() -> None:
    """Send standard output to nowhere: Python flushes the rest of it at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _hide_types_of_flags(params: list[Any]) -> None:
    """Hide the type of a flag, which looks like a value of it."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
