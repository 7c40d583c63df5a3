"""Keeps what model state takes within its budget: nothing is allocated before there is room.

Everything that takes memory asks here first. Room is made by paging out and evicting what
nobody uses (see `Evictor.evict`); what cannot be made is refused, and the engine then
computes less at a time, holds new requests or preempts a sequence. The allocator is never asked
for what does not fit: on Metal it would end the process.
"""

from .ledger import Kind, Ledger, Size
from .prefix_cache import PrefixCache


class Governor:
    """Makes room for one model in the budget of all. Belongs to the MLX thread.

    A copy of state (to cut, join or pack it) needs memory for the moment in which both
    exist. Nothing longer than `max_copy_bytes` is ever copied, and that much is kept free, so
    that freeing memory never needs any that is not there.

    Attributes:
        pool: the budget, and what is held in it.
        ledger: the latter.

    Args:
        cache: of the model. Its pool is the one that counts.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.pool = cache.pool
        self.ledger: Ledger = cache.ledger
        self._cache = cache
        self._transient = self.ledger.account(Kind.TRANSIENT)
        self.pool.governors.append(self)

    def close(self) -> None:
        """Leave the pool: the model is unloaded."""
        self.release()
        self.pool.busy.discard(self)
        self.pool.governors.remove(self)

    def note(self, *, busy: bool) -> None:
        """Note whether requests of this model are at work."""
        (self.pool.busy.add if busy else self.pool.busy.discard)(self)

    @property
    def others_busy(self) -> bool:
        """Whether requests of another model are at work, which will give memory back."""
        return bool(self.pool.busy - {self})

    @property
    def budget(self) -> Size:
        """What all state may take at present."""
        return self.pool.budget

    @property
    def limit(self) -> Size:
        """What may be held, so that there is room for a copy still."""
        return self.pool.limit

    @property
    def room(self) -> Size:
        """What is free, without making any; negative where too much is held."""
        return self.pool.room

    @property
    def spare(self) -> int:
        """Bytes that are free, or that no lease retains: the most that could be."""
        return self.pool.spare

    def evict_excess(self) -> None:
        """Evict what is held over the budget, which has become smaller."""
        self._free(Size())

    def fits(self, need: Size) -> bool:
        """Whether there is room, or could be made."""
        room = self.room
        if need.within(room):
            return True
        if need.nbytes > self.spare:
            return False
        return need.within(room + self._cache.evictor.evictable(need - room))

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
        self._cache.evictor.evict_from_all(
            self.pool.stored - Size(max(0, over.nbytes), max(0, over.buffers))
        )

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
