"""Saves a model's state before it goes: when it is unloaded, and when the daemon stops."""

import asyncio

import structlog

from ...scheduler.thread import MLXThread
from ..models.assembly import Assembly

_SAVE_GRACE = 10.0  # seconds; state that is not written in them is computed again

log = structlog.get_logger()


async def save_state(thread: MLXThread, assembly: Assembly) -> None:
    """Write what is not on disk yet, within the grace, and close the disk tier."""
    pager, disk = assembly.pager, assembly.disk
    if pager is None or disk is None:
        return
    try:
        async with asyncio.timeout(_SAVE_GRACE):
            while await asyncio.wrap_future(thread.submit(pager.write_all)):
                await asyncio.to_thread(disk.flush, _SAVE_GRACE)
    except TimeoutError:
        log.warning("state not saved in time", seconds=_SAVE_GRACE)
    except Exception:
        log.exception("state not saved")
    await asyncio.to_thread(disk.close, _SAVE_GRACE)
