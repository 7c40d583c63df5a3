"""Paths that stay in memory whatever else wants room: pins, and prompts that all tenants share.

A shared prompt is a pin of the tenant `SHARED`. It is computed once: a prompt of any tenant that
begins with it and goes on resumes at its end. The rest is in a trie of that tenant alone, which
begins there: only the declared prompt is common, and only as a whole.
"""

from collections import OrderedDict, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog

from .errors import PinError
from .node import Tokens, common_length, size_in_memory
from .record import Pin, digest
from .trie import RadixTrie
from .tries import SHARED, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .disk.tier import DiskTier
    from .paging.page_in import PageIn
    from .prefix_cache import Lease, PrefixCache

_REMEMBERED = 1024  # conversations whose last path is known
_SHARE = 2  # of the budget, pins may take one part in this many
_PARTS = 8  # of that, one part in this many is for a tenant's own
_MOST = 256  # pins of a tenant: to pin one more looks at the paths of all
_NAMED = 8  # pins that a refusal names
_NO_TOKEN = np.array([-1], np.int32)

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class PinnedPath:
    """A path that is kept. It has no lease before its state was read from disk."""

    tenant: str
    name: str
    tokens: Tokens
    digest: bytes
    lease: "Lease | None"

    def begins(self, prompt: Tokens) -> bool:
        """True if a prompt begins with it and goes on."""
        length = len(self.tokens)
        return length < len(prompt) and common_length(self.tokens, prompt) == length


class PinDescription(NamedTuple):
    """A pin. `held` of its `tokens` have their state in memory."""

    name: str
    tokens: int
    held: int


class Pins:
    """The pinned paths of a cache, within bounds. Belongs to the MLX thread."""

    def __init__(self, cache: "PrefixCache") -> None:
        self.tier: DiskTier | None = None  # pins outlive restarts there
        self._cache = cache
        self._paths: dict[str, dict[str, PinnedPath]] = defaultdict(dict)  # by tenant and name
        self._retracted: list[PinnedPath] = []  # shared prompts that are still in use
        self._last: OrderedDict[tuple[str, str], Tokens] = OrderedDict()
        cache.pool.pins.append(self)

    def remember(self, tenant: str, conversation: str, tokens: Tokens) -> None:
        """Note a conversation's newest tokens, so that it can be pinned by its name."""
        self._last[tenant, conversation] = tokens
        self._last.move_to_end((tenant, conversation))
        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)

    def conversations(self, tenant: str) -> list[tuple[str, Tokens]]:
        """A tenant's conversations of late with their newest tokens, the newest one last."""
        return [(name, tokens) for (whose, name), tokens in self._last.items() if whose == tenant]

    def pin(
        self, tenant: str, name: str, tokens: Tokens, *, operator: bool = False
    ) -> PinDescription:
        """Keep the state of a path, as far as it is in memory; replaces a pin of that name.

        A tenant's first pin sets its whole part aside. So a refusal of a further one depends on its
        own pins alone, and no size that it tries tells what others pin. An operator may use what is
        not set aside, and sees others' use.

        Raises:
            PinError: nothing of it is in memory, or pins would take too much.
        """
        lease = self._lease(tenant, name, tokens, operator=operator)
        tokens = tokens[: lease.cached] if tenant == SHARED else tokens
        self._keep(tenant, name, tokens, lease)
        if self.tier is not None:
            self.tier.pin(Pin(name, tenant, tokens.tobytes()))
        return PinDescription(name, len(tokens), lease.cached)

    def unpin(self, tenant: str, name: str) -> bool:
        """Let a path age like any other; False if there is no such pin."""
        path = self._paths[tenant].pop(name, None)
        self._let_go(path)
        if path is not None and self.tier is not None:
            self.tier.unpin(name, tenant)
        return path is not None

    def put(self, tenant: str, name: str, tokens: Tokens, lease: "Lease | None") -> None:
        """Keep a path under a name, in place of an older one. Owns the lease, unless it raises."""
        path = PinnedPath(tenant, name, tokens, digest(tokens), lease)
        older = self._paths[tenant].pop(name, None)
        self._paths[tenant][name] = path
        self._let_go(older)

    def _let_go(self, path: PinnedPath | None) -> None:
        """Give a path's lease back. A fault is logged; shared prompts are tried again later."""
        try:
            if path is not None and path.tenant == SHARED:
                self._retracted.append(path)
                self.settle()
            elif path is not None and path.lease is not None:
                path.lease.close()
        except BaseException:
            log.exception("state that is not pinned any more is still in memory")

    def settle(self) -> None:
        """Let go of retracted prompts that no request uses; one that is shared again stays."""
        kept = {prompt.digest for prompt in self.paths(SHARED)}
        for prompt in list(self._retracted):
            if prompt not in self._retracted:
                continue  # to close another one's lease has let it go
            base = prompt.digest
            if base not in kept:
                self._cache.clear(partial(_follows, base))
            below = [trie for name, trie in self._cache.tries.items() if _follows(base, name)]
            if not any(trie.root.ref_count for trie in below):
                self._retracted.remove(prompt)
                if prompt.lease is not None:
                    prompt.lease.close()

    def close(self) -> None:
        """Give back all leases, shared prompts' last; the disk keeps the pins. Idempotent."""
        if self in self._cache.pool.pins:
            self._cache.pool.pins.remove(self)
        own = [path for path in self.paths() if path.tenant != SHARED]
        paths = [*self._retracted, *self.paths(SHARED), *own]
        self._paths.clear()
        self._retracted.clear()
        with ExitStack() as leases:  # the last one first, each whatever the others raise
            for path in paths:
                if path.lease is not None:
                    leases.callback(path.lease.close)

    # -- what is pinned ----------------------------------------------------------------

    def paths(self, tenant: str | None = None) -> list[PinnedPath]:
        """The paths of a tenant, or all of them for None."""
        if tenant is not None:
            return list(self._paths.get(tenant, {}).values())
        return [path for own in self._paths.values() for path in own.values()]

    def listed(self, tenant: str) -> list[PinDescription]:
        """A tenant's pins; those of before a restart hold nothing until they are read."""
        return [
            PinDescription(path.name, len(path.tokens), path.lease.cached if path.lease else 0)
            for path in sorted(self.paths(tenant), key=lambda each: each.lease is None)
        ]

    def leases(self, tenant: str | None = None) -> "list[Lease]":
        """The leases that the pins of a tenant hold, or all of them for None."""
        return [path.lease for path in self.paths(tenant) if path.lease is not None]

    def held_by(self, tenant: str) -> int:
        """Bytes that a tenant's pins hold in memory."""
        return _bytes_of(self.leases(tenant))

    # -- shared prompts ----------------------------------------------------------------

    def declared(self, namespace: Namespace, prompt: Tokens) -> PinnedPath | None:
        """The longest shared prompt that a prompt begins with; None for shared prompts."""
        if namespace.tenant == SHARED:
            return None
        begun = [each for each in self.paths(SHARED) if each.begins(prompt)]
        return max(begun, key=lambda each: (len(each.tokens), each.lease is not None), default=None)

    def shared(self, namespace: Namespace, prompt: Tokens) -> PinnedPath | None:
        """The longest shared prompt that a prompt begins with, if its state is in memory."""
        found = self.declared(namespace, prompt)
        return None if found is None or found.lease is None else found

    def is_awaited(self, namespace: Namespace, prompt: Tokens) -> bool:
        """True if the longest that a prompt begins with is not read from disk yet."""
        found = self.declared(namespace, prompt)
        return found is not None and found.lease is None

    def ending_at(self, offset: int, prefix: bytes) -> PinnedPath | None:
        """The shared prompt with so many tokens and this digest, in memory or not."""
        same = (p for p in self.paths(SHARED) if (len(p.tokens), p.digest) == (offset, prefix))
        return next(same, None)

    def trie(self, namespace: Namespace, shared: PinnedPath | None) -> RadixTrie:
        """The trie of a tenant's state, or of its state after a shared prompt."""
        if shared is None:
            return self._cache.tries.open(namespace)
        return self._cache.tries.open(namespace._replace(base=shared.digest), shared.tokens)

    # -- leases and bounds -------------------------------------------------------------

    def restore(self, page_in: "PageIn") -> None:
        """Take up pins of before a restart, one after another, once their state was read.

        Shared ones come first, as others follow them. One that does not fit is not tried again
        before the next start.
        """
        waiting = [path for path in self.paths() if path.lease is None]
        if not waiting:
            return
        path = min(waiting, key=lambda each: each.tenant != SHARED)
        if page_in.wait_for(path, Namespace(path.tenant), np.append(path.tokens, _NO_TOKEN)):
            return
        try:  # with an operator's bounds: it was granted
            lease = self._lease(path.tenant, path.name, path.tokens, operator=True)
            self._keep(path.tenant, path.name, path.tokens, lease)
        except BaseException as error:  # noqa: BLE001  (one pin is not the disk tier's end)
            log.warning("pin not restored", pin=path.name, reason=str(error))
            self._let_go(self._paths[path.tenant].pop(path.name, None))

    def _keep(self, tenant: str, name: str, tokens: Tokens, lease: "Lease") -> None:
        """Make a lease a pin. Takes ownership; if that fails, an older pin stays."""
        with ExitStack() as unless_kept:
            unless_kept.callback(lease.close)
            if tenant == SHARED and lease.cached < len(tokens):  # it is common as a whole
                raise PinError(f"only {lease.cached} of its {len(tokens)} tokens are on disk")
            self.put(tenant, name, tokens, lease)
            unless_kept.pop_all()

    def _lease(self, tenant: str, name: str, tokens: Tokens, *, operator: bool) -> "Lease":
        # A lease leaves a token to compute, which would be the path's last one.
        lease = self._cache.begin(Namespace(tenant), np.append(tokens, _NO_TOKEN))
        try:
            self._check(tenant, name, lease, operator=operator or tenant == SHARED)
        except BaseException:
            lease.close()
            raise
        return lease

    def _check(self, tenant: str, name: str, lease: "Lease", *, operator: bool) -> None:
        if not lease.cached:
            raise PinError(f"nothing of {name!r} is in memory, so nothing can be pinned")
        named = {path.name for path in self.paths(tenant) if path.lease is not None}
        if name not in named and not operator and len(named) >= _MOST:
            message = f"you have {_MOST} pins of this model, which is the most; unpin something"
            raise PinError(message)
        pool = self._cache.pool
        own = _bytes_of([lease, *self.leases(tenant)])
        own += sum(pins.held_by(tenant) for pins in pool.pins if pins is not self)
        tenants = {path.tenant for pins in pool.pins for path in pins.paths() if path.lease}
        held = {each: sum(pins.held_by(each) for pins in pool.pins) for each in tenants}
        part, ceiling = self._part(tenant), pool.bounds(tenant).ceiling
        left = self._limit - sum(
            max(held[each], self._part(each)) for each in held if each != tenant
        )
        advice = f"; unpin something{self._largest(tenant)}"
        if ceiling is not None and own > ceiling:
            reason = f"and may take {ceiling}, your cache_ceiling{advice}"
        elif not operator and own > part:
            reason = f"and may take {part}{advice}"
        elif max(own, part) <= left:
            return
        elif operator:
            reason = (
                f"and those of other tenants leave {max(0, left)}{advice}, or raise cache_bytes"
            )
        else:
            reason = None
        log.warning(
            "pin refused: over the pin limit",
            tenant=tenant,
            pin=name,
            takes=own,
            limit=self._limit,
            held=_listed(held),
        )
        if reason is None:
            raise PinError("there is no room for pins of one more tenant; ask who runs the daemon")
        raise PinError(f"with {name!r} your pins would take {own} bytes, {reason}")

    @property
    def _limit(self) -> int:
        least = self._cache.pool.least
        return (self._cache.budget if least is None else least) // _SHARE

    def _part(self, tenant: str) -> int:
        """Bytes reserved for a tenant as soon as it pins anything."""
        if tenant == SHARED:  # all may see what is, so that it hides nothing
            return 0
        ceiling, part = self._cache.pool.bounds(tenant).ceiling, self._limit // _PARTS
        return part if ceiling is None else min(part, ceiling)

    def _largest(self, tenant: str) -> str:
        paths = self.paths(tenant)
        held = {path.name: _bytes_of([path.lease]) for path in paths if path.lease is not None}
        largest = sorted(held.items(), key=lambda each: -each[1])[:_NAMED]
        return f" (bytes that yours hold: {_listed(dict(largest))})" if largest else ""


def _follows(base: bytes, namespace: Namespace) -> bool:
    return namespace.base == base


def _bytes_of(leases: "Iterable[Lease]") -> int:
    nodes = {id(node): node for lease in leases for node in lease.deepest.path()}
    return sum(size_in_memory(node).nbytes for node in nodes.values())


def _listed(held: dict[str, int]) -> str:
    return ", ".join(f"{name!r} {nbytes}" for name, nbytes in held.items())
