"""Commands as `umbel` has them: other names, suggestions, and errors of one style."""

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import typer
from rich.markup import escape
from typer._click.exceptions import ClickException
from typer.core import TyperGroup

from .running import say_error

_TWINS: Mapping[str, str] = {"ls": "list", "list": "ls"}
_MEANT: Mapping[str, str] = {
    "run": "umbel serve runs the daemon, and umbel chat talks to it",
    "start": "umbel serve runs the daemon, and umbel service install makes it a service",
    "status": "umbel ps lists requests, umbel top shows the daemon, and umbel service status the "
    "service",
    "pull": "umbel models pull gets a model",
    "rm": "umbel models rm deletes a model",
    "restart": "umbel stop ends the daemon, and umbel serve runs it again",
}
"""What is asked of other programs in such words, and how it is done here."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to standard output; files name themselves in theirs."""


class Group(TyperGroup):
    """A group of commands. `ls` and `list` are one; an unknown command gets advice.

    A command line that is wrong ends with status 2, and one line on standard error.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command by its name, or by the other name of it."""
        found = super().get_command(ctx, cmd_name)
        if found is None and (twin := _TWINS.get(cmd_name)) is not None:
            found = super().get_command(ctx, twin)
        if found is None and ctx.parent is None and (advice := _MEANT.get(cmd_name)) is not None:
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
        """Run the command line, and end the process unless that is not wanted."""
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
            say_error(f"standard output cannot be written: {error.strerror}")
            status = 1
        sys.exit(status if isinstance(status, int) else 0)


def _end(error: ClickException) -> NoReturn:
    """Say what is wrong with the command line."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ != "NoArgsIsHelpError":  # it has shown the help
        hint = "" if context is None else f" [dim]({escape(context.command_path)} --help)[/]"
        say_error(error.format_message(), hint)
    sys.exit(error.exit_code)


def _discard_output() -> None:
    """Have standard output go nowhere: Python writes what is left of it at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _hide_types_of_flags(params: list[Any]) -> None:
    """A flag takes no value; a type beside it looks as if it took one."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
