"""`umbel models`: models on this machine, models that fit, and downloads."""

from typing import Annotated

import typer

from ..config import Settings
from ..errors import ClientError, FlagError
from .group import Group, fail, refuse, report_console, run
from .options import takes_settings

app = typer.Typer(cls=Group, help="List, get and choose models.", invoke_without_command=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Memory = Annotated[
    str | None,
    typer.Option(help="Plan for a machine with so much memory, such as 64GiB.", metavar="<bytes>"),
]
OnDevice = Annotated[
    str | None,
    typer.Option(
        "--device", help="The device of that machine; else this one's.", metavar="<mac|gpu|cpu>"
    ),
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
    """List the models on this machine; see `umbel models list`."""
    if ctx.invoked_subcommand is None:
        _list(memory, device, settings, json=json)


@app.command("list")
@takes_settings("socket", serves=False)
def list_(
    *,
    memory: Memory = None,
    device: OnDevice = None,
    json: Json = False,
    settings: Settings,
) -> None:
    """List the models that need no download, and how they fit."""
    _list(memory, device, settings, json=json)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A Hugging Face repo org/name.")],
    *,
    json: Json = False,
) -> None:
    """Download a model; an interrupted download goes on where it ended."""
    from ..models.downloads import pull as fetch  # noqa: PLC0415  (keeps --help quick)

    typer.echo(run(fetch(name, json=json)))


@app.command()
def rm(
    name: Annotated[str, typer.Argument(help="A Hugging Face repo org/name, or smollm2.")],
) -> None:
    """Delete a downloaded model; a daemon that has loaded it keeps it in memory."""
    from ..models.downloads import remove  # noqa: PLC0415  (keeps --help quick)

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
    """Recommend models of Hugging Face's mlx-community that fit, with their uses."""
    from ..models import catalog  # noqa: PLC0415  (keeps --help quick)
    from ..models.fit import machine_of  # noqa: PLC0415  (likewise)

    try:
        machine = machine_of(memory, device)
    except FlagError as error:
        refuse(error)
    _print(catalog.recommend(machine, settings, history=history, everything=everything, json=json))


def _list(memory: str | None, device: str | None, settings: Settings, *, json: bool) -> None:
    from ..models.catalog import report  # noqa: PLC0415  (keeps --help quick)

    _print(run(report(memory, device, settings, json=json)))


def _print(lines: list[str]) -> None:
    console = report_console()
    for line in lines:
        console.print(line, markup=False)
