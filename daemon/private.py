"""A daemon of one's own, on a private socket, for as long as a `with` block lasts."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from .client import Client, ClientError
from .config import ENV_PREFIX

_START = 600.0  # seconds; a large model is read from disk in this time
_STOP = 120.0  # longer than a daemon takes to stop at the most
_POLL = 0.1


@asynccontextmanager
async def private_daemon(model: str) -> AsyncIterator[Client]:
    """Start a daemon that serves `model`, wait until it is ready, stop it at the end.

    Raises:
        ClientError: it did not start; the message is what it said last.
    """
    with tempfile.TemporaryDirectory(prefix="umbel-") as folder:
        socket, log = Path(folder, "u.sock"), Path(folder, "log")
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "umbel", "serve"),
                *("--model", model, "--socket", str(socket), "--config", os.devnull, "--no-disk"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)},
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        try:
            async with Client(socket) as client:
                await _wait_ready(client, process, log)
                yield client
        finally:
            await _stop(process)


async def _wait_ready(client: Client, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(_START):
        while process.returncode is None:
            # Polled, not awaited: a process has no event for "ready" short of systemd's.
            await asyncio.sleep(_POLL)
            if not client.path.exists():
                continue
            if (await client.get("/ready"))["status"] == "ready":
                return
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise ClientError(f"the private daemon did not start: {''.join(last)}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
