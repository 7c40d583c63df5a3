"""What each of those that wait waits for, and for how long: a few notes at each change."""

from collections.abc import Callable, Mapping

from .fairness.order import FairOrder
from .request import entry_of
from .sequence import Sequence, SequenceStatus
from .times import Activity, CommonWait, Times


class WaitTimes:
    """Notes with the sequences of a queue what they wait for. For who has its lock.

    What a tenant's have in common that are next in their conversations is noted once.

    Args:
        order: knows which these are, and who may start.
        waiting: those that wait, by their ids; it changes.
        clock: seconds, monotonic.
    """

    def __init__(
        self, order: FairOrder, waiting: Mapping[str, Sequence], clock: Callable[[], float]
    ) -> None:
        self._order = order
        self._waiting = waiting
        self._clock = clock
        self._next: dict[str, CommonWait] = {}  # of who is next in a conversation, by tenant

    def __len__(self) -> int:
        return len(self._next)

    def enter(self, sequence: Sequence) -> None:
        """Begin to note what a sequence waits for, which order and waiting know already."""
        tenant = sequence.request.tenant
        activity, now = self._waits_for(tenant), self._clock()
        self._next.setdefault(tenant, CommonWait(activity, now)).note(activity, now)
        self.note_waiting(sequence)

    def leave(self, sequence: Sequence, *, last: bool) -> None:
        """Have a sequence wait no more, which order and waiting know already.

        Args:
            sequence: as above.
            last: whether nothing of its tenant waits any more.
        """
        if sequence.times is not None:  # what others wait for is not its own any more
            sequence.note(sequence.times.activity, self._clock())
        if last:
            del self._next[sequence.request.tenant]
        self.note_next(sequence)

    def note_found(self, sequence: Sequence, activity: Activity) -> None:
        """Note what a sequence waits for that was looked at and did not start."""
        if sequence.times and self._could_start(sequence):
            sequence.times.differ(activity, self._clock())

    def note_next(self, sequence: Sequence) -> None:
        """Note what those wait for to whom a sequence's start or end makes a difference."""
        entry = entry_of(sequence.request)
        self.note_tenant(entry.tenant)
        if head := self._order.head(entry.tenant, entry.conversation):
            self.note_waiting(self._waiting[head])

    def note_tenant(self, tenant: str) -> None:
        """Note what those of a tenant wait for that are next in their conversations."""
        if tenant in self._next:
            self._next[tenant].note(self._waits_for(tenant), self._clock())

    def note_waiting(self, sequence: Sequence) -> None:
        """Note whether one that waits is next in its conversation, and what it waits for."""
        entry, now = entry_of(sequence.request), self._clock()
        others = self._next[entry.tenant]
        behind = self._order.head(entry.tenant, entry.conversation) != entry.id
        if sequence.times is None:
            first = Activity.CONVERSATION if behind else others.activity
            sequence.times = Times(first, now, sequence.request.before)
        if behind:
            sequence.note(Activity.CONVERSATION, now)
        else:
            sequence.times.share(others, now)

    def _waits_for(self, tenant: str) -> Activity:
        """What those of a tenant wait for that are next in their conversations."""
        if tenant in self._order.held:
            return Activity.QUOTA
        return Activity.SLOT if self._order.may_start(tenant) else Activity.TENANT

    def _could_start(self, sequence: Sequence) -> bool:
        """Whether a sequence could start, as far as its tenant goes."""
        name, tenant = sequence.request.id, sequence.request.tenant
        activity = self._waits_for(tenant) if name in self._waiting else None
        resumes = sequence.status is SequenceStatus.PREEMPTED
        return activity is Activity.SLOT or (activity is Activity.QUOTA and resumes)
