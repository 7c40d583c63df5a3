"""`umbel cache`: what the running daemon remembers."""

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from ..config import Settings
from ..errors import ConfigError, FlagError
from .group import Group
from .options import takes_settings
from .running import fail, refuse, report_console, run

if TYPE_CHECKING:
    from .cache_report import ModelCache

T = TypeVar("T")
Model = Annotated[
    str | None,
    typer.Option(
        help="The model whose cache is meant. [dim]\\[default: the default model][/dim]",
        metavar="<name>",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

app = typer.Typer(
    cls=Group, help="Look into what the running daemon remembers.", no_args_is_help=True
)


@app.command("stats")
@takes_settings("socket", serves=False)
def cache_stats(*, model: Model = None, json: Json = False, settings: Settings) -> None:
    """Print the cache's shape and size."""
    from .cache_report import stats, stats_json  # noqa: PLC0415  (keeps --help quick)

    _report(stats_json if json else stats, model, settings)


@app.command("ls")
@takes_settings("socket", serves=False)
def cache_ls(*, model: Model = None, settings: Settings) -> None:
    """List your own nodes, as a tree; those of all tenants if you run the daemon."""
    from .cache_report import nodes  # noqa: PLC0415  (keeps --help quick)

    _report(nodes, model, settings)


@app.command("verify")
@takes_settings("socket", serves=False)
def cache_verify(*, model: Model = None, settings: Settings) -> None:
    """Check the cache's invariants; exit status 1 if one is broken."""
    from .cache_report import verify  # noqa: PLC0415  (keeps --help quick)

    if not _report(verify, model, settings):
        raise typer.Exit(1)


@app.command("clear")
@takes_settings("socket", serves=False)
def cache_clear(*, model: Model = None, settings: Settings) -> None:
    """Forget what you have there, in memory and on disk; what runs or is pinned stays."""
    from .cache_report import clear  # noqa: PLC0415  (keeps --help quick)

    _report(clear, model, settings)


@app.command("pin")
@takes_settings("socket", serves=False)
def cache_pin(
    prompt: Annotated[
        Path | None, typer.Argument(help="File with a system prompt, or - for stdin.")
    ] = None,
    *,
    conversation: Annotated[
        str | None, typer.Option(help="Pin this conversation instead.", metavar="<name>")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the pin. [dim]\\[default: the file's name][/dim]", metavar="<name>"
        ),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Share the system prompt with all tenants.")
    ] = False,
    model: Model = None,
    settings: Settings,
) -> None:
    """Keep a system prompt, or a conversation, whatever else wants room."""
    from .cache_report import pin  # noqa: PLC0415  (keeps --help quick)

    if (prompt is None) == (conversation is None):
        refuse(FlagError("name a file with a system prompt, or a --conversation"))
    if shared and prompt is None:
        refuse(FlagError("only a system prompt can be shared: name its file"))
    if prompt is not None:
        body: dict[str, str | bool] = {"name": name or prompt.name, "system": _text_of(prompt)}
        body["shared"] = shared
    else:
        body = {"conversation": conversation or ""}
    _report(lambda cache, console: pin(cache, console, body), model, settings)


@app.command("unpin")
@takes_settings("socket", serves=False)
def cache_unpin(
    name: str,
    *,
    shared: Annotated[
        bool, typer.Option("--shared", help="It is a prompt that all tenants share.")
    ] = False,
    model: Model = None,
    settings: Settings,
) -> None:
    """Let a pinned prompt or conversation age like anything else."""
    from .cache_report import unpin  # noqa: PLC0415  (keeps --help quick)

    _report(lambda cache, console: unpin(cache, console, name, shared=shared), model, settings)


def _text_of(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except OSError as error:
        fail(ConfigError(f"cannot read {path}: {error.strerror}"))
    except UnicodeDecodeError as error:
        fail(ConfigError(f"cannot read {path}: {error}"))


def _report(
    report: Callable[["ModelCache", Console], Coroutine[Any, Any, T]],
    model: str | None,
    settings: Settings,
) -> T:
    from .cache_report import ModelCache  # noqa: PLC0415  (keeps --help quick)

    return run(report(ModelCache(settings.socket_path, model), report_console()))
