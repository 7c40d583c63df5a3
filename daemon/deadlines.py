"""How long a request may take: what it asks for, and the most that the daemon allows."""

import math
from collections.abc import Mapping

from .failures import APIError
from .quoting import quote

TIMEOUT_HEADER = "X-Umbel-Timeout"


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
