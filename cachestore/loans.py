"""Storages that another thread reads: in memory until it is done, whoever gives them up."""

from .ledger import Account, Kind, Ledger, Size
from .state import Span, Storage


class Loan:
    """What one storage is lent for, to one reader or several. Belongs to the MLX thread.

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
        """Have it read by one more."""
        self._readers += 1

    def count(self) -> None:
        """Count what nobody views; what somebody views counts as the trie's."""
        viewed = sum((Size(view.nbytes, view.buffers) for view in self._storage.views), Size())
        self._account.set(self.size - viewed)

    def give_back(self) -> None:
        """Have it read by one less; by nobody, it is lent no more."""
        self._readers -= 1
        if not self._readers:
            self._account.close()
            self._storage.loan = None


def size_of_storage(span: Span) -> Size:
    """What all takes that lies where a span does."""
    storage = span.storage
    return Size(span.nbytes // span.length * storage.length, storage.buffers)


def lend(span: Span, ledger: Ledger) -> Loan:
    """Have where a span lies read on another thread, until the loan is given back."""
    storage = span.storage
    if storage.loan is None:
        storage.loan = Loan(storage, size_of_storage(span), ledger.account(Kind.PAGING))
    storage.loan.add_reader()
    return storage.loan
