"""Policies, as pure functions: the work of the next step, whose prompt advances, who yields."""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType
from typing import NamedTuple

from .order import Priority
from .sequence import Sequence
from .tenants import Share

# tokens per weight by which a tenant's prompts may be behind those of tenants with fewer slots
LAG = 512

NO_PRECEDENCE: Mapping[str, float] = MappingProxyType({})  # all tenants are alike

_LESS_URGENT = 4096  # tokens by which a prompt of priority `batch` counts as longer than it is


class Call(NamedTuple):
    """One call of the model."""

    sequences: tuple[Sequence, ...]  # each gets a token, or the one's prompt advances
    end: int | None = None  # offset to which the prompt advances, exclusive; None for a decode

    @property
    def tokens(self) -> int:
        """Number of tokens of each sequence."""
        return 1 if self.end is None else self.end - self.sequences[0].num_computed_tokens

    @property
    def completes(self) -> bool:
        """True for the last chunk of a prompt: its call gives the next token."""
        return self.end == len(self.sequences[0].tokens)


class Batch(NamedTuple):
    """One step's work."""

    decode: Call | None = None  # a token for each sequence that is past its prompt, or None
    prefill: Call | None = None  # a chunk of a prompt, or None
    coming: int = 0  # further sequences that decode soon: a chunk is left of their prompts

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls, in order."""
        return tuple(call for call in (self.decode, self.prefill) if call is not None)


class ChunkSize(NamedTuple):
    """The length of chunks, in tokens."""

    most: int  # of a chunk
    grid: int = 1  # chunks end on its multiples: they are the same whatever was cached
    completing: int = 1 << 62  # of a chunk that completes its prompt, at most, as all have logits


def plan(
    running: Items[Sequence], size: ChunkSize, precedence: Mapping[str, float] = NO_PRECEDENCE
) -> Batch:
    """Choose the next step's work: a decode for each sequence past its prompt, and one chunk.

    A chunk also ends on the sequence's boundaries, where a waiting request that shares the
    prompt's beginning parts from it, and at the prompt's end.

    Args:
        running: sequences, oldest first.
        size: of chunks.
        precedence: of tenants' prompts, the lower the earlier; see `PrefillShares`.
    """
    prompt = most_urgent(running, precedence)
    decode = tuple(s for s in running if not s.num_left_to_prefill and s.wants_more)
    return Batch(
        Call(decode) if decode else None,
        None if prompt is None else Call((prompt,), _end(prompt, size)),
        sum(0 < s.num_left_to_prefill <= size.most for s in running),
    )


def _end(sequence: Sequence, size: ChunkSize) -> int:
    start, last = sequence.num_computed_tokens, len(sequence.tokens)
    stops = {*sequence.prefill.boundaries, sequence.prefill.awaited, last}
    if size.grid > 1:
        stops.add((start // size.grid + 1) * size.grid)
    end = min(offset for offset in stops if offset > start)
    end = min(end, start + size.most)
    return last - size.completing if end == last > start + size.completing else end


def most_urgent(running: Iterable[Sequence], precedence: Mapping[str, float]) -> Sequence | None:
    """Choose the prompt that advances: the most urgent one of the tenant that comes first.

    Within a tenant, and among tenants that are alike, the shortest remaining work goes first, with
    ageing: a prompt counts as shorter by every token by which later ones of its tenant passed it
    over. So one with n tokens left is passed over for n tokens at most. If another request waits
    for its beginning, what is left is what that one waits for.
    """
    prompts = (s for s in running if s.num_left_to_prefill)
    return min(
        prompts, key=lambda s: (precedence.get(s.request.tenant, 0.0), _remaining(s)), default=None
    )


def _remaining(sequence: Sequence) -> int:
    more = _LESS_URGENT if sequence.request.priority is Priority.BATCH else 0
    return sequence.num_left_to_share + more - sequence.prefill.passed_over


def age(running: Items[Sequence], chosen: Sequence, tokens: int) -> None:
    """Age the older prompts of a tenant by a chunk of a later one, before that advances."""
    for sequence in running[: running.index(chosen)]:
        if sequence.num_left_to_prefill and sequence.request.tenant == chosen.request.tenant:
            sequence.prefill.passed_over += tokens


def precedence(slots: int, weight: float, lag: float) -> float:
    """Say when a tenant's prompts are computed among other tenants'; the lower, the earlier.

    The tenant with the fewest slots for its weight goes first: a newcomer beside a tenant that
    fills the batch does not wait for that one's prompts. Before all go tenants that are behind by
    `LAG` tokens per weight, the furthest behind first: others compute only their part meanwhile.
    """
    return -lag if lag >= LAG else slots / weight


class PrefillShares:
    """Counts the prompt tokens that tenants are owed.

    Each computed token is owed to all tenants that have prompts, by their weights, and paid to the
    one that it was computed for. A tenant starts at nothing when its first prompt comes, and is
    forgotten with its last: time without prompts earns nothing. Tokens that are computed for a
    tenant while no other has prompts pay what it is owed.
    """

    def __init__(self) -> None:
        self._owed: dict[str, float] = {}

    def precedence(
        self, running: Iterable[Sequence], weights: Mapping[str, float]
    ) -> dict[str, float]:
        """Say whose prompts come first. The weights are of tenants that have prompts."""
        self._owed = {tenant: self._owed.get(tenant, 0.0) for tenant in weights}
        slots = Counter(sequence.request.tenant for sequence in running)
        return {
            tenant: precedence(slots[tenant], weight, self._owed[tenant] / weight)
            for tenant, weight in weights.items()
        }

    def charge(self, tenant: str, tokens: int, weights: Mapping[str, float]) -> None:
        """Enter tokens that were computed for one of the tenants that had prompts."""
        a_weight = tokens / sum(weights.values())
        for each, weight in weights.items():
            owed = self._owed.get(each, 0.0) - tokens * (each == tenant)
            is_alone = len(weights) == 1
            self._owed[each] = max(0.0, owed) if is_alone else owed + a_weight * weight


class Slot(NamedTuple):
    """A running sequence."""

    id: str  # of its request
    share: Share  # of its tenant
    decodes: bool  # its prompt is complete
    priority: Priority = Priority.INTERACTIVE  # of its request
    conversation: str = ""  # its unit, in which it would wait before what came later
    is_due: bool = False  # it started because others of its tenant had passed it over for long

    @property
    def gives_way(self) -> bool:
        """True if it yields to an interactive request of its own tenant; not if it was due."""
        return self.decodes and self.priority is Priority.BATCH and not self.is_due


def preemption(slots: Items[Slot], claimant: Share, gap: float) -> Slot | None:
    """Choose the sequence that yields its slot to a tenant that waits.

    A tenant's part of the slots is as its weight among those that have slots or claim one. It is
    the youngest sequence of the most served tenant that has more slots than the claimant for its
    weight, if

    - the claimant has fewer slots than its part, and the tenant more than its own; or
    - the tenant was served more than the claimant by over `gap` tokens per weight.

    Neither goes to and fro: the first leaves both with their part, and for the second the gap is
    two quanta at least, so that the claimant is served the difference before the sequence comes
    back.

    A sequence whose prompt is incomplete yields for the first reason only, and if no complete one
    can: what was computed of it is in the cache when it starts again.
    """
    held = Counter(slot.share.tenant for slot in slots)
    weights = {slot.share.tenant: slot.share.weight for slot in slots}
    weights[claimant.tenant] = claimant.weight
    a_weight = len(slots) / sum(weights.values())
    own = held[claimant.tenant]
    lacks = own + 1 <= max(1.0, a_weight * claimant.weight)

    def gives(slot: Slot) -> bool:
        share, slots_held = slot.share, held[slot.share.tenant]
        if lacks and share.tenant != claimant.tenant and slots_held - 1 >= a_weight * share.weight:
            return True
        larger = slots_held * claimant.weight > own * share.weight
        return slot.decodes and larger and share.service - claimant.service > gap

    giving = [slot for slot in reversed(slots) if gives(slot)]
    return max(giving, key=lambda slot: (slot.decodes, slot.share.service), default=None)


def own_preemption(slots: Items[Slot], claimant: Share, conversation: str) -> Slot | None:
    """Choose the sequence that yields its slot to an interactive request of its own tenant.

    It is the tenant's youngest one of priority `batch` that decodes. It starts again when no
    interactive request of its tenant could, or when it is due; then it keeps its slot. One of the
    same conversation does not yield: it would wait before the request that it yielded to.
    """
    for slot in reversed(slots):
        own = slot.share.tenant == claimant.tenant and slot.conversation != conversation
        if own and slot.gives_way:
            return slot
    return None
