"""One tenant's conversations, and which of their requests it offers."""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator

from .accounts import Accounts
from .entry import Candidate, Entry, Policy, Priority

Numbered = tuple[int, Entry]
"""A request and its number in the order of arrival."""


def number_of(numbered: Numbered) -> int:
    """The key by which lists of them are sorted."""
    return numbered[0]


class Conversation:
    """What waits, oldest first, and how many run."""

    def __init__(self) -> None:
        self.waiting: list[Numbered] = []
        self.running = 0
        self.head: Numbered | None = None  # as the tenant knows it

    def next(self) -> Numbered | None:
        """The request that may start now."""
        if self.waiting and self.running < self.waiting[0][1].parallel:
            return self.waiting[0]
        return None


class Tenant:
    """A tenant's conversations."""

    def __init__(self, policy: Policy) -> None:
        self._patience = policy.patience
        self.conversations: dict[str, Conversation] = {}
        self.accounts = Accounts(policy.conversation_quantum, len(Priority))
        self.heads: list[Numbered] = []  # of all conversations, oldest first
        self.yielded: dict[str, Numbered] = {}  # what ran and waits again, by its id
        self._passed_over = 0  # requests started since the oldest was

    @property
    def due(self) -> bool:
        """Whether the oldest goes first."""
        return bool(self.heads) and self._passed_over >= self._patience - 1

    def count_start(self, number: int) -> None:
        """Note that a head starts."""
        self._passed_over = 0 if self.heads[0][0] == number else self._passed_over + 1

    def settle(self, key: str) -> None:
        """Take note of a conversation's next request."""
        conversation = self.conversations[key]
        head = conversation.next()
        if conversation.head is not None and conversation.head != head:
            del self.heads[bisect_left(self.heads, conversation.head[0], key=number_of)]
        if head is not None and conversation.head != head:
            insort(self.heads, head, key=number_of)
        conversation.head = head
        if head is None:
            self.accounts.update(key, ())
        else:
            self.accounts.update(key, (head[1].priority,), since=head[0])
        if not conversation.waiting and not conversation.running:
            del self.conversations[key]

    def yielded_heads(self) -> list[Entry]:
        """List what ran before and is next in its conversation, the most urgent, oldest first."""
        return [
            each[1]
            for each in sorted(self.yielded.values(), key=lambda each: (each[1].priority, each[0]))
            if self.conversations[each[1].conversation].head == each
        ]

    def kinds(self) -> list[Priority]:
        """The priorities of what has credit. A request that is due counts as interactive."""
        return [
            priority
            for priority in Priority
            if self.accounts.has_eligible(priority)
            or (self.due and priority is Priority.INTERACTIVE)
        ]

    def offers(self, priority: Priority, most: int, passed: Container[str]) -> list[Candidate]:
        """List what may start of a priority: who is due, the least served, the most served."""
        found: dict[str, Candidate] = {}
        if self.due and priority is Priority.INTERACTIVE and self.heads[0][1].id not in passed:
            found[self.heads[0][1].id] = Candidate(self.heads[0][1], due=True)
        for keys, room in (
            (self.accounts.eligible(priority), most - most // 2),
            (self.accounts.most_served(priority), most),
        ):
            self._add(found, keys, room, passed)
        return list(found.values())

    def _add(
        self, found: dict[str, Candidate], keys: Iterator[str], most: int, passed: Container[str]
    ) -> None:
        if len(found) >= most:
            return
        for key in keys:
            head = self.conversations[key].head
            if head is not None and head[1].id not in passed:
                found.setdefault(head[1].id, Candidate(head[1]))
                if len(found) >= most:
                    return
