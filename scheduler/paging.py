"""The disk as the engine uses it: in the background, and never in the way."""

import time
from collections.abc import Callable

import structlog

from ..cachestore.paging.pager import Pager
from ..cachestore.pins import Pins
from ..cachestore.tries import Namespace
from .sequence import Sequence

log = structlog.get_logger()


_CALM = 0.05
"""Seconds in which nobody came or ended, and no prompt was computed: then new state is written."""

_PATIENCE = 3.0
"""Seconds for which it waits for that."""

_LONG_PATIENCE = 20.0
"""Seconds for which it waits for a moment in which fewer than two run."""


class _Lasting:
    """For how long something has been so."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, now: float, *, holds: bool) -> float:
        """Seconds since the first of the calls in a row in which it held; 0 where it does not."""
        if not holds:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since


class Paging:
    """Has state moved to and from the disk. What goes wrong there ends it, and no request.

    While sequences decode, what is to be written waits for a calm moment, and so does the rest of
    what is being written. Who comes and who ends keeps the others from their next tokens, and the
    writer would then make it longer: it takes the interpreter in turn with the thread that owns
    MLX, on CUDA the driver and the allocator, too. So it is while several run or wait, though none
    decodes yet: a crowd that waits for a prompt's state enters as soon as that is there.

    The writer makes steps longer in calm moments, too. Agents rest between their turns, so where
    several run, what is to be written waits for such a rest first. Where none comes soon, it is
    written in calm moments. What is being written by then is: pins, and what is to be deleted,
    wait behind it.

    Args:
        pager: of the cache, if there is a disk tier.
        pins: whose state is read back at the start.
        clock: seconds, monotonic.
    """

    def __init__(
        self, pager: Pager | None, pins: Pins, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pager = pager
        self._pins = pins
        self._clock = clock
        self._page_ins = 0
        self._stirred = float("-inf")  # when somebody came or ended, or a prompt was computed
        self._restless = _Lasting()  # something is to be written, and it is not calm
        self._pending = _Lasting()  # something is to be written

    @property
    def page_ins(self) -> int:
        """States that were read back from disk."""
        if self._pager is not None:
            self._page_ins = self._pager.page_ins
        return self._page_ins

    @property
    def writes(self) -> int:
        """States that were written to disk."""
        return 0 if self._pager is None else self._pager.statistics().writes

    @property
    def writing(self) -> bool:
        """Whether something is being written."""
        return self._pager is not None and self._pager.writing

    @property
    def unwritten(self) -> bool:
        """Whether nothing is being written, though something is to be: a step would begin."""
        return self._pager is not None and self._pager.unwritten

    def step(self, *, stirs: bool = False, others: bool = False, several: bool = False) -> bool:
        """Go on with what is on the way; whether there is more to do at once.

        Args:
            stirs: somebody came or ended in the last step, or a prompt was computed, beside others.
            others: somebody decodes, or several run or wait, and nobody lacks memory: what is being
                written cannot be given up.
            several: several run.
        """
        if self._pager is None:
            return False
        try:
            now, pending = self._clock(), self._pager.pending
            if stirs:
                self._stirred = now
            stirred = now - self._stirred < _CALM
            restless = self._restless.seconds(now, holds=stirred and pending)
            waited = self._pending.seconds(now, holds=pending)
            pauses = others and stirred and restless < _PATIENCE
            waits = others and several and waited < _LONG_PATIENCE
            self._pager.step(withholds=pauses or waits, pauses=pauses)
            self._pins.restore(self._pager)
        except BaseException as error:  # noqa: BLE001  (a request must not pay for it)
            self._give_up(error)
            return False
        return self._pager.ready

    def wait_for(self, sequence: Sequence, namespace: Namespace) -> bool:
        """Have what is on disk of a sequence's tokens read; whether to wait for it."""
        if self._pager is None:
            return False
        try:
            return self._ask(self._pager, sequence, namespace)
        except BaseException as error:  # noqa: BLE001  (as above)
            self._give_up(error)
            return False

    def _ask(self, pager: Pager, sequence: Sequence, namespace: Namespace) -> bool:
        if self._pins.is_awaited(namespace, sequence.tokens):
            return True
        before = pager.asked_bytes
        waits = pager.wait_for(sequence, namespace, sequence.tokens)
        sequence.num_restored_bytes += pager.asked_bytes - before
        return waits

    def _give_up(self, error: BaseException) -> None:
        log.error("the disk tier failed and is not used any more", exc_info=error)
        if self._pager is not None:
            self._page_ins = self._pager.page_ins
            self._pager.give_up(f"it failed: {type(error).__name__}: {error}")
        self._pager = None
