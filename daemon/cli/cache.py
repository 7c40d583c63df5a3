"""`umbel cache`: the state that the running daemon keeps."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.console import Console

from ..config import Settings
from ..errors import ConfigError, FlagError
from ..quoting import age, amount, printable
from .group import Group, fail, refuse, report_console, run
from .options import takes_settings

if TYPE_CHECKING:
    from .client import Client

Model = Annotated[
    str | None,
    typer.Option(
        help="The model whose cache is meant. [dim]\\[default: the default model][/dim]",
        metavar="<name>",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_MIB = 2**20
_HEAD = ("tokens", "MiB", "checkpoint", "lies in", "used ago", "pins", "conversations", "text")
_SIDES = "<>><>><<"
_NAME = 24  # characters of a conversation's name
_DEEPEST = 12  # indentation of a node, at most

app = typer.Typer(
    cls=Group, help="Look into what the running daemon remembers.", no_args_is_help=True
)


@app.command("stats")
@takes_settings("socket", serves=False)
def cache_stats(*, model: Model = None, json: Json = False, settings: Settings) -> None:
    """Print the cache's shape and size."""
    console = report_console()
    run(_stats_json(settings, model, console) if json else _stats(settings, model, console))


@app.command("ls")
@takes_settings("socket", serves=False)
def cache_ls(*, model: Model = None, settings: Settings) -> None:
    """List your own nodes, as a tree; those of all tenants if you run the daemon."""
    run(_nodes(settings, model, report_console()))


@app.command("verify")
@takes_settings("socket", serves=False)
def cache_verify(*, model: Model = None, settings: Settings) -> None:
    """Check the cache's invariants; exit status 1 if one is broken."""

    async def verify() -> list[str]:
        async with _client(settings) as client:
            problems: list[str] = (await client.get(_at("/cache/verify", model)))["problems"]
        return problems

    problems, console = run(verify()), report_console()
    for problem in problems:
        console.print(problem, markup=False)
    console.print("the cache is sound" if not problems else f"{len(problems)} problems")
    if problems:
        raise typer.Exit(1)


@app.command("clear")
@takes_settings("socket", serves=False)
def cache_clear(*, model: Model = None, settings: Settings) -> None:
    """Forget your own state, in memory and on disk; what runs or is pinned stays."""

    async def clear() -> dict[str, Any]:
        async with _client(settings) as client:
            return await client.post(_at("/cache/clear", model))

    report_console().print(f"{run(clear())['cleared_tokens']} tokens forgotten")


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
    if (prompt is None) == (conversation is None):
        refuse(FlagError("name a file with a system prompt, or a --conversation"))
    if shared and prompt is None:
        refuse(FlagError("only a system prompt can be shared: name its file"))
    body: dict[str, Any] = {"conversation": conversation}
    if prompt is not None:
        body = {"name": name or prompt.name, "system": _text_of(prompt), "shared": shared}

    async def pin() -> dict[str, Any]:
        async with _client(settings) as client:
            return await client.post(_at("/cache/pins", model), body)

    pinned = run(pin())
    line = f"{pinned['name']}: {pinned['held']} of {pinned['tokens']} tokens stay"
    report_console().print(line, markup=False)


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

    async def unpin() -> None:
        query = {"shared": "true"} if shared else {}
        async with _client(settings) as client:
            await client.delete(_at(f"/cache/pins/{quote(name, safe='')}", model, **query))

    run(unpin())
    report_console().print(f"{name}: not pinned any more", markup=False)


def _text_of(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except OSError as error:
        fail(ConfigError(f"cannot read {path}: {error.strerror}"))
    except UnicodeDecodeError as error:
        fail(ConfigError(f"cannot read {path}: {error}"))


def _client(settings: Settings) -> "Client":
    from .client import Client  # noqa: PLC0415  (keeps --help quick)

    return Client(settings.socket_path)


def _at(route: str, model: str | None, **query: str) -> str:
    """Write a route for a model; None is the default one."""
    if model is not None:
        query["model"] = model
    return f"{route}?{urlencode(query)}" if query else route


async def _stats(settings: Settings, model: str | None, console: Console) -> None:
    """Print the cache's shape; of the default model also the use of memory and disk."""
    async with _client(settings) as client:
        shape = await client.get(_at("/cache", model))
        pins = (await client.get(_at("/cache/pins", model)))["pins"]
        status = await client.get("/status")
    console.print(f"{shape['tokens']} tokens in {shape['nodes']} nodes")
    console.print(f"{amount(shape['span_bytes'])} of keys and values")
    console.print(f"{amount(shape['checkpoint_bytes'])} in {shape['checkpoints']} checkpoints")
    line = f"{shape['leases']} running requests"
    if "evictions" in shape:  # of all tenants: only an operator gets it
        line += f", {shape['evictions']} evictions, {shape['page_outs']} paged out"
    console.print(line)
    if model is None and status["engine"] is not None:  # an operator's status
        _print_use(status, console)
    for pinned in pins:
        shared = ", shared" if pinned["shared"] else ""
        console.print(f"pinned: {pinned['name']}, {pinned['tokens']} tokens{shared}", markup=False)


def _print_use(status: dict[str, Any], console: Console) -> None:
    from ...cachestore.ledger import Kind  # noqa: PLC0415  (keeps --help quick)

    memory, disk = status["ledger"], status["disk"]
    held = amount(sum(memory[kind] for kind in Kind))
    console.print(f"{held} of {amount(memory['budget'])} in memory, of all models")
    if disk is not None:
        state = disk["state"] + (f": {disk['reason']}" if disk["reason"] else "")
        line = f"{amount(disk['nbytes'])} in {disk['records']} files on disk ({state})"
        console.print(line, markup=False)


async def _stats_json(settings: Settings, model: str | None, console: Console) -> None:
    """Print the answers of `/cache` and `/cache/pins`, and two parts of `/status`."""
    async with _client(settings) as client:
        answer = await client.get(_at("/cache", model))
        answer |= await client.get(_at("/cache/pins", model))
        if model is None:
            status = await client.get("/status")
            answer |= {"ledger": status["ledger"], "disk": status["disk"]}
    console.print_json(data=answer)


async def _nodes(settings: Settings, model: str | None, console: Console) -> None:
    """Print nodes below their parents, with their tenants if there are several.

    The state on disk of models that are not loaded follows.
    """
    async with _client(settings) as client:
        listed = (await client.get(_at("/cache/nodes", model)))["nodes"]
        stored = (await client.get("/status"))["stored"]
    rows, sides = [_HEAD, *map(_cells, listed)], _SIDES
    if len({node["tenant"] for node in listed}) > 1:
        tenants = ["tenant", *(printable(node["tenant"]) for node in listed)]
        rows = [(tenant, *row) for tenant, row in zip(tenants, rows, strict=True)]
        sides = f"<{sides}"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = map(format, row, map("{}{}".format, sides, widths))
        line = "  ".join(cells).rstrip()
        if console.is_terminal:  # a line is cut where the window ends
            console.print(line, markup=False, soft_wrap=False, no_wrap=True, overflow="ellipsis")
        else:
            console.print(line, markup=False)
    if stored:
        console.print("\non disk, of models that are not loaded:")
        for each in stored:
            used = f"used {age(each['idle_seconds'])} ago"
            line = f"  {printable(each['model'])}: {amount(each['bytes'])}, {used}"
            console.print(line, markup=False)


def _cells(node: dict[str, Any]) -> tuple[str, ...]:
    indent = "  " * min(node["depth"], _DEEPEST)
    others = f" and {node['others']} more" if node["others"] else ""
    return (
        f"{indent}[{node['start']}, {node['end']})",
        f"{node['bytes'] / _MIB:.1f}",
        f"{node['checkpoint_bytes'] / _MIB:.1f}" if node["checkpoint_bytes"] else "-",
        "+".join(node["tiers"]) or "-",
        "-" if node["age"] is None else age(node["age"]),
        str(node["pins"]),
        printable(", ".join(name[:_NAME] for name in node["conversations"]) + others) or "-",
        node["text"],
    )
