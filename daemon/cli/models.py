"""`umbel models`: which models are here, which would fit, and how to get them."""

from typing import Annotated

import typer

from ..config import Settings
from ..errors import ClientError, FlagError
from ..lifecycle.signals import StopSignals
from ..models.machine import Device, Planned
from .group import Group
from .options import takes_settings
from .running import fail, refuse, report_console, run

app = typer.Typer(cls=Group, help="List, get and choose models.", invoke_without_command=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Memory = Annotated[
    str | None,
    typer.Option(help="Plan for a machine with so much memory, such as 64GiB.", metavar="<bytes>"),
]
OnDevice = Annotated[
    Device | None, typer.Option("--device", help="What computes there; else what does here.")
]
History = Annotated[
    int, typer.Option(min=1, help="Tokens of each agent's conversation.", metavar="<tokens>")
]


@app.callback()
@takes_settings("socket", serves=False)
def default(
    ctx: typer.Context,
    *,
    memory: Memory = None,
    device: OnDevice = None,
    json: Json = False,
    settings: Settings,
) -> None:
    """List the models that are here; see `umbel models list`."""
    if ctx.invoked_subcommand is None:
        _list(_planned(memory, device), settings, json=json)


@app.command("list")
@takes_settings("socket", serves=False)
def list_(
    *,
    memory: Memory = None,
    device: OnDevice = None,
    json: Json = False,
    settings: Settings,
) -> None:
    """List the models that can be served without a download, and whether they fit here."""
    _list(_planned(memory, device), settings, json=json)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A Hugging Face repo org/name.")],
    *,
    json: Json = False,
) -> None:
    """Download a model; one that came in part goes on where it ended."""
    from ..models.pull import pull as fetch  # noqa: PLC0415  (keeps --help quick)

    signals = StopSignals()
    lines = run(fetch(name, json=json), signals)
    for line in lines:
        typer.echo(line)


@app.command()
def rm(
    name: Annotated[str, typer.Argument(help="A Hugging Face repo org/name, or smollm2.")],
) -> None:
    """Delete a downloaded model; one that a daemon has loaded stays in its memory."""
    from ..models.removal import remove  # noqa: PLC0415  (keeps --help quick)

    try:
        typer.echo(remove(name))
    except ClientError as error:
        fail(error)


@app.command()
@takes_settings("socket", serves=False)
def recommend(
    *,
    memory: Memory = None,
    device: OnDevice = None,
    history: History = 16384,
    everything: Annotated[
        bool, typer.Option("--all", help="List models that do not fit as well.")
    ] = False,
    json: Json = False,
    settings: Settings,
) -> None:
    """Say which models of Hugging Face's mlx-community fit, and what they are good for."""
    from ..models.advice import recommend as advise  # noqa: PLC0415  (keeps --help quick)

    console = report_console()
    machine = _planned(memory, device)
    for line in advise(machine, settings, history=history, everything=everything, json=json):
        console.print(line, markup=False)


def _list(planned: Planned, settings: Settings, *, json: bool) -> None:
    from ..models.list import report  # noqa: PLC0415  (keeps --help quick)

    console = report_console()
    for line in run(report(planned, settings, json=json)):
        console.print(line, markup=False)


def _planned(memory: str | None, device: Device | None) -> Planned:
    try:
        return Planned.of(memory, device)
    except FlagError as error:
        refuse(error)
