"""`umbel top`: what a daemon does, live, from its `/status` alone."""

import asyncio
import signal
import sys
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from ..cli.client import Client
from ..errors import ClientError
from ..lifecycle.signals import StopSignals
from .keys import pressed
from .picture import picture, unreachable
from .rates import Rates
from .requests import LISTED, requests, rows_of

_EVERY = 1.0  # seconds
_QUIT = "q"
_WIDEST = 250  # the same, of a list of requests
_WIDE = 160  # characters of a line where no terminal says how many there are


async def top(socket: Path, *, once: bool, signals: StopSignals) -> None:
    """Show a daemon until `q` or Ctrl-C (SIGINT), its usual ends; or print what it does, once.

    Where standard output is no terminal, or one that cannot draw, it prints once.

    Raises:
        ClientError: no daemon answers at the start.
    """
    width = None if sys.stdout.isatty() else _WIDE
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    async with Client(socket) as client:
        rates = Rates()
        rates.take(await client.get("/status"))
        if once or not console.is_terminal or console.is_dumb_terminal:
            await asyncio.sleep(_EVERY)
            status = await client.get("/status")
            rates.take(status)
            console.print(picture(status, rates))
        else:
            await _watch(client, rates, console, signals)


async def print_requests(socket: Path, *, json: bool) -> None:
    """Print the requests of a daemon.

    Args:
        socket: of the daemon.
        json: as `/status` has them, each with its model.

    Raises:
        ClientError: no daemon answers.
    """
    width = None if sys.stdout.isatty() else _WIDEST
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    async with Client(socket) as client:
        status = await client.get("/status")
    if json:
        console.print_json(data=rows_of(status))
    else:
        console.print(requests(status, Rates(), LISTED))


async def _watch(client: Client, rates: Rates, console: Console, signals: StopSignals) -> None:
    end = asyncio.Event()
    with (
        signals.calling(end.set, signal.SIGINT),
        pressed(lambda key: end.set() if key == _QUIT else None),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not end.is_set():
            live.update(await _look(client, rates), refresh=True)
            try:
                async with asyncio.timeout(_EVERY):
                    await end.wait()
            except TimeoutError:
                continue


async def _look(client: Client, rates: Rates) -> Group:
    """Draw what the daemon does now; one that has gone may come back."""
    try:
        status = await client.get("/status")
    except ClientError as error:
        rates.forget()
        return unreachable(str(error))
    rates.take(status)
    return picture(status, rates)
