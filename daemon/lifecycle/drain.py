"""What becomes of requests when the daemon stops: what waits is refused, what runs may finish."""

import asyncio
from typing import Any

from ..models.slot import Resident
from .display import Display


async def drain(
    residents: list[Resident], force_stop: asyncio.Event, grace: float, display: Display
) -> None:
    """Answer what waits, let what runs finish within the grace, then end it.

    Args:
        residents: the loaded models.
        force_stop: cuts the grace short.
        grace: seconds.
        display: shows a person what is waited for.
    """
    for resident in residents:
        resident.handoff.refuse_waiting()
    forced = asyncio.ensure_future(force_stop.wait())
    idle = asyncio.ensure_future(_wait_idle(residents))
    waits: set[asyncio.Future[Any]] = {forced, idle}
    with display.waiting(lambda: _still_running(residents)):
        await asyncio.wait(waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    idle.cancel()
    for resident in residents:
        resident.handoff.end_running()


def _still_running(residents: list[Resident]) -> str:
    requests = sum(resident.handoff.live for resident in residents)
    if not requests:
        return ""
    return f"waiting for {requests} request{'s'[: requests > 1]}, Ctrl-C again to force"


async def _wait_idle(residents: list[Resident]) -> None:
    for resident in residents:
        await resident.handoff.wait_idle()
