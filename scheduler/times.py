"""What a request waits for or does, and for how long it has."""

import enum
from collections.abc import Mapping


class Activity(enum.StrEnum):
    """What a request waits for, or what is done for it; it is in one of them at a time."""

    TOKENIZE = "tokenize"
    """Its body is decoded, and its prompt rendered and tokenised, or waits for that."""
    MODEL = "model"
    """Its model is being loaded."""
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


class _Period:
    """A time in which the requests of a `CommonWait` wait for one thing.

    Attributes:
        end: when it ended, and the seconds of each until then; None while it lasts.
    """

    def __init__(self) -> None:
        self.end: tuple[float, dict[Activity, float]] | None = None


class CommonWait:
    """What several requests wait for alike, and how long they waited for what.

    A change of it takes no longer the more they are: the `Times` of each reads it when asked.

    Attributes:
        activity: at present.
        period: for which it is that.

    Args:
        activity: at first.
        now: the present time, in seconds.
    """

    def __init__(self, activity: Activity, now: float) -> None:
        self.activity, self.period = activity, _Period()
        self._since = now
        self._seconds: dict[Activity, float] = {}

    def note(self, activity: Activity, now: float) -> None:
        """Say what they wait for from now on."""
        if activity is not self.activity:
            self._seconds = self.seconds(now)
            self.period.end = now, self._seconds
            self.activity, self.period, self._since = activity, _Period(), now

    def seconds(self, now: float) -> dict[Activity, float]:
        """Seconds of each since the first of them came, until now."""
        found = dict(self._seconds)
        _add(found, self.activity, now - self._since)
        return found


class Times:
    """What a request does at present, since when, and how long it did what before.

    That is its own, or what it has in common with others that wait.

    Args:
        activity: at first.
        now: the present time, in seconds, as everywhere here.
        before: seconds of what it did until now.
    """

    def __init__(
        self, activity: Activity, now: float, before: Mapping[Activity, float] | None = None
    ) -> None:
        self._activity = activity
        self._since = now
        self._seconds = dict(before or {})  # until then
        self._common: CommonWait | None = None
        self._before: dict[Activity, float] = {}  # of the common ones, until then
        self._period: _Period | None = None  # of the common ones, while its own activity counts

    @property
    def activity(self) -> Activity:
        """At present."""
        if self._common is None or self._common.period is self._period:
            return self._activity
        return self._common.activity

    def note(self, activity: Activity, now: float) -> None:
        """Say what it does by itself from now on."""
        if self._common is not None or activity is not self._activity:
            self._settle(now)
            self._activity, self._common, self._period = activity, None, None

    def share(self, common: CommonWait, now: float) -> None:
        """Say that it waits for what others do from now on, whatever that is. Idempotent."""
        if self._common is not common:
            self._settle(now)
            self._common, self._before, self._period = common, common.seconds(now), None

    def differ(self, activity: Activity, now: float) -> None:
        """Say what it waits for instead of what others do, until they wait for something else."""
        if self._common is not None and activity is not self.activity:
            self._settle(now)
            self._activity, self._period = activity, self._common.period

    def seconds(self, now: float) -> dict[Activity, float]:
        """Seconds of each, until now."""
        found, before = dict(self._seconds), self._before
        end = None if self._period is None else self._period.end
        differs = self._common is None or self._period is not None
        if differs:
            _add(found, self._activity, (end[0] if end else now) - self._since)
        if end is not None:
            before = end[1]
        if self._common is not None and (end is not None or not differs):
            for activity, total in self._common.seconds(now).items():
                if total != before.get(activity, 0.0):
                    _add(found, activity, total - before.get(activity, 0.0))
        found.setdefault(self.activity, 0.0)
        return found

    def snapshot(self, now: float) -> "Times":
        """Take what it is now, which changes no more but for the time that passes."""
        return Times(self.activity, now, self.seconds(now))

    def longest_wait(self, now: float) -> tuple[Activity, float] | None:
        """What it waited for longest, and for how many seconds; None if it never waited."""
        waits = [(s, activity) for activity, s in self.seconds(now).items() if activity.is_wait]
        seconds, activity = max(waits, default=(0.0, None))
        return None if activity is None else (activity, seconds)

    def _settle(self, now: float) -> None:
        """Enter what passed; for what it has in common that is counted from now on."""
        self._seconds, self._since = self.seconds(now), now
        if self._common is not None:
            self._before = self._common.seconds(now)


def _add(seconds: dict[Activity, float], activity: Activity, passed: float) -> None:
    seconds[activity] = seconds.get(activity, 0.0) + passed
