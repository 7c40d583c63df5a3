"""Which running sequence gives up its slot when the batch is full: pure functions."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .order import Priority


class Share(NamedTuple):
    """What a tenant was given.

    Attributes:
        tenant: its name.
        service: tokens per weight that it was charged, lifts included.
        weight: its share, positive.
    """

    tenant: str
    service: float
    weight: float = 1.0


class Slot(NamedTuple):
    """A running sequence.

    Attributes:
        id: of its request.
        share: its tenant's.
        decodes: whether its prompt is complete.
        priority: of its request.
        conversation: of its request, in which it would wait before what came later.
        is_due: it started because others of its tenant had passed it over for long.
    """

    id: str
    share: Share
    decodes: bool
    priority: Priority = Priority.INTERACTIVE
    conversation: str = ""
    is_due: bool = False

    @property
    def gives_way(self) -> bool:
        """Whether it yields to an interactive request of its own tenant.

        What started as due does not: it would start for nothing, and be passed over for ever.
        """
        return self.decodes and self.priority is Priority.BATCH and not self.is_due


def preemption(slots: Sequence[Slot], claimant: Share, gap: float) -> Slot | None:
    """Choose the sequence that is preempted at a step's border for a tenant that waits.

    A tenant's part of the slots is as its weight among those that have slots or claim one. It is
    the youngest sequence of the most served tenant that has more slots than the claimant for its
    weight, where

    - the claimant has fewer slots than its part, and the tenant more than its own: who comes is
      served at once, however long others' answers are; or
    - the tenant was served more than the claimant by over `gap` tokens per weight.

    Neither goes to and fro. A slot that was taken for the first reason leaves both with their part
    at least, or at most. For the second, a preempted sequence starts again when its tenant is
    less than a quantum ahead of the least served: with `gap` well over the quantum
    the claimant is served the difference before the sequence comes back, and the tenant again
    before it is preempted anew.

    A sequence whose prompt is incomplete is preempted for the first reason only, and where no
    complete one can be: what was computed of it is in the cache when it starts again.

    Args:
        slots: of the batch, the oldest first.
        claimant: a tenant that could start a request.
        gap: between services, in tokens per weight; at least two quanta.
    """
    parts = _Parts(slots, claimant)
    chosen: Slot | None = None
    for slot in slots:
        spread = parts.lets(slot.share)
        ahead = slot.share.service - claimant.service > gap and parts.larger(slot.share)
        if not (spread or (ahead and slot.decodes)):
            continue
        if chosen is None or _rank(slot) >= _rank(chosen):
            chosen = slot
    return chosen


def own_preemption(slots: Sequence[Slot], claimant: Share, conversation: str) -> Slot | None:
    """Choose the sequence that is preempted for an interactive request of its own tenant.

    It is the tenant's youngest one of priority `batch` that decodes: each start brings a request
    nearer to its end. How many slots tenants have stays as it is, so that nothing is asked of their
    services. The preempted sequence starts again when no interactive request of its tenant could,
    or when so many have started before it that it is due; then it keeps its slot, so that none goes
    to and fro. One of the same conversation does not yield: it would wait before the request that
    it yielded to.

    Args:
        slots: of the batch, the oldest first.
        claimant: a tenant that could start an interactive request if it had a slot more.
        conversation: of that request.
    """
    for slot in reversed(slots):
        own = slot.share.tenant == claimant.tenant and slot.conversation != conversation
        if own and slot.gives_way:
            return slot
    return None


def _rank(slot: Slot) -> tuple[bool, float]:
    return slot.decodes, slot.share.service


class _Parts:
    """Who has how many slots, and who may have how many."""

    def __init__(self, slots: Sequence[Slot], claimant: Share) -> None:
        self._held = Counter(slot.share.tenant for slot in slots)
        self._claimant = claimant
        weights = {slot.share.tenant: slot.share.weight for slot in slots}
        weights[claimant.tenant] = claimant.weight
        self._a_weight = len(slots) / sum(weights.values())

    def lets(self, share: Share) -> bool:
        """Whether a slot of a tenant belongs to the claimant by their weights."""
        claimed = self._held[self._claimant.tenant] + 1
        left = self._held[share.tenant] - 1
        return (
            share.tenant != self._claimant.tenant
            and claimed <= max(1.0, self._a_weight * self._claimant.weight)
            and left >= self._a_weight * share.weight
        )

    def larger(self, share: Share) -> bool:
        """Whether a tenant has more slots than the claimant, for its weight."""
        claimant = self._claimant
        return (
            self._held[share.tenant] * claimant.weight > self._held[claimant.tenant] * share.weight
        )
