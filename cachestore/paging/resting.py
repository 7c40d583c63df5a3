"""Files that could not be read just now, and are not asked for again for a while."""

import time
from collections.abc import Iterable

_REST = 5.0  # seconds: a request that comes sooner computes the tokens itself

_clock = time.monotonic


class Resting:
    """Ids of files, each for a while. As many as there are files at most."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # in the order in which they end

    def add(self, ids: Iterable[int]) -> None:
        """Let files rest from now on."""
        until = _clock() + _REST
        for file in ids:
            self._until.pop(file, None)
            self._until[file] = until

    def __contains__(self, file: object) -> bool:
        """Whether a file is not to be asked for yet."""
        now = _clock()
        while self._until and (first := next(iter(self._until.items())))[1] <= now:
            del self._until[first[0]]
        return file in self._until
