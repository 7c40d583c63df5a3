"""A request's activity: what it waits for, or what is computed for it, and for how long."""

import enum
from collections.abc import Mapping
from typing import NamedTuple


class Activity(enum.StrEnum):
    """A wait of a request, or a computation for it; one at a time."""

    TOKENIZE = "tokenize"  # its body is decoded, and its prompt rendered and tokenised
    MODEL = "model"  # its model is being loaded
    CONVERSATION = "conversation"  # others of its conversation, or of its session, run
    TENANT = "tenant"  # as many requests of its tenant run as may
    QUOTA = "quota"  # its tenant has spent its tokens of this minute
    SLOT = "slot"  # as many requests run as may, or others start before it
    MEMORY = "memory"  # there is no room for its state beside those that run
    DISK = "disk"  # its state is being read from disk
    PREFIX = "prefix"  # another request computes what both begin with
    PREFILL = "prefill"  # its prompt is computed
    DECODE = "decode"  # its answer is computed

    @property
    def is_wait(self) -> bool:
        """True if nothing is computed for the request."""
        return self not in {Activity.PREFILL, Activity.DECODE}


class _State(NamedTuple):
    """The present activity, since when, and the seconds of each activity until then."""

    activity: Activity
    since: float
    seconds: Mapping[Activity, float]


class Times:
    """A request's activities. One thread at a time notes; any thread may read."""

    def __init__(
        self, activity: Activity, now: float, before: Mapping[Activity, float] | None = None
    ) -> None:
        self._state = _State(activity, now, before or {})
        # bytes that it lacked when memory was short for it, and those that may be used
        self.needs: tuple[int, int] | None = None

    @property
    def activity(self) -> Activity:
        """The present activity."""
        return self._state.activity

    def note(self, activity: Activity, now: float) -> None:
        """Change the activity, if it is another one."""
        if activity is not self._state.activity:
            self._state = _State(activity, now, self.seconds(now))

    def seconds(self, now: float) -> dict[Activity, float]:
        """Return the seconds of each activity until now."""
        activity, since, seconds = self._state
        return {**seconds, activity: seconds.get(activity, 0.0) + now - since}

    def longest_wait(self, now: float) -> tuple[Activity, float] | None:
        """Return the activity that the request waited for longest, and its seconds."""
        waits = [(s, activity) for activity, s in self.seconds(now).items() if activity.is_wait]
        seconds, activity = max(waits, default=(0.0, None))
        return None if activity is None else (activity, seconds)
