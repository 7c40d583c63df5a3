"""Where cache and model meet: a sequence's state from the cache, and back into it."""

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cachestore.checkpoints import FINAL_AFTER, Reason, decode_due, prompt_offsets
from ..cachestore.node import Tokens, common_length
from ..cachestore.paging.pager import Pager
from ..cachestore.prefix_cache import SHARED, Lease, PrefixCache
from ..cachestore.restoration import Known
from ..cachestore.tries import Namespace
from ..models.runner import ModelRunner
from .paging import Paging
from .sequence import Sequence

if TYPE_CHECKING:
    from ..models.kv.sequence_cache import SequenceCache

_WORTH_WAITING = 32  # tokens of common prompt for which a request waits for another's prefill
_OWN = 2  # checkpoints of its own that a request is left with, however many others wait for it


class Awaited(NamedTuple):
    """The beginning of a prompt that another sequence is computing."""

    publisher: Sequence  # the sequence that computes it
    tokens: int  # how many tokens both begin with


class KVCacheManager:
    """Gives sequences what the cache has for them, and takes what they computed.

    If the cache has a grid, only prefill's whole chunks of it are shared: what they hold does
    not depend on where a prompt goes on, nor on what decoding adds.

    Args:
        interval: distance of the checkpoint grid in prompts, in tokens.
        keeps: without it nothing is captured or kept.
        longest: tokens of a span, about: to publish is to copy, and copies must be short.
        may_capture: says that there is memory for a checkpoint after so many tokens.
        may_store: says that there is memory for a copy of the state of so many tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: PrefixCache,
        *,
        interval: int,
        keeps: bool = True,
        longest: int = 1 << 62,
        may_capture: Callable[[int], bool] = lambda _: True,
        may_store: Callable[[int], bool] = lambda _: True,
        pager: Pager | None = None,
    ) -> None:
        self.caches: dict[Sequence, SequenceCache] = {}  # states of the sequences that run
        self.paging = Paging(pager)  # to and from the disk
        self._runner: Any = runner  # the cache gives back what it got, and that is this model's
        self.cache = cache  # of the model's state
        self._interval = interval
        self._keeps = keeps
        self._longest = longest
        self._may_capture = may_capture
        self._may_store = may_store
        self._splits = cache.tries.splits
        self._captures = self._keeps and cache.layout.checkpoints
        self._grid = cache.grid

    def begin(self, sequence: Sequence) -> None:
        """Lease what is known of the prompt, restore it, and plan the checkpoints."""
        request = sequence.request
        lease = sequence.lease = self.cache.begin(
            Namespace(sequence.request.tenant), sequence.tokens
        )
        self.caches[sequence] = self._runner.open(lease.cached, lease.spans(), lease.checkpoint)
        sequence.num_computed_tokens = sequence.prefill.frontier = lease.cached
        if lease.checkpoint is not None:
            sequence.bill.restored_bytes += lease.checkpoint.nbytes
        if self._captures:
            boundaries = prompt_offsets(
                lease.total,
                cached=lease.cached,
                matched=lease.matched,
                boundaries=request.boundaries,
                interval=self._interval,
                kept=lease.checkpoints_kept,
            )
            sequence.prefill.boundaries = on_grid(boundaries, self._grid, after=lease.cached)

    def awaited(self, sequence: Sequence, running: Iterable[Sequence]) -> Awaited | None:
        """Return the beginning of a prompt that another's prefill is about to bring, if worth it.

        Agents that start together so compute their common prompt once.
        """
        if not self._keeps:
            return None
        others = [
            (self._shared(other, sequence), other)
            for other in running
            if other.num_left_to_prefill and other.request.tenant == sequence.request.tenant
        ]
        shared, other = max(others, key=itemgetter(0), default=(0, sequence))
        if shared < _WORTH_WAITING or shared - self.known(sequence).cached < _WORTH_WAITING:
            return None
        return Awaited(other, shared)

    def publish_early(self, awaited: Awaited) -> None:
        """Ask a running sequence to publish a common prefix before its prompt is complete.

        The shortest of several goes first. A checkpoint is taken there, if the state needs one.
        """
        (publisher, shared), prefill = awaited, awaited.publisher.prefill
        if publisher.is_awaited and shared > prefill.awaited:
            return
        prefill.awaited = shared
        ahead = shared > publisher.num_computed_tokens
        if self._captures and ahead and prefill.boundaries.get(shared) not in SHARED:
            boundaries = prefill.boundaries | {shared: Reason.JUNCTION}
            prefill.boundaries = dict(sorted(boundaries.items()))

    def _shared(self, other: Sequence, sequence: Sequence) -> int:
        """Tokens of a prompt that another's prefill can publish: to a checkpoint if need be."""
        # Only whole tokens before the last are restored of a checkpoint, or of a grid.
        wanted = sequence.tokens[:-1] if self._captures or self._grid > 1 else sequence.tokens
        common = common_length(other.tokens, wanted) // self._grid * self._grid
        if not self._captures or common < _WORTH_WAITING or other.lease is None:
            return common
        computed, lease = other.num_computed_tokens, other.lease
        taken = [(item.checkpoint.offset, item.reason) for item in lease.captured]
        due = [item for item in other.prefill.boundaries.items() if item[0] > computed]
        offsets = [at for at, reason in taken + due if reason in SHARED and at <= common]
        shared = max(offsets, default=0)
        spares = common > computed and common - shared >= _WORTH_WAITING
        return common if spares and lease.checkpoints_kept > _OWN else shared

    def pinned_by(self, tenant: str) -> int:
        """Return the bytes of memory that a tenant's pins hold."""
        return self.cache.pins.held_by(tenant)

    @property
    def writing(self) -> bool:
        """True if state is being written to disk, and can therefore not be evicted yet."""
        return self.paging.writing and self.cache.tries.writing

    def refresh(self, running: Iterable[Sequence]) -> None:
        """Point sequences at the parts of spans that were split since."""
        if self.cache.tries.splits == self._splits:
            return
        self._splits = self.cache.tries.splits
        for sequence in running:
            if (lease := sequence.lease) is not None and sequence in self.caches:
                self._runner.placement.lease(self.caches[sequence], lease.spans())

    def prefilled(self, sequence: Sequence) -> None:
        """Give the prompt's state to the cache, for others to share.

        It goes span by span, as soon as another request waits for it, and the rest when the
        prompt is complete. On a grid only whole chunks are shared.
        """
        lease = sequence.lease
        if lease is None or not self._keeps or sequence.num_computed_tokens <= lease.held:
            return
        offset = sequence.num_computed_tokens
        ends = offset == len(sequence.tokens) // self._grid * self._grid
        full = self.caches[sequence].suffix_length >= self._longest
        awaited = sequence.is_awaited and sequence.prefill.awaited <= offset
        if ends or ((full or awaited) and not offset % self._grid):
            self._publish(sequence, lease)

    def advanced(self, sequence: Sequence) -> None:
        """Capture what is due in an answer, and store its tokens before they are many."""
        self.capture_if_due(sequence)
        lease = sequence.lease
        if lease is None or not self._keeps or self._grid > 1:
            return
        if sequence.num_computed_tokens - lease.reached >= self._longest:
            self._publish(sequence, lease)

    def _publish(self, sequence: Sequence, lease: Lease) -> None:
        placement, cache, tokens = self._runner.placement, self.caches[sequence], sequence.computed
        if self._take_back(lease, cache, tokens):
            lease.publish(tokens, placement.suffix_span(cache))
            placement.lease(cache, lease.spans())
        lease.reached = len(tokens)  # or memory is short, and the next tokens are tried

    def _take_back(self, lease: Lease, cache: "SequenceCache", tokens: Tokens) -> bool:
        """Lease what was given back, and store what was evicted since, except the last piece.

        A piece is as long as a copy may be. False if there is no memory for all of it.
        """
        if lease.held == lease.reached:
            return True
        placement, longest = self._runner.placement, self._longest
        lease.extend(tokens)
        placement.lease(cache, lease.spans())
        while len(tokens) - lease.held > longest and self._may_store(longest):
            span = placement.suffix_span(cache, longest)
            lease.publish(tokens[: lease.held + longest], span)
            placement.lease(cache, lease.spans())
        return len(tokens) - lease.held <= longest

    def give_copies_back(self) -> bool:
        """Give back leases on state that rows have copied, if any: it may be evicted then."""
        given = False
        for sequence, cache in self.caches.items() if self._grid == 1 else ():
            lease, begin = sequence.lease, self._runner.placement.own_begin(cache)
            if lease is not None and begin < (held := lease.held):
                lease.shorten(begin)
                self._runner.placement.lease(cache, lease.spans())
                given |= lease.held < held
        return given

    def capture_if_due(self, sequence: Sequence) -> None:
        """Capture a checkpoint if one is due where the sequence stands now."""
        offset, prefill = sequence.num_computed_tokens, sequence.prefill
        answered = offset - max(prefill.frontier, sequence.num_prompt_tokens - 1)
        if (reason := prefill.boundaries.get(offset)) is not None:
            prefill.frontier = offset
            self._capture(sequence, reason)
        elif self._captures and self._grid == 1 and decode_due(answered):
            self._capture(sequence, Reason.DECODE)

    @staticmethod
    def drop_one_checkpoint(running: Iterable[Sequence]) -> bool:
        """Do without a checkpoint of a running sequence; False if none has one."""
        return any(s.lease is not None and s.lease.drop_one_checkpoint() for s in running)

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Close the lease; keep what was computed unless it cannot be trusted."""
        lease = sequence.lease
        if lease is None:
            return
        kept = keep and self._keeps
        if kept:
            request, tokens = sequence.request, sequence.computed
            self._hand_over(sequence, lease, tokens)
            self.cache.pins.remember(request.tenant, request.conversation, tokens)
        try:
            cache = self.caches.pop(sequence, None)
            if cache is not None:
                self._runner.placement.close(cache)
        finally:
            if not kept:  # last: what it leases may lie in the sequence's own caches
                lease.close()

    def _hand_over(self, sequence: Sequence, lease: Lease, tokens: Tokens) -> None:
        if self._grid > 1:
            lease.close(tokens[: lease.held] if lease.held else None)
            return
        offset = sequence.num_computed_tokens
        taken = any(item.checkpoint.offset == offset for item in lease.captured)
        if self._captures and offset - sequence.prefill.frontier >= FINAL_AFTER and not taken:
            self._capture(sequence, Reason.FINAL)
        cache = self.caches[sequence]
        if self._take_back(lease, cache, tokens):
            lease.close(tokens, self._runner.placement.suffix_span(cache))
        else:
            lease.close(tokens[: lease.held])

    def known(self, sequence: Sequence) -> Known:
        """How much of a sequence is in the cache. Refreshes nothing."""
        return self.cache.known(Namespace(sequence.request.tenant), sequence.tokens)

    def _capture(self, sequence: Sequence, reason: Reason) -> None:
        if sequence.lease is not None and self._may_capture(sequence.num_computed_tokens):
            checkpoint = self._runner.placement.capture(self.caches[sequence])
            sequence.lease.capture(checkpoint, reason)


def on_grid(boundaries: dict[int, Reason], grid: int, *, after: int) -> dict[int, Reason]:
    """Move boundaries back to multiples of `grid`; of those that meet, the first one's reason."""
    moved: dict[int, Reason] = {}
    for offset, reason in boundaries.items():
        if offset // grid * grid > after:
            moved.setdefault(offset // grid * grid, reason)
    return moved
