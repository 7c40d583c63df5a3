"""Prompts that the configuration declares shared: files, read when a model is loaded."""

import time
from collections.abc import Iterable
from pathlib import Path

import structlog

from ...cachestore.tries import SHARED
from ...scheduler.errors import RequestError
from ..errors import StartError
from ..http.bodies import BodyBudget, Share
from ..identity.caller import Caller
from ..observability.pin_requests import PinRequest
from ..quoting import quote
from ..requests.arrivals import Arrival, Arrivals, Wait
from ..requests.service import Service

_PREFIX = "file:"  # of their pins' names; other pins are left as they are

log = structlog.get_logger()


def read(paths: Iterable[str]) -> dict[str, str]:
    """Read the prompts, without the line ends that editors leave behind them.

    Returns:
        Texts by the names of their pins.

    Raises:
        StartError: a file cannot be read, has no text, or two have one name.
    """
    found: dict[str, str] = {}
    for each in paths:
        path = Path(each).expanduser()
        try:
            text = path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"shared_prompts: cannot read {quote(each)}: {error}") from error
        if not text:
            raise StartError(f"shared_prompts: {quote(each)} is empty")
        if _PREFIX + path.name in found:
            raise StartError(f"shared_prompts: two files are called {quote(path.name)}")
        found[_PREFIX + path.name] = text
    return found


async def declare(service: Service, prompts: dict[str, str]) -> None:
    """Declare prompts shared, and those that a former start declared no more.

    One that cannot be kept is said in the log.

    Args:
        service: of a model that computes.
        prompts: of `read`.
    """
    try:
        for pin in await service.cache.pins(SHARED):
            if pin.name.startswith(_PREFIX) and pin.name not in prompts:
                await service.cache.unpin(SHARED, pin.name)
                log.info("prompt not shared any more", name=pin.name)
    except RequestError as error:
        log.warning("prompts of a former start may still be shared", reason=str(error))
    for number, (name, text) in enumerate(prompts.items()):
        request = PinRequest(name=name, system=text, shared=True)
        try:
            pin = await service.pin(request, _arrival(number))
        except Exception as error:  # noqa: BLE001  (the model is loaded, and serves without it)
            log.warning("prompt not shared", name=name, reason=str(error))
        else:
            log.info("prompt shared", name=name, tokens=pin.held)


def _arrival(number: int) -> Arrival:
    """Make a request of the daemon itself, which asks for no more than its configuration says."""
    caller, share = Caller(SHARED, operator=True), Share(BodyBudget(1 << 40))
    return Arrivals().arrive(f"shared-{number}", caller, share, Wait(time.monotonic()))
