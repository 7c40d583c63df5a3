"""How urgent a request is: what it asks for, and the highest that its tenant may have."""

from collections.abc import Mapping

from ...scheduler.order import Priority
from ..config import PriorityName
from ..http.failures import APIError
from ..quoting import quote

PRIORITY_HEADER = "X-Umbel-Priority"

_PRIORITIES: dict[str, Priority] = {
    "interactive": Priority.INTERACTIVE,
    "batch": Priority.BATCH,
}


def priority_of(headers: Mapping[str, str], highest: PriorityName, *, flex: bool) -> Priority:
    """Say which priority a request has.

    Args:
        headers: of the request; one of them may name a priority.
        highest: what its tenant may have; a request that asks for more has that.
        flex: whether the body asks for a slow service, as OpenAI's protocol has it. The header is
            stronger.

    Raises:
        APIError: 400, the header names none.
    """
    asked = headers.get(PRIORITY_HEADER, "batch" if flex else "interactive")
    if asked not in _PRIORITIES:
        message = f"{PRIORITY_HEADER} is {quote(asked)}; send {' or '.join(_PRIORITIES)}"
        raise APIError(400, message, param=PRIORITY_HEADER)
    return max(_PRIORITIES[asked], _PRIORITIES[highest])
