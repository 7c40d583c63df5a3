"""`umbel cache`: what the running daemon remembers, for people."""

from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from rich.console import Console

from ...cachestore.ledger import Kind
from ..quoting import printable
from ..terminal.sizes import age, amount
from .client import Client

_MIB = 2**20
_HEAD = ("tokens", "MiB", "checkpoint", "lies in", "used ago", "pins", "conversations", "text")
_SIDES = "<>><>><<"
_NAME = 24  # characters of a conversation's name
_DEEPEST = 12  # to which a node is put below the one it goes on from


class ModelCache(NamedTuple):
    """The cache of one of a daemon's models.

    Attributes:
        socket: of the daemon.
        model: its name; None for the default one.
    """

    socket: Path
    model: str | None

    def at(self, route: str, **query: str) -> str:
        """Write a route so that it is about this model."""
        if self.model is not None:
            query["model"] = self.model
        return f"{route}?{urlencode(query)}" if query else route


async def stats(cache: ModelCache, console: Console) -> None:
    """Print the cache's shape and size, and of the default one what it takes, and of the disk.

    Raises:
        ClientError: no daemon answers.
    """
    shape = await _get(cache, "/cache")
    console.print(f"{shape['tokens']} tokens in {shape['nodes']} nodes")
    console.print(f"{amount(shape['span_bytes'])} of keys and values")
    console.print(f"{amount(shape['checkpoint_bytes'])} in {shape['checkpoints']} checkpoints")
    line = f"{shape['leases']} running requests"
    if "evictions" in shape:  # of all tenants: it is told to who sees all
        line += f", {shape['evictions']} evictions, {shape['page_outs']} paged out"
    console.print(line)
    if cache.model is None:
        await _print_status(cache, console)
    for pinned in (await _get(cache, "/cache/pins"))["pins"]:
        whose = ", shared" if pinned["shared"] else ""
        console.print(f"pinned: {pinned['name']}, {pinned['tokens']} tokens{whose}", markup=False)


async def stats_json(cache: ModelCache, console: Console) -> None:
    """Print the same as JSON: what `/cache` and `/cache/pins` answer, and of `/status` two parts.

    Raises:
        ClientError: no daemon answers.
    """
    told = await _get(cache, "/cache") | await _get(cache, "/cache/pins")
    if cache.model is None:
        status = await _get(cache, "/status")
        told |= {"ledger": status["ledger"], "disk": status["disk"]}
    console.print_json(data=told)


async def _print_status(cache: ModelCache, console: Console) -> None:
    """Print what `/status` tells of the default model alone."""
    status = await _get(cache, "/status")
    if status["engine"] is None:  # it is told to who sees all
        return
    memory = status["ledger"]
    held = sum(memory[kind] for kind in Kind)
    console.print(f"{amount(held)} of {amount(memory['budget'])} in memory, of all models")
    if (disk := status["disk"]) is not None:
        console.print(
            f"{amount(disk['nbytes'])} in {disk['records']} files on disk "
            f"({disk['state']}{': ' if disk['reason'] else ''}{disk['reason']})",
            markup=False,
        )


async def nodes(cache: ModelCache, console: Console) -> None:
    """Print nodes, each below the one it goes on from, and of whom where they are of several.

    Behind them are the models that are not loaded and have state on disk.

    Raises:
        ClientError: no daemon answers.
    """
    listed = (await _get(cache, "/cache/nodes"))["nodes"]
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
    if stored := (await _get(cache, "/status"))["stored"]:
        console.print("\non disk, of models that are not loaded:")
        for model in stored:
            used = f"used {age(model['idle_seconds'])} ago"
            console.print(
                f"  {printable(model['model'])}: {amount(model['bytes'])}, {used}", markup=False
            )


def _cells(node: dict[str, Any]) -> tuple[str, ...]:
    """Write what is listed of a node, in the order of the head."""
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


async def verify(cache: ModelCache, console: Console) -> bool:
    """Print what is broken; True when nothing is.

    Raises:
        ClientError: no daemon answers.
    """
    problems = (await _get(cache, "/cache/verify"))["problems"]
    for problem in problems:
        console.print(problem, markup=False)
    console.print("the cache is sound" if not problems else f"{len(problems)} problems")
    return not problems


async def clear(cache: ModelCache, console: Console) -> None:
    """Have the daemon forget what the caller has, and print how much that was.

    Raises:
        ClientError: no daemon answers.
    """
    async with Client(cache.socket) as client:
        cleared = (await client.post(cache.at("/cache/clear")))["cleared_tokens"]
    console.print(f"{cleared} tokens forgotten")


async def pin(cache: ModelCache, console: Console, body: dict[str, str | bool]) -> None:
    """Pin a system prompt or a conversation, and print what is held of it.

    Raises:
        ClientError: no daemon answers, or it cannot be pinned.
    """
    async with Client(cache.socket) as client:
        pinned = await client.post(cache.at("/cache/pins"), body)
    console.print(
        f"{pinned['name']}: {pinned['held']} of {pinned['tokens']} tokens stay", markup=False
    )


async def unpin(cache: ModelCache, console: Console, name: str, *, shared: bool) -> None:
    """Let go of a pin.

    Raises:
        ClientError: no daemon answers, or there is no such pin.
    """
    async with Client(cache.socket) as client:
        query = {"shared": "true"} if shared else {}
        await client.delete(cache.at(f"/cache/pins/{quote(name, safe='')}", **query))
    console.print(f"{name}: not pinned any more", markup=False)


async def _get(cache: ModelCache, route: str) -> dict[str, Any]:
    async with Client(cache.socket) as client:
        return await client.get(cache.at(route))
