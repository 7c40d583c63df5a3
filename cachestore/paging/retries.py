"""How often state is read for a reader that does not come to use it."""

from weakref import WeakKeyDictionary

from .page_in import PageInStatus

_MOST = 3


class Retries:
    """Counts the reads for each reader: state may be paged out again before the reader uses it.

    A reader is the object that asks. Its count is dropped with it.
    """

    def __init__(self) -> None:
        self._begun: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def may_begin(self, reader: object) -> bool:
        """Return True if a reader would wait for one more read."""
        return self._begun.get(reader, 0) < _MOST

    def ended(self, reader: object) -> bool:
        """Whether a reader waits no more, and starts with what is in memory."""
        return self._begun.get(reader, 0) > _MOST

    def waits(self, reader: object, status: PageInStatus) -> bool:
        """Whether a reader waits for what it asked for."""
        if status is PageInStatus.BEGUN:
            self._begun[reader] = self._begun.get(reader, 0) + 1
        return status is not PageInStatus.NOTHING and not self.ended(reader)
