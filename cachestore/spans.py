"""Spans of one trie, counted wherever they lie, and loans of storages to the disk's writer."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from .ledger import Account, Kind, Ledger, Size
from .state import Span, State, Storage


def size_of(*states: State | None) -> Size:
    """Size of spans and checkpoints together; None has none."""
    held = [state for state in states if state is not None]
    return Size(sum(state.nbytes for state in held), sum(state.buffers for state in held))


class Loan:
    """A storage that the disk's writer reads. The account has what only the readers hold."""

    def __init__(self, storage: Storage, size: Size, account: Account) -> None:
        self.size = size  # of the whole storage
        self._storage = storage
        self._account = account
        self.readers = 0

    def count(self) -> None:
        """Count the bytes that no span views; the trie counts the others."""
        self._account.set(self.size - size_of(*self._storage.views))

    def give_back(self) -> None:
        """Remove a reader; without any, the storage is lent no longer."""
        self.readers -= 1
        if not self.readers:
            self._account.close()
            self._storage.loan = None

    @classmethod
    def of(cls, span: Span, ledger: Ledger) -> "Loan":
        """Add a reader to the loan of a span's storage, a new one if it has none."""
        storage = span.storage
        if storage.loan is None:
            storage.loan = cls(storage, size_of_storage(span), ledger.account(Kind.PAGING))
        storage.loan.readers += 1
        return storage.loan


def size_of_storage(span: Span) -> Size:
    """Size of a span's whole storage."""
    storage = span.storage
    return Size(span.nbytes // span.length * storage.length, storage.buffers)


class Spans:
    """Changes the spans of a trie and counts them in the ledger. Nodes hold the spans."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._untrimmed: dict[Storage, None] = {}  # storages with tokens that no span views

    @property
    def size(self) -> Size:
        """Size of all spans, and of those that were closed until they are trimmed."""
        return self._account.size

    def add(self, span: Span) -> None:
        """Count a span that the trie is given."""
        self._account.add(size_of(span))

    def abandon(self) -> None:
        """Count none of them any more: they go with their trie."""
        self._account.close()

    def merge(self, span: Span, following: Span) -> Span:
        """Make one span of two. Copies nothing where they adjoin."""
        if not span.adjoins(following):
            self.join([span, following])
        return span.merge(following)

    def join(self, spans: Sequence[Span]) -> None:
        """Move consecutive spans to one storage: a copy of all that lies where they do."""
        with self._recounted(span.storage for span in spans):
            spans[0].join(spans[1:])

    def close(self, span: Span) -> None:
        """Close a span. Call `trim` after the last one that goes."""
        storage = span.storage
        is_last = len(storage.views) == 1
        with self._recounted([storage], gone=span):
            span.close(trim=is_last)
        if is_last:
            self._untrimmed.pop(storage, None)
        else:
            self._untrimmed[storage] = None

    def trim(self) -> None:
        """Free the memory of closed spans; others in the same storages are copied."""
        while self._untrimmed:
            storage, _ = self._untrimmed.popitem()
            with self._recounted([storage]):
                storage.trim()

    @contextmanager
    def _recounted(self, storages: Iterable[Storage], gone: Span | None = None) -> Iterator[None]:
        """Count again the spans of storages, which may move, and the loans of these."""
        left = dict.fromkeys(storages)
        spans = {id(view): view for storage in left for view in storage.views}
        before = size_of(*spans.values())
        yield
        if gone is not None:
            del spans[id(gone)]
        self._account.add(size_of(*spans.values()) - before)
        for storage in left:
            if storage.loan is not None:
                storage.loan.count()
