"""A private daemon for the length of a `with` block, and the end of a running one."""

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ..errors import ClientError
from ..http.sockets import lock_holder
from ..lifecycle.temporary import SOCKET
from .client import Client

_START = 600.0  # seconds without a downloaded byte; a large model is read from disk in this time
_STOP = 120.0  # seconds; more than a daemon takes to stop
_SAVES = 90.0  # seconds that a daemon takes to stop, after the grace of its requests
_POLL = 0.1


@asynccontextmanager
async def private_daemon(
    model: str, show: Callable[[dict[str, Any]], object] = lambda _: None
) -> AsyncIterator[Client]:
    """Start a daemon that serves `model`, wait until it is ready, stop it at the end.

    It also ends with this process, however that ends: see `temporary.py`.

    Args:
        model: its name.
        show: gets each answer of `/ready` until the daemon is ready.

    Raises:
        ClientError: it did not start; the message is the last line of its log.
    """
    # Only named here. The daemon makes it, and so can remove it.
    folder = Path(tempfile.gettempdir(), f"umbel-{secrets.token_hex(8)}")
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "umbel.daemon.lifecycle.temporary", str(folder), model),
            stdin=asyncio.subprocess.PIPE,  # open until this process ends
            stdout=log,
            stderr=log,
            start_new_session=True,  # this process handles Ctrl-C
        )
        try:
            async with Client(folder / SOCKET) as client:
                await _wait_ready(client, process, log, show)
                yield client
        finally:
            try:
                await _stop(process)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # the daemon may have been killed


async def _wait_ready(
    client: Client,
    process: asyncio.subprocess.Process,
    log: IO[bytes],
    show: Callable[[dict[str, Any]], object],
) -> None:
    """Wait until it is ready, for `_START` seconds from the last byte of a download on."""
    clock, arrived = asyncio.get_running_loop().time, 0
    try:
        async with asyncio.timeout(_START) as limit:
            while process.returncode is None:
                # Polled, not awaited: a process has no event for "ready" short of systemd's.
                await asyncio.sleep(_POLL)
                if not client.path.exists():
                    continue
                with suppress(ClientError):  # it is ending, and its log has the reason
                    ready = await client.get("/ready")
                    if ready["status"] == "ready":
                        return
                    done = ready.get("download", {}).get("done", 0)
                    if done > arrived:
                        arrived = done
                        limit.reschedule(clock() + _START)
                    show(ready)
    except TimeoutError:
        message = f"the private daemon was not ready within {_START:g} seconds"
        raise ClientError(f"{message}, downloads not counted") from None
    log.seek(0)
    last = "".join(log.read().decode(errors="replace").strip().splitlines()[-1:])
    raise ClientError(f"the private daemon did not start: {last.removeprefix('umbel: ')}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Stop in order; kill if that takes too long, or is cancelled."""
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


def stop_running(path: Path, grace: float) -> int:
    """Send SIGTERM to the daemon on a socket, and wait until it has ended.

    The lock beside the socket names the daemon. A socket of systemd or launchd has no lock, and is
    not connected to: that would start its daemon.

    Args:
        path: of the socket.
        grace: seconds for running requests.

    Returns:
        The daemon's process id.

    Raises:
        ClientError: no daemon of this user's holds the lock, or it does not end in time.
    """
    try:
        pid = lock_holder(path)
        if pid is None:
            raise ClientError(_none_runs(path))
        os.kill(pid, signal.SIGTERM)
    except PermissionError as error:
        raise ClientError(f"the daemon on {path} is another user's") from error
    except ProcessLookupError as error:  # it ended just now
        raise ClientError(_none_runs(path)) from error
    end = time.monotonic() + grace + _SAVES
    while lock_holder(path) == pid:
        if time.monotonic() > end:
            raise ClientError(
                f"the daemon on {path} (pid {pid}) still runs after {grace + _SAVES:g} seconds"
            )
        time.sleep(_POLL)
    return pid


def _none_runs(path: Path) -> str:
    if not path.exists():
        return f"no daemon runs on {path}; name another --socket"
    return (
        f"no daemon holds {path}; if it is a service's socket, the next client would start that "
        "daemon again: umbel service status says how it is, and umbel service uninstall, or "
        "`systemctl --user stop umbel.socket umbel.service`, keeps it down"
    )
