"""How often state is read for somebody before that somebody makes do without it."""

from weakref import WeakKeyDictionary

from .page_in import PageInStatus

_MOST = 3


class Retries:
    """Counts for each reader how often state was read: it may be paged out again before it is used.

    A reader is whatever object asks; its count goes with it.
    """

    def __init__(self) -> None:
        self._begun: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def ended(self, reader: object) -> bool:
        """Whether a reader is to make do with what there is."""
        return self._begun.get(reader, 0) > _MOST

    def waits(self, reader: object, status: PageInStatus) -> bool:
        """Whether a reader waits for what it asked for."""
        if status is PageInStatus.BEGUN:
            self._begun[reader] = self._begun.get(reader, 0) + 1
        return status is not PageInStatus.NOTHING and not self.ended(reader)
