"""A daemon to talk to: the one that runs, or one of our own; and the wait until it serves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ..cli.client import Client
from ..cli.private import private_daemon
from ..errors import ClientError
from ..models.aliases import DEFAULT_MODEL
from ..terminal.start_view import shown

_POLL = 0.2  # seconds


class Wanted(NamedTuple):
    """The daemon that a chat is for.

    Attributes:
        socket: of the daemon that runs.
        model: which of its models answers; None for its default.
        private: the model of a private daemon, if one is asked for.
        otherwise: the model of a private daemon that may stand in for one that does not answer;
            None where an answer of another model could be taken for one of the model that is meant.
    """

    socket: Path
    model: str | None = None
    private: str | None = None
    otherwise: str | None = None


@asynccontextmanager
async def reach(wanted: Wanted, console: Console) -> AsyncIterator[Client]:
    """Use the daemon that is wanted, and wait until it serves.

    Raises:
        ClientError: no daemon answers, or it does not have the model.
    """
    begun, name = "Starting a private daemon", wanted.private
    if name is None:
        async with Client(wanted.socket) as client:
            try:
                await client.get("/health")
            except ClientError as error:
                if wanted.otherwise is None:
                    advice = "umbel chat --private starts one for this chat"
                    raise ClientError(f"{error}; {advice}") from error
            else:
                await wait_until_ready(client, console)
                if wanted.model is not None:
                    await _check_model(client, wanted.model)
                yield client
                return
        begun = f"No daemon on {wanted.socket}; starting a private one"
        name = wanted.otherwise
    console.print(f"{begun} with {name} …", style="dim")
    with shown(console) as view:
        async with private_daemon(str(name), view.show) as client:
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


async def _check_model(client: Client, model: str) -> None:
    names = await model_names(client)
    if model not in (*names, DEFAULT_MODEL):
        raise ClientError(
            f"the daemon on {client.path} has no model {model}; it has: {', '.join(names)}; "
            "umbel chat --private --model loads another"
        )


async def model_names(client: Client) -> list[str]:
    """List the models that a daemon has, the default one first.

    Raises:
        ClientError: the daemon does not answer.
    """
    return [str(model["id"]) for model in (await client.get("/v1/models"))["data"]]
