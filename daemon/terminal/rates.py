"""How fast a daemon's figures grow, from two answers of `/status`."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

Status = dict[str, Any]


def engines(status: Status) -> list[dict[str, Any]]:
    """List what the engines of all loaded models tell."""
    told = (slot.get("engine") for slot in status.get("models", ()))
    return [engine for engine in told if engine is not None]


class _Sample(NamedTuple):
    """Figures that only grow: those of all engines by their names, and tokens of each request."""

    at: float
    engine: dict[str, float]
    out: dict[str, int]


class Rates:
    """Rates between the last two answers; None for what two answers do not have."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: _Sample | None = None
        self._last: _Sample | None = None

    def take(self, status: Status) -> None:
        """Take an answer of `/status`."""
        numbers: Counter[str] = Counter()
        out: dict[str, int] = {}
        for engine in engines(status):
            numbers.update({name: n for name, n in engine.items() if isinstance(n, int | float)})
        for slot in status.get("models", ()):
            out |= {each["request"]: int(each["output_tokens"]) for each in slot["requests"]}
        self._before, self._last = self._last, _Sample(self._clock(), dict(numbers), out)

    def forget(self) -> None:
        """Begin anew: another daemon may answer next."""
        self._before = self._last = None

    def of_engine(self, name: str) -> float | None:
        """How much a figure of the engines' grew in a second, all together."""
        if self._before is None or self._last is None:
            return None
        return self._rate(self._before.engine.get(name), self._last.engine.get(name))

    def of_request(self, request: str) -> float | None:
        """Tokens a second of a running request's answer."""
        if self._before is None or self._last is None:
            return None
        return self._rate(self._before.out.get(request), self._last.out.get(request))

    def _rate(self, before: float | None, last: float | None) -> float | None:
        if before is None or last is None or self._before is None or self._last is None:
            return None
        seconds = self._last.at - self._before.at
        return (last - before) / seconds if seconds > 0 and last >= before else None
