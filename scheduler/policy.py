"""The work of the next step: pure functions of the running sequences, and what tenants are owed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType
from typing import NamedTuple

from .order import Priority
from .sequence import Sequence

LAG = 512
"""Tokens per weight by which a tenant's prompts may be behind those of tenants with fewer slots."""

NO_PRECEDENCE: Mapping[str, float] = MappingProxyType({})
"""All tenants are alike."""

_LESS_URGENT = 4096
"""Tokens by which a prompt of priority `batch` counts as longer than it is."""


class Call(NamedTuple):
    """One call of the model."""

    # that take part: each gets a token, or the one's prompt advances
    sequences: tuple[Sequence, ...]
    # the offset up to which the prompt advances, exclusive; None for a decode
    end: int | None = None

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
    # number of further sequences that will soon decode: a chunk is left of their prompts
    coming: int = 0

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls, in order."""
        return tuple(call for call in (self.decode, self.prefill) if call is not None)


class ChunkSize(NamedTuple):
    """The length of chunks, in tokens."""

    most: int  # of a chunk
    # chunks end on its multiples, so that the same prompt is computed in the same chunks, whatever
    # was cached
    grid: int = 1
    # of a chunk that completes its prompt, at most: a model that computes the logits of all tokens
    # of such a call needs it short
    completing: int = 1 << 62

    def halved(self) -> "ChunkSize":
        """Half of it."""
        return self._replace(most=self.most // 2)


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
    over; see `age`. So one with n tokens left is passed over for n tokens at most. A prompt of
    priority `batch` counts as `_LESS_URGENT` tokens longer. If another request waits for its
    beginning, what is left is what that one waits for.
    """
    prompts = (s for s in running if s.num_left_to_prefill)
    return min(
        prompts, key=lambda s: (precedence.get(s.request.tenant, 0.0), _remaining(s)), default=None
    )


def _remaining(sequence: Sequence) -> int:
    more = _LESS_URGENT if sequence.request.priority is Priority.BATCH else 0
    return sequence.num_left_to_share + more - sequence.prefill.passed_over


def age(running: Items[Sequence], chosen: Sequence, tokens: int) -> None:
    """Count the tokens of a chunk by which a prompt passed others over, of its tenant and older.

    The running sequences are as they were when the call was planned, oldest first.
    """
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
