"""What the next step computes: a pure function of the running sequences."""

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from .order import Priority
from .sequence import Sequence

_TOGETHER = 1024
"""Tokens of a call of several prompts, each as long as the longest: each brings work after the
call, too."""
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


@dataclass(frozen=True)
class Batch:
    """One step's work: a decode for each of `decode`, and chunks of prompts in one call.

    Attributes:
        prefill: the chunks, the most urgent first.
        decode: the sequences that get a token each.
        coming: how many more will soon: a chunk is left of their prompts at most.
    """

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[Sequence, ...]
    coming: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.prefill and not self.decode


Joins = Callable[[Items[int], int], bool]
"""Whether a chunk of so many tokens is best computed in one call with others of these lengths."""


class ChunkSize(NamedTuple):
    """How long chunks are, in tokens.

    Attributes:
        most: of a call, padding included.
        last: of a chunk that completes its prompt, where that is more: a short rest would take a
            call of its own.
        grid: chunks end on its multiples, so that the same prompt is computed in the same chunks,
            whatever was cached.
    """

    most: int
    last: int = 0
    grid: int = 1

    def halved(self) -> "ChunkSize":
        """Half of it."""
        return ChunkSize(self.most // 2, 0, self.grid)


def plan(
    running: Items[Sequence],
    size: ChunkSize,
    joins: Joins | None = None,
) -> Batch:
    """Choose the next step's work.

    Prefill chunks also end on the sequence's chunk boundaries and where another request parts
    from it that waits, and the last one before the last prompt token.

    Args:
        running: all that run, oldest first.
        size: of chunks.
        joins: where several prompts may advance in one call, which do: see `StallBound.joins`.
            They are rows as long as the longest.
    """
    prompts = _by_urgency(running)
    decode = tuple(s for s in running if not s.num_left_to_prefill and s.wants_more)
    chosen = [PrefillChunk(s, _end(s, size)) for s in prompts[:1]]
    if chosen and joins is not None and not chosen[0].sequence.is_alone:
        lengths = [chosen[0].tokens]
        for sequence in prompts[1:]:
            chunk = PrefillChunk(sequence, _end(sequence, size))
            fits = (len(chosen) + 1) * max(*lengths, chunk.tokens) <= min(size.most, _TOGETHER)
            if fits and not sequence.is_alone and joins(lengths, chunk.tokens):
                chosen.append(chunk)
                lengths.append(chunk.tokens)
    coming = sum(0 < s.num_left_to_prefill <= max(size.most, size.last) for s in running)
    return Batch(tuple(chosen), decode, coming)


def _end(sequence: Sequence, size: ChunkSize) -> int:
    start, last = sequence.num_computed_tokens, len(sequence.tokens) - 1
    stops = {*sequence.chunk_boundaries, sequence.num_awaited, last}
    if size.grid > 1:
        stops.add((start // size.grid + 1) * size.grid)
    end = min(offset for offset in stops if offset > start)
    most = max(size.most, size.last) if end == last else size.most
    return end if end - start <= most else start + size.most


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


def age(running: Items[Sequence], chosen: Mapping[Sequence, int]) -> None:
    """Count for prompts by how many tokens a call passed them over for later ones of their tenant.

    Args:
        running: all that run, oldest first, as they were when the call was planned.
        chosen: those that advance, and by how many tokens.
    """
    later = Counter[str]()
    for sequence in reversed(running):
        if sequence in chosen:
            later[sequence.request.tenant] += chosen[sequence]
        elif sequence.num_left_to_prefill:
            sequence.num_passed_over += later[sequence.request.tenant]
