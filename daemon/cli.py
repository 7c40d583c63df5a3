"""The `umbel` command."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__
from .config import Settings, load
from .errors import ConfigError, StartError
from .signals import StopSignals

T = TypeVar("T")

app = typer.Typer(
    name="umbel",
    help="Serve many LLM agents from one shared prompt on MLX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Model = Annotated[str | None, typer.Option(help="smollm2, a directory, or a repo org/name.")]
Socket = Annotated[Path | None, typer.Option(help="Unix socket of the daemon.")]
Config = Annotated[Path | None, typer.Option(help="Configuration file (TOML).")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")]


@app.callback(invoke_without_command=True)
def _version(
    *, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def serve(
    *,
    model: Model = None,
    aliases: Annotated[
        list[str] | None,
        typer.Option("--alias", help="Another name of the model; may be given several times."),
    ] = None,
    socket: Socket = None,
    host: Annotated[str | None, typer.Option(help="TCP address, with --port.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; no TCP unless given.")] = None,
    cors_origins: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", help="Origin of a web page that may use the daemon."),
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Most prompt tokens one step computes.")
    ] = None,
    cache_bytes: Annotated[
        str | None, typer.Option(help="Bytes that model state may take, such as 4GiB.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Keep no state between requests.")
    ] = False,
    disk_dir: Annotated[
        Path | None, typer.Option(help="Folder for state on disk; no other daemon may use it.")
    ] = None,
    disk_bytes: Annotated[
        str | None, typer.Option(help="Bytes that state on disk may take, such as 50GiB.")
    ] = None,
    no_disk: Annotated[bool, typer.Option("--no-disk", help="Keep no state on disk.")] = False,
    checkpoint_interval: Annotated[
        int | None, typer.Option(help="Distance of checkpoints in long prompts, in tokens.")
    ] = None,
    checkpoints_kept: Annotated[
        int | None, typer.Option(help="Checkpoints that one request may leave behind.")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most requests that run at once.")] = None,
    max_stall_ms: Annotated[
        float | None, typer.Option(help="Longest wait of a stream for another's prefill chunk.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Same request, same tokens, whatever else runs.")
    ] = False,
    max_waiting: Annotated[
        int | None, typer.Option(help="Most requests that may wait; then 429.")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds a request may take, waiting included.")
    ] = None,
    stop_grace: Annotated[
        float | None, typer.Option(help="Seconds running requests get on SIGTERM.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
    config: Config = None,
) -> None:
    """Run the daemon, in the foreground, until SIGTERM or Ctrl-C."""
    flags = {
        "model": model,
        "aliases": aliases or None,
        "socket": None if socket is None else str(socket),
        "host": host,
        "port": port,
        "cors_origins": cors_origins or None,
        "prefill_chunk": prefill_chunk,
        "cache_bytes": cache_bytes,
        "no_cache": no_cache or None,
        "disk_dir": None if disk_dir is None else str(disk_dir),
        "disk_bytes": disk_bytes,
        "no_disk": no_disk or None,
        "checkpoint_interval": checkpoint_interval,
        "checkpoints_kept": checkpoints_kept,
        "max_batch": max_batch,
        "max_stall_ms": max_stall_ms,
        "exact": exact or None,
        "max_waiting": max_waiting,
        "request_timeout": request_timeout,
        "stop_grace": stop_grace,
        "log_format": log_format,
    }
    settings = _settings(flags, config)
    from . import logs, server  # noqa: PLC0415  (imports mlx: --help must not wait for it)

    logs.configure(settings.log_format)
    try:
        server.serve(settings)
    except StartError as error:
        _fail(error)


@app.command()
def chat(
    prompt: Annotated[str | None, typer.Argument(help="Left out: a conversation.")] = None,
    *,
    model: Annotated[
        str | None, typer.Option(help="Start a private daemon with this model.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    socket: Socket = None,
    config: Config = None,
) -> None:
    """Talk to the running daemon, or to a private one if none runs."""
    from .chat import Options  # noqa: PLC0415  (keeps --help quick)
    from .chat import chat as run  # noqa: PLC0415  (as above)

    path = _settings({"socket": None if socket is None else str(socket)}, config).socket_path
    options = Options(max_tokens, temperature)
    signals = StopSignals()
    work = run(prompt, socket=path, model=model, system=system, options=options, signals=signals)
    _run(work, signals)


@app.command()
def demo(
    *,
    agents: Annotated[int, typer.Option(min=1, max=64, help="How many agents.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    model: Annotated[str, typer.Option(help="smollm2, a directory, or a repo.")] = "smollm2",
) -> None:
    """Show many agents with one system prompt at work on a private daemon."""
    from .demo import demo as run  # noqa: PLC0415  (keeps --help quick)

    if not _run(run(agents=agents, max_tokens=max_tokens, model=model)):
        raise typer.Exit(1)


@app.command()
def doctor(*, socket: Socket = None, config: Config = None) -> None:
    """Check what a daemon needs; each line is ok, a warning or a problem."""
    from .doctor import examine, report  # noqa: PLC0415  (imports mlx)

    settings = _settings({"socket": None if socket is None else str(socket)}, config)
    findings = _run(examine(settings))
    console = Console(highlight=False, soft_wrap=True)
    for line in report(findings):
        console.print(line)
    if any(finding.grade == "problem" for finding in findings):
        raise typer.Exit(1)


@app.command()
def models(*, socket: Socket = None, config: Config = None) -> None:
    """List the models that can be served, and the one that is."""
    from .model_list import available  # noqa: PLC0415  (keeps --help quick)

    settings = _settings({"socket": None if socket is None else str(socket)}, config)
    console = Console(highlight=False, soft_wrap=True)
    for line in _run(available(settings.socket_path)):
        console.print(line)


cache = typer.Typer(help="Look into what the running daemon remembers.", no_args_is_help=True)
app.add_typer(cache, name="cache")


@cache.command("stats")
def cache_stats(*, socket: Socket = None, config: Config = None) -> None:
    """Print the cache's shape and size."""
    from .cache_report import stats  # noqa: PLC0415  (keeps --help quick)

    _report(stats, socket, config)


@cache.command("ls")
def cache_ls(*, socket: Socket = None, config: Config = None) -> None:
    """List your own nodes, as a tree."""
    from .cache_report import nodes  # noqa: PLC0415  (keeps --help quick)

    _report(nodes, socket, config)


@cache.command("verify")
def cache_verify(*, socket: Socket = None, config: Config = None) -> None:
    """Check the cache's invariants; exit status 1 if one is broken."""
    from .cache_report import verify  # noqa: PLC0415  (keeps --help quick)

    if not _report(verify, socket, config):
        raise typer.Exit(1)


@cache.command("clear")
def cache_clear(*, socket: Socket = None, config: Config = None) -> None:
    """Forget what you have there, in memory and on disk; what runs or is pinned stays."""
    from .cache_report import clear  # noqa: PLC0415  (keeps --help quick)

    _report(clear, socket, config)


@cache.command("pin")
def cache_pin(
    prompt: Annotated[
        Path | None, typer.Argument(help="File with a system prompt, or - for stdin.")
    ] = None,
    *,
    conversation: Annotated[str | None, typer.Option(help="Pin this conversation instead.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the pin; else the file's name.")] = None,
    socket: Socket = None,
    config: Config = None,
) -> None:
    """Keep a system prompt, or a conversation, whatever else wants room."""
    from .cache_report import pin  # noqa: PLC0415  (keeps --help quick)

    if (prompt is None) == (conversation is None):
        _fail(ConfigError("name a file with a system prompt, or a --conversation"))
    if prompt is not None:
        body = {"name": name or prompt.name, "system": _text_of(prompt)}
    else:
        body = {"conversation": conversation or ""}
    _report(lambda path, console: pin(path, console, body), socket, config)


@cache.command("unpin")
def cache_unpin(name: str, *, socket: Socket = None, config: Config = None) -> None:
    """Let a pinned prompt or conversation age like anything else."""
    from .cache_report import unpin  # noqa: PLC0415  (keeps --help quick)

    _report(lambda path, console: unpin(path, console, name), socket, config)


def _text_of(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        _fail(ConfigError(f"cannot read {path}: {error}"))


def _report(
    report: Callable[[Path, Console], Coroutine[Any, Any, T]],
    socket: Path | None,
    config: Path | None,
) -> T:
    settings = _settings({"socket": None if socket is None else str(socket)}, config)
    return _run(report(settings.socket_path, Console(highlight=False, soft_wrap=True)))


def _settings(flags: dict[str, Any], config: Path | None) -> Settings:
    try:
        return load(flags, file=config)
    except StartError as error:
        _fail(error)


def _run(work: Coroutine[Any, Any, T], given: StopSignals | None = None) -> T:
    """Run to the end, or until a signal cancels the work: so a private daemon ends with it."""
    from .client import ClientError  # noqa: PLC0415  (keeps --help quick)

    with given or StopSignals() as signals:
        try:
            return asyncio.run(_until_signal(work, signals))
        except ClientError as error:
            _fail(error)
        except asyncio.CancelledError:
            if signals.first is None:
                raise
            raise typer.Exit(128 + signals.first) from None


async def _until_signal(work: Coroutine[Any, Any, T], signals: StopSignals) -> T:
    task = asyncio.ensure_future(work)
    with signals.calling(task.cancel):
        return await task


def _fail(error: Exception) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[red]umbel:[/] {escape(str(error))}"
    )
    raise typer.Exit(1)
