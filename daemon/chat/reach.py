"""A daemon to talk to: the one that runs, or one of our own; and the wait until it serves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from ..client import Client
from ..config import Settings
from ..errors import ClientError
from ..private import private_daemon
from ..terminal.start_view import shown

_POLL = 0.2  # seconds


@asynccontextmanager
async def reach(socket: Path, model: str | None, console: Console) -> AsyncIterator[Client]:
    """Use the daemon on the socket if it runs and no model was asked for, else a private one.

    Raises:
        ClientError: the private one did not start.
    """
    if model is None and socket.exists():
        async with Client(socket) as client:
            try:
                await client.get("/health")
            except ClientError:
                pass
            else:
                yield client
                return
    name = model or Settings().model
    begun = (
        "Starting a private daemon" if model else f"No daemon on {socket}; starting a private one"
    )
    console.print(f"{begun} with {name} …", style="dim")
    with shown(console) as view:
        async with private_daemon(name, view.show) as client:
            view.close()
            yield client


async def wait_until_ready(client: Client, console: Console) -> None:
    """Wait while the daemon loads, and show what it does.

    Raises:
        ClientError: it has gone, or stops.
    """
    ready = await client.get("/ready")
    if ready["status"] != "loading":
        return
    with shown(console) as view:
        while ready["status"] == "loading":
            view.show(ready)
            await asyncio.sleep(_POLL)
            ready = await client.get("/ready")
