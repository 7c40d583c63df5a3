"""The daemon that runs, as `umbel doctor` sees it: its `/status`, and what it warns of."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ClientError
from ..http.sockets import MAX_PATH
from .client import Client
from .findings import Finding

_ASLEEP = "no such socket"


class Running(NamedTuple):
    """What is found at a socket.

    Attributes:
        answers: a daemon does.
    """

    findings: list[Finding]
    answers: bool


async def ask(path: Path) -> Running:
    """Look at a socket, and at the daemon that runs there."""
    if len(os.fsencode(path)) > MAX_PATH:
        finding = Finding("problem", "socket", f"{path} is too long", "choose a shorter --socket")
        return Running([finding], answers=False)
    try:
        async with Client(path) as client:
            status = await client.get("/status")
    except ClientError as error:
        if _ASLEEP in str(error):
            return Running([Finding("ok", "socket", f"{path} (no daemon runs)")], answers=False)
        return Running([Finding("warning", "socket", str(error))], answers=False)
    name = (status.get("model") or {}).get("name", "no model yet")
    served = Finding("ok", "socket", f"{path}: a daemon serves {name} ({status['state']})")
    return Running([served, *warnings_of(status)], answers=True)


def warnings_of(status: dict[str, Any]) -> Iterator[Finding]:
    """Say what a person should know of an answer of `/status`."""
    model = status.get("model") or {}
    if (reason := model.get("one_by_one")) is not None:
        advice = "answers are right; with several agents at once each gets its share of the speed"
        text = f"{model['name']} decodes one by one: {reason}"
        yield Finding("warning", "batches", text, advice)
    if status["state"] == "stalled":
        yield Finding("problem", "engine", "a step does not end", "stop the daemon; it may be hung")
    pressure = status.get("pressure") or {"level": "normal"}
    if pressure["level"] != "normal":
        text = f"the system is short of memory: {pressure['level']}"
        yield Finding("warning", "pressure", text, "the daemon keeps less state until it is over")
    for slot in status.get("models", ()):
        if (failure := slot.get("failure")) is not None:
            yield Finding("warning", "model", f"{slot['name']} cannot be loaded: {failure}")
        disk = slot.get("disk") or {"state": "on"}
        if disk["state"] != "on":
            text = f"the disk cache of {slot['name']} is {disk['state']}: {disk['reason']}"
            yield Finding("warning", "disk", text, "requests go on; nothing more is kept there")
