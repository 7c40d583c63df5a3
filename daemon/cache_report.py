"""`umbel cache`: what the running daemon remembers, for people."""

from pathlib import Path
from typing import Any

from rich.console import Console

from .client import Client

_MIB = 2**20


async def stats(socket: Path, console: Console) -> None:
    """Print the cache's shape and size.

    Raises:
        ClientError: no daemon answers.
    """
    shape = await _get(socket, "/cache")
    console.print(f"{shape['tokens']} tokens in {shape['nodes']} nodes")
    console.print(f"{shape['span_bytes'] / _MIB:.1f} MiB of keys and values")
    console.print(
        f"{shape['checkpoint_bytes'] / _MIB:.1f} MiB in {shape['checkpoints']} checkpoints"
    )
    console.print(f"{shape['leases']} open leases, {shape['evictions']} evictions")


async def nodes(socket: Path, console: Console) -> None:
    """Print the caller's nodes, each below the one it goes on from.

    Raises:
        ClientError: no daemon answers.
    """
    listed = (await _get(socket, "/cache/nodes"))["nodes"]
    console.print(f"{'tokens':24} {'MiB':>9} {'checkpoint':>11} {'pins':>5} {'last used':>10}")
    for node in listed:
        name = f"{'  ' * node['depth']}[{node['start']}, {node['end']})"
        checkpoint = f"{node['checkpoint_bytes'] / _MIB:.1f}" if node["checkpoint_bytes"] else "-"
        console.print(
            f"{name:24} {node['bytes'] / _MIB:9.1f} {checkpoint:>11} "
            f"{node['pins']:5} {node['last_used']:10}",
            markup=False,
        )


async def verify(socket: Path, console: Console) -> bool:
    """Print what is broken; True when nothing is.

    Raises:
        ClientError: no daemon answers.
    """
    problems = (await _get(socket, "/cache/verify"))["problems"]
    for problem in problems:
        console.print(problem, markup=False)
    console.print("the cache is sound" if not problems else f"{len(problems)} problems")
    return not problems


async def _get(socket: Path, route: str) -> dict[str, Any]:
    async with Client(socket) as client:
        return await client.get(route)
