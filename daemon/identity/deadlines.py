"""How long a request may take: what it asks for, and the most that the daemon allows."""

import math
import time
from collections.abc import Callable, Mapping

from ..http.failures import APIError
from ..quoting import quote

TIMEOUT_HEADER = "X-Umbel-Timeout"


class Wait:
    """How long a request may take, and its place among those who wait until it is queued.

    Args:
        arrived_at: when it came, on the engine's clock, in seconds.
        asked: seconds that it asks for; None for what the daemon allows.
        clock: the engine's.
    """

    def __init__(
        self,
        arrived_at: float,
        asked: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arrived_at = arrived_at
        self._asked = math.inf if asked is None else asked
        self._clock = clock
        self._give_back: Callable[[], object] | None = None

    def deadline(self, most: float) -> float:
        """When it must have ended, on the engine's clock, if the daemon allows `most` seconds."""
        return self._arrived_at + min(self._asked, most)

    def left(self, most: float) -> float:
        """Seconds until then; 0 if it is late."""
        return max(0.0, self.deadline(most) - self._clock())

    @property
    def has_place(self) -> bool:
        """Whether it is counted among those who wait already."""
        return self._give_back is not None

    def take_place(self, give_back: Callable[[], object]) -> None:
        """Hold a place; `give_back` is called once, when it is given back."""
        self._give_back = give_back

    def give_place_back(self) -> None:
        """Be counted no more, if it was. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Read the seconds that a request may take, waiting included; None if it does not say.

    Raises:
        APIError: 400, that is no positive number.
    """
    asked = headers.get(TIMEOUT_HEADER)
    if asked is None:
        return None
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        message = f"{TIMEOUT_HEADER} is {quote(asked)}; send a positive number of seconds"
        raise APIError(400, message, param=TIMEOUT_HEADER)
    return seconds
