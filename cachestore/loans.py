"""Storages that another thread reads: they stay in memory until it is done."""

from .ledger import Account, Kind, Ledger, Size
from .state import Span, Storage


class Loan:
    """A storage that is lent to one reader or several. Belongs to the MLX thread.

    Attributes:
        size: what all of the storage takes.

    Args:
        storage: which.
        size: as above.
        account: of what of it only the readers have.
    """

    def __init__(self, storage: Storage, size: Size, account: Account) -> None:
        self.size = size
        self._storage = storage
        self._account = account
        self._readers = 0

    def add_reader(self) -> None:
        """Add a reader."""
        self._readers += 1

    def count(self) -> None:
        """Count the bytes that no span views; viewed ones count as the trie's."""
        viewed = sum((Size(view.nbytes, view.buffers) for view in self._storage.views), Size())
        self._account.set(self.size - viewed)

    def give_back(self) -> None:
        """Remove a reader; without any, the storage is lent no longer."""
        self._readers -= 1
        if not self._readers:
            self._account.close()
            self._storage.loan = None


def size_of_storage(span: Span) -> Size:
    """Return the size of a span's whole storage."""
    storage = span.storage
    return Size(span.nbytes // span.length * storage.length, storage.buffers)


def lend(span: Span, ledger: Ledger) -> Loan:
    """Lend a span's storage to another thread, until the loan is given back."""
    storage = span.storage
    if storage.loan is None:
        storage.loan = Loan(storage, size_of_storage(span), ledger.account(Kind.PAGING))
    storage.loan.add_reader()
    return storage.loan
