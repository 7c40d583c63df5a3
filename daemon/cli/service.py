"""`umbel service`: the daemon as a service of systemd or launchd."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, ServiceError
from .group import Group, fail, report_console, run

if TYPE_CHECKING:
    from ..installation import Installation

app = typer.Typer(
    cls=Group, help="Run the daemon as a service of systemd or launchd.", no_args_is_help=True
)

System = Annotated[
    bool, typer.Option("--system/--user", help="The service of the whole system, or of this user.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace or remove files even if they were edited.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the steps.")]


@app.command("install")
def install(*, system: System = False, force: Force = False, dry_run: DryRun = False) -> None:
    """Write the service's files, and start it now and at every start of the system."""
    from .. import installation  # noqa: PLC0415  (keeps --help quick)

    _change(installation.install, system=system, force=force, dry_run=dry_run)


@app.command("uninstall")
def uninstall(*, system: System = False, force: Force = False, dry_run: DryRun = False) -> None:
    """Stop the service and remove its files; state and settings stay."""
    from .. import installation  # noqa: PLC0415  (keeps --help quick)

    _change(installation.uninstall, system=system, force=force, dry_run=dry_run)


def _change(change: Callable[..., None], *, system: bool, force: bool, dry_run: bool) -> None:
    try:
        change(_find(system=system), typer.echo, force=force, dry_run=dry_run)
    except ServiceError as error:
        fail(error)


@app.command("status")
def status(*, system: System = False) -> None:
    """Print the service's state; exit status 1 if it does not run."""
    from ..installation import report  # noqa: PLC0415  (keeps --help quick)

    try:
        found = _find(system=system).status()
    except ServiceError as error:
        fail(error)
    console = report_console()
    for line in run(report(found)):
        console.print(line, markup=False)
    if not found.runs:
        raise typer.Exit(1)


@app.command("logs")
def logs(*, system: System = False) -> None:
    """Show the end of the service's log, and new lines, until Ctrl-C."""
    try:
        raise typer.Exit(_find(system=system).follow_log())
    except (ConfigError, ServiceError) as error:
        fail(error)


def _find(*, system: bool) -> "Installation":
    from ..installation import find  # noqa: PLC0415  (keeps --help quick)

    return find(system=system)
