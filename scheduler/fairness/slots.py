"""Which running sequence gives up its slot when the batch is full: a pure function."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


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
    """

    id: str
    share: Share
    decodes: bool


def preemption(slots: Sequence[Slot], claimant: Share, gap: float) -> Slot | None:
    """Choose the sequence that is preempted at a step's border for a tenant that waits.

    It is the youngest one of the most served tenant, where that was served more than the claimant
    by over `gap` tokens per weight and has the larger part of the slots for its weight.

    A preempted sequence starts again when its tenant has credit: when it is no more than a
    quantum ahead of the least served. With `gap` well over the quantum, the claimant is therefore
    served the difference before the sequence comes back, and the tenant again before it is
    preempted anew. A sequence whose prompt is incomplete is never preempted, so that
    each start brings a request nearer to its end.

    Args:
        slots: of the batch, the oldest first.
        claimant: the least served tenant of those that could start a request.
        gap: between services, in tokens per weight; at least two quanta.
    """
    held = Counter(slot.share.tenant for slot in slots)
    own = held[claimant.tenant] / claimant.weight
    chosen: Slot | None = None
    for slot in slots:
        share = slot.share
        ahead = share.service - claimant.service > gap
        larger = held[share.tenant] / share.weight > own
        most = chosen is None or share.service >= chosen.share.service
        if slot.decodes and ahead and larger and most:
            chosen = slot
    return chosen
