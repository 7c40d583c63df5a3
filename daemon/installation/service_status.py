"""How the service is: what its manager knows of it, and what the daemon says of itself."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..cli.client import Client
from ..errors import ClientError

_PATIENCE = 5.0  # seconds in which a daemon says how it is


class ServiceStatus(NamedTuple):
    """What the manager knows.

    Attributes:
        state: in the manager's words.
        runs: whether there is a process.
        pid: of the process; empty without one.
        since: when it came into this state; empty where the manager does not know.
        restarts: how often it was started anew; empty where the manager does not know.
        reason: why it does not run as it should, or had to be started anew; empty else.
        last_line: of its log, which says more of that; looked up where there is a reason.
        socket: where the daemon serves; None where that is not known.
    """

    state: str
    runs: bool
    pid: str = ""
    since: str = ""
    restarts: str = ""
    reason: str = ""
    last_line: str = ""
    socket: Path | None = None


async def report(status: ServiceStatus) -> list[str]:
    """Write the status as lines, with what the daemon itself says if it runs."""
    lines = [f"{'service':8} {', '.join(_words(status))}"]
    if status.reason:
        lines.append(f"{'reason':8} {status.reason}")
    if status.last_line:
        lines.append(f"{'log':8} {status.last_line}")
    # A socket without a daemon must not be asked: the manager would start one to answer.
    if status.runs and status.socket is not None:
        lines.append(f"{'daemon':8} {await _asked(status.socket)}")
    return lines


def _words(status: ServiceStatus) -> Iterator[str]:
    yield status.state
    if status.pid:
        yield f"pid {status.pid}"
    if status.since:
        yield f"since {status.since}"
    if status.restarts:
        yield f"restarts: {status.restarts}"


async def _asked(path: Path) -> str:
    try:
        async with asyncio.timeout(_PATIENCE), Client(path) as client:
            told = await client.get("/status")
    except TimeoutError:
        return f"does not answer on {path} within {_PATIENCE:g} seconds"
    except ClientError as error:
        return str(error)
    state = told.get("phase") or told.get("state")
    name = (told.get("model") or {}).get("name", "no model yet")
    return f"{state}: {name} on {path}"
