"""The commands of `umbel`, except those with a group of their own."""

import os
from collections.abc import Callable
from typing import Annotated

import typer

from ..config import SETTINGS, Settings
from ..errors import ClientError, ConfigError, FlagError, ServiceError, StartError
from ..lifecycle.signals import StopSignals, has_terminal
from . import cache, keys, models, service
from .group import Group, fail, refuse, report_console, run
from .options import takes_settings

app = typer.Typer(
    name="umbel",
    cls=Group,
    help="Serve many LLM agents from one shared prompt on MLX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(cache.app, name="cache")
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.add_typer(service.app, name="service")

_MODEL = SETTINGS["model"]
_OTHER_WAYS = (
    "Each option is also a key of umbel.toml and a variable: --max-batch is max_batch there, and "
    "UMBEL_MAX_BATCH. An option overrides a variable, and a variable the file."
)
MaxTokens = Annotated[
    int, typer.Option(min=1, help="Most tokens of an answer.", metavar="<tokens>")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def _version(
    *, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from ... import __version__  # noqa: PLC0415  (reads the package's metadata)

        typer.echo(__version__)
        raise typer.Exit


@app.command(epilog=_OTHER_WAYS)
@takes_settings()
def serve(*, read_again: Callable[[], Settings], settings: Settings) -> None:
    """Run the daemon, in the foreground, until SIGTERM or Ctrl-C."""
    from ..observability import logs  # noqa: PLC0415  (keeps --help quick)
    from ..terminal.console import standard_error  # noqa: PLC0415  (likewise)
    from ..terminal.display import TerminalDisplay  # noqa: PLC0415  (likewise)

    console = standard_error() if settings.log_format == "text" else None
    try:
        if console is None or settings.log_path is not None:
            logs.configure(settings.log_format, settings.log_level, settings.log_path)
        else:
            logs.configure_terminal(console, settings.log_level)
        _announce()
        from ..lifecycle import server  # noqa: PLC0415  (imports mlx, for seconds)

        server.serve(
            settings,
            read_again=None if has_terminal() else read_again,
            display=None if console is None else TerminalDisplay(console),
        )
    except StartError as error:
        fail(error)


def _announce() -> None:
    """Write the first line, before the imports that take seconds."""
    import structlog  # noqa: PLC0415  (keeps --help quick)

    from ... import __version__  # noqa: PLC0415  (likewise)

    structlog.get_logger().info("starting", version=__version__, pid=os.getpid())


@app.command()
@takes_settings("socket", serves=False)
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The question; piped text follows it. Without both: a conversation."),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="The daemon's model that answers; with --private, the one to load.",
            metavar="<name>",
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Start a daemon for this chat alone.")
    ] = False,
    lines: Annotated[
        bool, typer.Option("--lines", help="Each line of standard input is a question.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System prompt.", metavar="<text>")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=2,
            help="0 is greedy. [dim]\\[default: the model's own][/dim]",
            metavar="<number>",
        ),
    ] = None,
    settings: Settings,
) -> None:
    """Talk to the running daemon; at a terminal, to a private one if none runs."""
    from ..chat.conversation import Options  # noqa: PLC0415  (keeps --help quick)
    from ..chat.session import Wanted  # noqa: PLC0415  (likewise)
    from ..chat.session import chat as converse  # noqa: PLC0415  (likewise)

    if lines and prompt is not None:
        refuse(FlagError("a prompt is one question, and --lines reads many"))
    default = SETTINGS["model"].default
    configured = settings.model != default or settings.models or settings.socket
    wanted = Wanted(
        settings.socket_path,
        model=None if private else model,
        private=settings.source_of(model or settings.model) if private else None,
        otherwise=None if configured or model else default,
    )
    signals = StopSignals()
    work = converse(
        prompt,
        wanted=wanted,
        lines=lines,
        system=system,
        options=Options(max_tokens, temperature),
        signals=signals,
    )
    run(work, signals)


@app.command()
def demo(
    *,
    agents: Annotated[int, typer.Option(min=1, max=64, help="How many agents.")] = 4,
    max_tokens: MaxTokens = 32,
    model: Annotated[str, typer.Option(help=_MODEL.about.does)] = _MODEL.default,
) -> None:
    """Show many agents with one system prompt at work on a private daemon."""
    from . import demo as agents_at_work  # noqa: PLC0415  (keeps --help quick)

    if not run(agents_at_work.demo(agents=agents, max_tokens=max_tokens, model=model)):
        raise typer.Exit(1)


@app.command()
@takes_settings("socket", serves=False)
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print its present state, and end.")] = False,
    settings: Settings,
) -> None:
    """Show the running daemon live, until q or Ctrl-C."""
    from ..terminal import top as live  # noqa: PLC0415  (keeps --help quick)

    signals = StopSignals()
    run(live.top(settings.socket_path, once=once, signals=signals), signals)


@app.command()
@takes_settings("socket", "stop_grace", serves=False)
def stop(*, settings: Settings) -> None:
    """Stop the daemon in order, and wait until it has ended; a second time cuts the grace short."""
    from .private import stop_running  # noqa: PLC0415  (keeps --help quick)

    try:
        pid = stop_running(settings.socket_path, settings.stop_grace)
    except ClientError as error:
        fail(error)
    typer.echo(f"stopped the daemon on {settings.socket_path} (pid {pid})")


@app.command()
@takes_settings("log_file", serves=False)
def logs(*, settings: Settings) -> None:
    """Show the end of the daemon's log, and new lines, until Ctrl-C."""
    from ..installation import find, follow_file  # noqa: PLC0415  (keeps --help quick)

    try:
        if settings.log_path is not None:
            raise typer.Exit(follow_file(settings.log_path))
        raise typer.Exit(find(system=False).follow_log())
    except ConfigError as error:
        fail(error)
    except ServiceError as error:
        fail(ServiceError(f"no log_file is set, so the daemon logs to standard error; {error}"))


@app.command()
@takes_settings("socket", serves=False)
def ps(*, json: Json = False, settings: Settings) -> None:
    """Print running and waiting requests, with the reason of each wait."""
    from ..terminal import top as live  # noqa: PLC0415  (keeps --help quick)

    run(live.print_requests(settings.socket_path, json=json))


@app.command()
@takes_settings("socket", serves=False)
def doctor(*, json: Json = False, settings: Settings) -> None:
    """Check what a daemon needs; each line is ok, a warning or a problem."""
    from .doctor import examine, report  # noqa: PLC0415  (imports mlx)

    findings = run(examine(settings))
    console = report_console()
    if json:
        console.print_json(data=[finding._asdict() for finding in findings])
    else:
        for line in report(findings):
            console.print(line)
    if any(finding.grade == "problem" for finding in findings):
        raise typer.Exit(1)
