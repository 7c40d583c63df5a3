"""Keeps what model state takes within its budget: nothing is allocated before there is room.

Everything that takes memory asks here first. Room is made by paging out and evicting what
nobody uses (see `Evictor.evict`); what cannot be made is refused, and the engine then
computes less at a time, holds new requests or preempts a sequence. The allocator is never asked
for what does not fit: on Metal it would end the process.
"""

from .ledger import Kind, Ledger, Size
from .prefix_cache import PrefixCache

_LEAST_SHARE = 8  # of the budget, one part in this many is used however short memory is
_RESERVE = 16  # a part of the budget is kept for copies: one in this many


class Governor:
    """Makes room in one budget. Belongs to the MLX thread.

    A copy of state (to cut, join or pack it) needs memory for the moment in which both
    exist. Nothing longer than `max_copy_bytes` is ever copied, and that much is kept free, so
    that freeing memory never needs any that is not there.

    Attributes:
        ledger: what is held.

    Args:
        cache: what can be made room in. Its ledger is the one that counts.
        budget: what all state may take, transients included.
    """

    def __init__(self, cache: PrefixCache, budget: Size) -> None:
        self.ledger: Ledger = cache.ledger
        self._cache = cache
        self._budget = budget
        self._base = budget.nbytes
        self._share = 1.0
        self._transient = self.ledger.account(Kind.TRANSIENT)

    @property
    def budget(self) -> Size:
        """What all state may take at present."""
        return Size(self._bytes(), self._budget.buffers)

    def _bytes(self) -> int:
        if self._share == 1.0:
            return self._budget.nbytes
        least = self._budget.nbytes // _LEAST_SHARE
        return max(int(self._base * self._share), least)

    @property
    def limit(self) -> Size:
        """What may be held, so that there is room for a copy still."""
        return self.budget - Size(max_copy_bytes(self._budget.nbytes))

    @property
    def room(self) -> Size:
        """What is free, without making any; negative where too much is held."""
        return self.limit - self.ledger.total

    def shrink(self, share: float) -> None:
        """Use only a share of the budget, because the system is short of memory.

        Where less was held than the budget when that began, it is a share of what was: else a
        cache that is half full would give nothing back.
        """
        if self._share == 1.0:
            self._base = min(self._budget.nbytes, self.ledger.total.nbytes)
        self._share = share
        self._free(Size())

    def fits(self, need: Size) -> bool:
        """Whether there is room, or could be made."""
        if need.within(self.room):
            return True
        return need.within(self.room + self._cache.evictor.evictable())

    def make_room(self, need: Size) -> bool:
        """Page out and evict until `need` fits.

        Returns:
            False if it does not, and then nothing was evicted for it.
        """
        if need.within(self.room):
            return True
        if not self.fits(need):
            return False
        self._free(need)
        return need.within(self.room)

    def _free(self, need: Size) -> None:
        """Evict what `need` takes over what is free, as far as it can be."""
        over = need - self.room
        held = self._cache.tries.size - Size(max(0, over.nbytes), max(0, over.buffers))
        self._cache.evictor.evict(held.nbytes, held.buffers)

    def reserve(self, need: Size) -> bool:
        """Make room for what a step will compute, and keep it for it until the next one does.

        Returns:
            False if there is none.
        """
        self._transient.close()
        if not self.make_room(need):
            return False
        self._transient.set(need)
        return True

    def release(self) -> None:
        """Give back what was reserved: the step is over."""
        self._transient.close()


def max_copy_bytes(budget: int) -> int:
    """The most bytes of state that are copied at a time, under a budget."""
    return budget // _RESERVE
