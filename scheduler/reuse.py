"""Where cache and model meet: a sequence's state from the cache, and back into it."""

from typing import Any, Protocol

from ..cachestore.checkpoints import FINAL_AFTER, Reason, decode_due, prompt_offsets
from ..cachestore.prefix_cache import CacheStatistics, Namespace, PrefixCache
from ..cachestore.state import Checkpoint, Span
from ..cachestore.trie import as_tokens
from .sequence import Sequence


class LiveStates(Protocol):
    """A running sequence's state; `models.layer_states.LiveStates` is the real one."""

    def capture(self) -> Checkpoint:
        """Copy the whole-state layers at the present offset."""
        ...

    def seal(self) -> Span | None:
        """Pack the token-addressable state computed since the start; None without any."""
        ...


class Opener(Protocol):
    """What makes states live; `models.forward.Forward` is the real one."""

    def open(self, offset: int, spans: Any, checkpoint: Any) -> Any:
        """Make the state of a sequence that resumes at `offset`."""
        ...


class PrefixReuse:
    """Gives sequences what the cache has for them, and takes what they computed.

    Args:
        opener: the model.
        cache: of the model's state. With a budget of 0 nothing is captured or kept.
        fingerprint: of the model.
        interval: distance of the checkpoint grid in prompts, in tokens.
    """

    def __init__(
        self, opener: Opener, cache: PrefixCache, *, fingerprint: str, interval: int
    ) -> None:
        self._opener = opener
        self._cache = cache
        self._fingerprint = fingerprint
        self._interval = interval
        self._keeps = cache.budget > 0
        self._captures = self._keeps and cache.layout.checkpoints

    def begin(self, sequence: Sequence) -> None:
        """Lease what is known of the prompt, restore it, and plan the checkpoints."""
        request = sequence.request
        namespace = Namespace(request.tenant, self._fingerprint)
        lease = self._cache.begin(namespace, as_tokens(request.prompt))
        sequence.lease = lease
        sequence.states = self._opener.open(lease.cached, lease.spans(), lease.checkpoint)
        sequence.num_computed_tokens = sequence.frontier = lease.cached
        if self._captures:
            sequence.borders = prompt_offsets(
                lease.total,
                cached=lease.cached,
                matched=lease.matched,
                boundaries=request.boundaries,
                interval=self._interval,
            )

    def advanced(self, sequence: Sequence) -> None:
        """Capture a checkpoint if one is due where the sequence stands now."""
        offset = sequence.num_computed_tokens
        reason = sequence.borders.get(offset)
        if reason is not None:
            sequence.frontier = offset
            self._capture(sequence, reason)
        elif (
            self._captures
            and offset >= sequence.num_prompt_tokens
            and decode_due(offset - sequence.frontier)
        ):
            self._capture(sequence, Reason.DECODE)

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Close the lease; keep what was computed unless it cannot be trusted."""
        lease = sequence.lease
        if lease is None:
            return
        if not keep or not self._keeps:
            lease.close()
            return
        offset = sequence.num_computed_tokens
        taken = lease.captured and lease.captured[-1].checkpoint.offset == offset
        if self._captures and offset - sequence.frontier >= FINAL_AFTER and not taken:
            self._capture(sequence, Reason.FINAL)
        lease.close(as_tokens(sequence.computed), sequence.states.seal())

    def statistics(self) -> CacheStatistics:
        """Describe the cache. Costs a walk over its nodes."""
        return self._cache.statistics()

    @staticmethod
    def _capture(sequence: Sequence, reason: Reason) -> None:
        if sequence.lease is not None:
            sequence.lease.capture(sequence.states.capture(), reason)
