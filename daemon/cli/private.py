"""A private daemon on a socket of its own, for the length of a `with` block."""

import asyncio
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ..errors import ClientError
from ..lifecycle.temporary import SOCKET
from .client import Client

_START = 600.0  # seconds without a downloaded byte; a large model is read from disk in this time
_STOP = 120.0  # longer than a daemon takes to stop at the most
_POLL = 0.1


@asynccontextmanager
async def private_daemon(
    model: str, told: Callable[[dict[str, Any]], object] = lambda _: None
) -> AsyncIterator[Client]:
    """Start a daemon that serves `model`, wait until it is ready, stop it at the end.

    It also ends when this process does, however that ends: `temporary.py` says how.

    Args:
        model: its name.
        told: gets each answer of `/ready` until it is ready.

    Raises:
        ClientError: it did not start; the message is the last line of its log.
    """
    # Only named here. The daemon makes it, so that it is there to remove it.
    folder = Path(tempfile.gettempdir(), f"umbel-{secrets.token_hex(8)}")
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "umbel.daemon.lifecycle.temporary", str(folder), model),
            stdin=asyncio.subprocess.PIPE,  # open until this process ends
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        try:
            async with Client(folder / SOCKET) as client:
                await _wait_ready_in_time(client, process, log, told)
                yield client
        finally:
            try:
                await _stop(process)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # where the daemon was killed


async def _wait_ready_in_time(
    client: Client,
    process: asyncio.subprocess.Process,
    log: IO[bytes],
    told: Callable[[dict[str, Any]], object],
) -> None:
    """Wait until it is ready, for `_START` seconds from the last byte of a download on."""
    clock, arrived = asyncio.get_running_loop().time, 0
    try:
        async with asyncio.timeout(_START) as limit:

            def look(ready: dict[str, Any]) -> None:
                nonlocal arrived
                done = ready.get("download", {}).get("done", 0)
                if done > arrived:
                    arrived = done
                    limit.reschedule(clock() + _START)
                told(ready)

            await _wait_ready(client, process, log, look)
    except TimeoutError:
        message = f"the private daemon was not ready within {_START:g} seconds"
        raise ClientError(f"{message}, downloads not counted") from None


async def _wait_ready(
    client: Client,
    process: asyncio.subprocess.Process,
    log: IO[bytes],
    told: Callable[[dict[str, Any]], object],
) -> None:
    while process.returncode is None:
        # Polled, not awaited: a process has no event for "ready" short of systemd's.
        await asyncio.sleep(_POLL)
        if not client.path.exists():
            continue
        with suppress(ClientError):  # it is ending, and its last words are better
            ready = await client.get("/ready")
            if ready["status"] == "ready":
                return
            told(ready)
    log.seek(0)
    last = "".join(log.read().decode(errors="replace").strip().splitlines()[-1:])
    raise ClientError(f"the private daemon did not start: {last.removeprefix('umbel: ')}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Stop in order; kill where that takes too long, or where it is cancelled."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP):
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
