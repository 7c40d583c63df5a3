"""How far the byte budget shrinks while the operating system is short of memory. Pure.

Down fast and up slowly: state kept too long makes the whole machine slow, state evicted too soon
only costs a prefill; but each turn from up to down evicts again.
"""

import enum


class Pressure(enum.IntEnum):
    """How short of memory the system is."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


class Shrink:
    """The share of the configured budget that may be used, from the pressure over time.

    An observation moves it by one step at most, except the first critical one.
    """

    # All in per cent of the full budget: tenths do not add up in binary floating point.
    _STEP = 10  # small enough to stop soon after enough was freed
    _WARNED = 50  # a warning asks for what is not needed right now: half is still a cache
    _LEAST = 25  # below it running conversations evict each other: prefills, on a slow machine
    # All in microseconds: seconds that are fractions do not add up to whole ones either.
    _WARNING_EVERY = 5_000_000  # until evicted memory was returned and the level has settled
    _CRITICAL_EVERY = 2_000_000  # what comes next is swap or the OOM killer
    _CALM = 30_000_000  # longer than a burst of another program, as a build's or a page's load
    _GROW_EVERY = 10_000_000  # twice the warning's: time to see what a step up has done
    _LONGEST_GAP = 5_000_000  # a longer gap between observations counts as calm only so far

    def __init__(self) -> None:
        self._percent = 100
        self._seen_at: float | None = None  # seconds
        self._since_shrunk = self._WARNING_EVERY  # the first step is due at once
        self._calm = 0  # less what was spent on growing

    @property
    def share(self) -> float:
        """Part of the configured budget that may be used: 0.25 to 1."""
        return self._percent / 100

    def observe(self, level: Pressure, now: float) -> float:
        """Note the pressure at a monotonic time in seconds, every second; return the share."""
        gap = 0 if self._seen_at is None else round((now - self._seen_at) * 1e6)
        gap = max(gap, 0)  # a clock that went back delays what is due
        self._seen_at = now
        self._since_shrunk += gap
        if level == Pressure.NORMAL:
            self._grow(min(gap, self._LONGEST_GAP))
        else:
            self._calm = 0
            self._shrink(critical=level == Pressure.CRITICAL)
        return self.share

    def _shrink(self, *, critical: bool) -> None:
        """Take a step down if one is due: a signal that flaps is no worse than one that lasts."""
        floor = self._LEAST if critical else self._WARNED
        every = self._CRITICAL_EVERY if critical else self._WARNING_EVERY
        if critical and self._percent > self._WARNED:
            smaller = self._WARNED
        elif self._since_shrunk >= every:
            smaller = max(self._percent - self._STEP, floor)
        else:
            return
        if smaller < self._percent:
            self._percent = smaller
            self._since_shrunk = 0

    def _grow(self, gap: int) -> None:
        """Take a step up if it was calm for long enough."""
        self._calm += gap
        if self._calm >= self._CALM and self._percent < 100:  # noqa: PLR2004  (per cent)
            self._percent = min(self._percent + self._STEP, 100)
            self._calm = self._CALM - self._GROW_EVERY
