"""The order in which requests start: deficit longest prefix match over tenants and conversations.

Among the tenants that have credit, and of each its conversations that have credit, the request
with the longest cached prefix goes first (DLPM, arXiv 2501.14312). `accounts.py` says what credit
is. Around it:

- A conversation starts its requests in order, so many at a time as they say.
- `interactive` goes before `batch` among what has credit. Who only has interactive requests spends
  its credit in the end, and batch requests of others run before it is refilled.
- Of every few requests that a tenant starts, one is the oldest it can start, whatever its
  conversation was served, its priority and its cached prefix (k-LPM, arXiv 2502.04677). A request
  is therefore passed over by a bounded number of younger ones of its tenant, and by others for as
  long as fairness lets them: a quantum each, and what they started last.

**What a decision costs.** To know a cached prefix is to walk the cache, so a decision looks at a
*window* of a bounded number of requests: heads of conversations with credit, of the tenants with
credit, the least served tenants first, of each at most half the room that is left. That costs
little cache: tenants share no prefixes, so that passing over a tenant loses none of another's, and
who is left out was served more than who is looked at and comes later in the same quantum. Of a
tenant with more conversations than places, half of the places go to those that were served least,
so that all come into the window in time, and half to those that were served most and still have
credit: their state was used last, and is what a cache has.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable
from itertools import islice

from .accounts import Accounts
from .entry import Candidate, Entry, Policy, Priority
from .tenant import Conversation, Numbered, Tenant, number_of
from .terms import Agreed, Terms
from .use import Places, TenantUse


def rank(window: Iterable[Candidate], cached: Callable[[Entry], int]) -> list[Entry]:
    """Put a window in order: who is due, then the longest cached prefix.

    Args:
        window: of `FairOrder.window`.
        cached: tokens of a request's prompt that are in the cache. It is asked once for each.
    """
    ranked = sorted(window, key=lambda each: (not each.due, -cached(each.entry)))
    return [candidate.entry for candidate in ranked]


class FairOrder:
    """All requests that wait or run, and which of them start next.

    Attributes:
        held: tenants for whom `hold` was called, and `let_go` not since.

    It has no clock and reads no cache. Safe to call from one thread at a time.

    Args:
        policy: its constants.
        agreed: a tenant's terms; asked at each charge, start and end.
        places: counts what waits and runs; None where no other order has any of it.

    A request is charged what it costs: the prompt tokens that are to be computed and the equal
    of what is restored when it starts, decoded tokens as they come, and corrections.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        agreed: Agreed = lambda _: Terms(),
        places: Places | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self._agreed = agreed
        self._places = places or TenantUse(agreed).join()
        self._accounts = Accounts(self._policy.quantum, len(Priority), self.weight)
        self.held: set[str] = set()
        self._tenants: dict[str, Tenant] = {}
        self._waiting: dict[str, Numbered] = {}
        self._running: dict[str, Numbered] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many were started and have not ended."""
        return len(self._running)

    def service(self, tenant: str) -> float:
        """Tokens per weight that a tenant was charged, lifts included."""
        return self._accounts.service(tenant)

    def weight(self, tenant: str) -> float:
        """A tenant's share."""
        return self._agreed(tenant).weight

    def head(self, tenant: str, conversation: str) -> str | None:
        """The id of the first of a conversation, if it does not wait for others of it."""
        found = self._tenants.get(tenant)
        place = None if found is None else found.conversations.get(conversation)
        return None if place is None or place.head is None else place.head[1].id

    def hold(self, tenant: str) -> None:
        """Let no request of a tenant start until `let_go`."""
        self.held.add(tenant)
        self.look_at(tenant)

    def let_go(self, tenant: str) -> None:
        """Let a tenant's requests start again. Idempotent."""
        self.held.discard(tenant)
        self.look_at(tenant)

    def look_at(self, tenant: str) -> None:
        """Ask anew whether a tenant may start a request."""
        if tenant in self._tenants:
            self._settle_tenant(tenant)

    def may_start(self, tenant: str) -> bool:
        """Whether a tenant is not held, and has fewer requests running than it may have."""
        return tenant not in self.held and self.has_place(tenant)

    def has_place(self, tenant: str) -> bool:
        """Whether a tenant has fewer requests running than it may have, here and elsewhere."""
        return self._places.has_place(tenant)

    def least_served(self) -> str | None:
        """The tenant with the least service of those that could start a request."""
        return self._accounts.least_served()

    def put(self, entry: Entry) -> None:
        """Add a request at the end.

        Raises:
            ValueError: its id is that of one that waits or runs.
        """
        if entry.id in self._waiting or entry.id in self._running:
            raise ValueError(f"request {entry.id} is in the order already")
        self._count += 1
        tenant = self._tenants.setdefault(entry.tenant, Tenant(self._policy))
        tenant.conversations.setdefault(entry.conversation, Conversation())
        self._wait(self._count, entry)

    def window(self, passed: Container[str] = frozenset()) -> list[Candidate]:
        """List who may start next, for `rank`; empty if there is none.

        Args:
            passed: ids of requests that could not start when they were looked at. Where all
                that have credit were passed over, those without follow: no slot stays empty.
        """
        for priority in Priority:
            found: list[Candidate] = []
            tenants = list(islice(self._accounts.eligible(priority), self._policy.looks))
            for place, key in enumerate(tenants, 1):
                room = self._policy.looks - len(found)
                most = room if place == len(tenants) else max(1, room // 2)
                found += self._tenants[key].offers(priority, most, passed)
                if len(found) >= self._policy.looks:
                    break
            if found:
                return found
        return self._others(passed)

    def claimants(self) -> list[str]:
        """The tenants to which others yield, that could start an interactive request.

        Those were served less than a quantum more than the least served; that one comes first. As
        many as a window has places at most.
        """
        return list(islice(self._accounts.near(Priority.INTERACTIVE), self._policy.looks))

    def offers(self, tenant: str, passed: Container[str] = frozenset()) -> list[Candidate]:
        """List which interactive requests of one tenant may start next, for `rank`."""
        if tenant not in self._tenants:
            return []
        most = self._policy.looks
        return self._tenants[tenant].offers(Priority.INTERACTIVE, most, passed)

    def yielded_of_held(self, passed: Container[str]) -> list[Candidate]:
        """List what yielded of tenants that are held: what ran goes on, where there is a slot."""
        return [
            Candidate(entry)
            for key in self.held
            if key in self._tenants and self.has_place(key)
            for entry in self._tenants[key].yielded_heads()
            if entry.id not in passed
        ]

    def start(self, request_id: str, tokens: float) -> Entry:
        """Take a request out of those that wait. One of a tenant that is held may have run before.

        Args:
            request_id: of a candidate.
            tokens: what its prompt costs, as far as it is known.

        Raises:
            KeyError: it does not wait.
            ValueError: its conversation must go on with another one first, or as many of its
                tenant run as may by now.
        """
        number, entry = self._waiting[request_id]
        tenant = self._tenants[entry.tenant]
        conversation = tenant.conversations[entry.conversation]
        if conversation.head != (number, entry):
            raise ValueError(f"request {request_id} waits for others of its conversation")
        if not self._places.start(entry.tenant):  # its terms have changed since, or it has others
            self._settle_tenant(entry.tenant)
            raise ValueError(f"tenant {entry.tenant} may start no more requests")
        tenant.count_start(number)
        del self._waiting[request_id], conversation.waiting[0]
        tenant.yielded.pop(request_id, None)
        self._running[request_id] = number, entry
        conversation.running += 1
        self.charge(request_id, tokens)
        self._settle(entry)
        return entry

    def charge(self, request_id: str, tokens: float) -> None:
        """Charge a running request for more; less than nothing takes a charge back.

        Raises:
            KeyError: it does not run.
        """
        entry = self._running[request_id][1]
        tenant = self._tenants[entry.tenant]
        tenant.accounts.charge(entry.conversation, tokens)
        self._accounts.charge(entry.tenant, tokens)
        self._settle_tenant(entry.tenant)

    def preempt(self, request_id: str) -> None:
        """Let a running request wait again, at its old place.

        Raises:
            KeyError: it does not run.
        """
        number, entry = self._running[request_id]
        self._stop(entry)
        self._tenants[entry.tenant].yielded[request_id] = number, entry
        self._wait(number, entry)

    def end(self, request_id: str) -> None:
        """Forget a running request.

        Raises:
            KeyError: it does not run.
        """
        entry = self._running[request_id][1]
        self._stop(entry)
        self._settle(entry)

    def remove(self, request_id: str) -> bool:
        """Forget a waiting request; False when it does not wait (any more)."""
        if request_id not in self._waiting:
            return False
        number, entry = self._waiting.pop(request_id)
        tenant = self._tenants[entry.tenant]
        tenant.yielded.pop(request_id, None)
        waiting = tenant.conversations[entry.conversation].waiting
        del waiting[bisect_left(waiting, number, key=number_of)]
        self._places.leave(entry.tenant)
        self._settle(entry)
        return True

    def _wait(self, number: int, entry: Entry) -> None:
        self._waiting[entry.id] = number, entry
        tenant = self._tenants[entry.tenant]
        waiting = tenant.conversations[entry.conversation].waiting
        insort(waiting, (number, entry), key=number_of)
        self._places.wait(entry.tenant)
        self._settle(entry)

    def _stop(self, entry: Entry) -> None:
        del self._running[entry.id]
        tenant = self._tenants[entry.tenant]
        tenant.conversations[entry.conversation].running -= 1
        self._places.stop(entry.tenant)

    def _settle(self, entry: Entry) -> None:
        tenant = self._tenants[entry.tenant]
        tenant.settle(entry.conversation)
        self._settle_tenant(entry.tenant)
        if not tenant.conversations:
            del self._tenants[entry.tenant]

    def _settle_tenant(self, key: str) -> None:
        tenant = self._tenants[key]
        if tenant.heads and self.may_start(key):
            self._accounts.update(key, tenant.kinds(), since=tenant.heads[0][0])
        else:
            self._accounts.update(key, ())

    def _others(self, passed: Container[str]) -> list[Candidate]:
        """List the oldest of the least served tenants first, with credit or without."""
        found: dict[str, Candidate] = {}
        for key in self._accounts.ready():
            for _, entry in self._tenants[key].heads:
                if entry.id not in passed:
                    found.setdefault(entry.id, Candidate(entry))
                    if len(found) >= self._policy.looks:
                        return list(found.values())
        return list(found.values())
