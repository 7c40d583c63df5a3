"""What a request waits for or does, and for how long it has."""

import enum


class Activity(enum.StrEnum):
    """What a request waits for, or what is done for it; it is in one of them at a time."""

    CONVERSATION = "conversation"
    """It waits for others of its conversation, or of its session."""
    TENANT = "tenant"
    """As many requests of its tenant run as may."""
    QUOTA = "quota"
    """Its tenant has spent its tokens of this minute."""
    SLOT = "slot"
    """As many requests run as may, or others start before it."""
    MEMORY = "memory"
    """There is no room for its state beside those that run."""
    DISK = "disk"
    """Its state is being read from disk."""
    PREFIX = "prefix"
    """Another request computes what both begin with."""
    PREFILL = "prefill"
    """Its prompt is computed."""
    DECODE = "decode"
    """Its answer is computed."""

    @property
    def is_wait(self) -> bool:
        """Whether nothing is computed for it."""
        return self not in {Activity.PREFILL, Activity.DECODE}


class Times:
    """What a request does at present, since when, and how long it did what before.

    Attributes:
        activity: at present.

    Args:
        activity: at first.
        now: the present time, in seconds, as everywhere here.
    """

    def __init__(self, activity: Activity, now: float) -> None:
        self.activity = activity
        self._since = now
        self._seconds: dict[Activity, float] = {}

    def note(self, activity: Activity, now: float) -> None:
        """Say what it does from now on."""
        if activity is not self.activity:
            passed = now - self._since
            self._seconds[self.activity] = self._seconds.get(self.activity, 0.0) + passed
            self.activity, self._since = activity, now

    def seconds(self, now: float) -> dict[Activity, float]:
        """Seconds of each, until now."""
        found = dict(self._seconds)
        found[self.activity] = found.get(self.activity, 0.0) + now - self._since
        return found

    def longest_wait(self, now: float) -> tuple[Activity, float] | None:
        """What it waited for longest, and for how many seconds; None if it never waited."""
        waits = [(s, activity) for activity, s in self.seconds(now).items() if activity.is_wait]
        seconds, activity = max(waits, default=(0.0, None))
        return None if activity is None else (activity, seconds)
