"""How fast a client's requests without a body are answered: each costs it next to nothing.

The event loop and the engine share one interpreter lock, so that every answer takes time from all
streams. An answer is given later, and not refused: a refusal would take as long.
"""

import time
from collections.abc import Callable

from aiohttp import hdrs, web

from .connection import connection_of

RATE = 500.0
"""Answers in a second that one peer gets without waiting; as many may come at once before."""

_LONGEST = 1.0  # seconds that one answer waits
_MOST_PEERS = 1024
_FREE = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})


class Pace:
    """Says how long answers wait, by peer: an address, or a user of the Unix socket.

    Args:
        clock: in seconds, never set.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[str, float] = {}  # when all that was asked for has been paid

    def delay(self, peer: str) -> float:
        """Count an answer; return the seconds that it waits."""
        now = self._clock()
        due = max(self._due.pop(peer, now), now) + 1 / RATE
        wait = min(max(0.0, due - now - 1), _LONGEST)
        self._due[peer] = min(due, now + 1 + _LONGEST)
        while len(self._due) > _MOST_PEERS:
            del self._due[next(iter(self._due))]  # the one that asked longest ago
        return wait

    def delay_of(self, request: web.Request) -> float:
        """Count a request's answer, unless it is an operator's or has a body."""
        connection = connection_of(request)
        if connection is None or connection.operator:
            return 0.0
        if request.method not in _FREE and request.body_exists:
            return 0.0
        return self.delay(connection.peer)
