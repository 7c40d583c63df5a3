"""What the next step computes: a pure function of the running sequences."""

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from .order import Priority
from .sequence import Sequence

_LESS_URGENT = 4096
"""Tokens by which a prompt that nobody sits before counts as longer than it is."""


class PrefillChunk(NamedTuple):
    """A piece of a prompt.

    Attributes:
        sequence: whose prompt advances.
        end: the offset up to which it does, exclusive.
    """

    sequence: Sequence
    end: int

    @property
    def tokens(self) -> int:
        """How many tokens that are."""
        return self.end - self.sequence.num_computed_tokens

    @property
    def completes(self) -> bool:
        """True if the prompt is complete with it, so that its call gives the next token."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True)
class Batch:
    """One step's work: a decode for each of `decode`, and a chunk of a prompt.

    Attributes:
        prefill: the chunk, if a prompt is to be computed.
        decode: the sequences that get a token each.
        coming: how many more will soon: a chunk is left of their prompts at most.
    """

    prefill: PrefillChunk | None
    decode: tuple[Sequence, ...]
    coming: int = 0

    @property
    def empty(self) -> bool:
        """True if there is nothing to compute."""
        return self.prefill is None and not self.decode


class ChunkSize(NamedTuple):
    """How long chunks are, in tokens.

    Attributes:
        most: of a chunk.
        grid: chunks end on its multiples, so that the same prompt is computed in the same chunks,
            whatever was cached.
        completing: of a chunk that completes its prompt, at most: where a model computes the
            logits of all tokens of such a call, they are few.
    """

    most: int
    grid: int = 1
    completing: int = 1 << 62

    def halved(self) -> "ChunkSize":
        """Half of it."""
        return self._replace(most=self.most // 2)


def plan(running: Items[Sequence], size: ChunkSize) -> Batch:
    """Choose the next step's work.

    A prefill chunk also ends on the sequence's chunk boundaries, where a waiting request that
    shares the prompt's beginning parts from it, and at the prompt's end.

    Args:
        running: all that run, oldest first.
        size: of chunks.
    """
    prompts = _by_urgency(running)
    chunk = PrefillChunk(prompts[0], _end(prompts[0], size)) if prompts else None
    decode = tuple(s for s in running if not s.num_left_to_prefill and s.wants_more)
    coming = sum(0 < s.num_left_to_prefill <= size.most for s in running)
    return Batch(chunk, decode, coming)


def _end(sequence: Sequence, size: ChunkSize) -> int:
    start, last = sequence.num_computed_tokens, len(sequence.tokens)
    stops = {*sequence.chunk_boundaries, sequence.num_awaited, last}
    if size.grid > 1:
        stops.add((start // size.grid + 1) * size.grid)
    end = min(offset for offset in stops if offset > start)
    end = min(end, start + size.most)
    return last - size.completing if end == last > start + size.completing else end


def _by_urgency(running: Items[Sequence]) -> list[Sequence]:
    """Put prompts in order: the most urgent of each tenant by its precedence, then the others.

    Of a tenant's, and where tenants are alike, the shortest remaining work goes first, with ageing:
    a prompt counts as shorter by every token by which it was passed over by its tenant's that came
    later; see `age`. One with n tokens left is therefore passed over for n tokens at most by those.
    One of a batch counts as `_LESS_URGENT` tokens longer.
    Where another request waits for its beginning, what is left is what that one waits for.
    """
    by_tenant: dict[str, list[Sequence]] = {}
    prompts = (s for s in running if s.num_left_to_prefill)
    for sequence in sorted(prompts, key=_remaining):
        by_tenant.setdefault(sequence.request.tenant, []).append(sequence)
    first = sorted((own[0] for own in by_tenant.values()), key=lambda s: s.precedence)
    return [*first, *(s for own in by_tenant.values() for s in own[1:])]


def _remaining(sequence: Sequence) -> int:
    more = _LESS_URGENT if sequence.request.priority is Priority.BATCH else 0
    return sequence.num_left_to_share + more - sequence.num_passed_over


def age(running: Items[Sequence], chosen: Sequence, tokens: int) -> None:
    """Count for prompts by how many tokens a call passed them over for later ones of their tenant.

    Args:
        running: all that run, oldest first, as they were when the call was planned.
        chosen: the sequence whose prompt advances.
        tokens: by how many.
    """
    later = Counter[str]()
    for sequence in reversed(running):
        if sequence is chosen:
            later[sequence.request.tenant] += tokens
        elif sequence.num_left_to_prefill:
            sequence.num_passed_over += later[sequence.request.tenant]
