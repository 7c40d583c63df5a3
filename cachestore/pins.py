"""Paths that a user wants kept, whatever else wants room."""

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import structlog

from .disk.tier import DiskTier
from .errors import PinError
from .node import Tokens, size_in_memory
from .paging.pager import Pager
from .prefix_cache import Lease, PrefixCache
from .record import Pin
from .tries import SHARED, Namespace

_REMEMBERED = 1024  # conversations whose last path is known
_SHARE = 2  # of the budget, pins may take one part in this many
_PARTS = 8  # of that, one part in this many is for a tenant's own
_MOST = 256  # pins of a tenant: to pin one more looks at the paths of all
_NAMED = 8  # pins that a refusal names
_NO_TOKEN = np.array([-1], np.int32)

log = structlog.get_logger()


class PinDescription(NamedTuple):
    """A pin. `held` of its `tokens` have their state in memory."""

    name: str
    tokens: int
    held: int


def _is_own(pin: Pin) -> bool:
    """Whether it is a tenant's own pin; shared ones are read first, as others follow them."""
    return pin.tenant != SHARED


class Pins:
    """Leases that only the user closes. Belongs to the MLX thread.

    With a disk tier pins outlive restarts: their state is read back at the start.
    """

    def __init__(self, cache: PrefixCache, fingerprint: str, tier: DiskTier | None) -> None:
        self._cache = cache
        self._fingerprint = fingerprint
        self._tier = tier
        self._pinned: dict[tuple[str, str], tuple[Tokens, Lease]] = {}
        self._pending = [] if tier is None else sorted(tier.pins(), key=_is_own)
        self._last: OrderedDict[tuple[str, str], Tokens] = OrderedDict()
        cache.pool.pins.append(self)

    def remember(self, tenant: str, conversation: str, tokens: Tokens) -> None:
        """Note a conversation's newest tokens, so that it can be pinned by its name."""
        self._last[tenant, conversation] = tokens
        self._last.move_to_end((tenant, conversation))
        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)

    def conversation(self, tenant: str, name: str) -> Tokens | None:
        """The newest tokens of a conversation; None if it is not known (any more)."""
        return self._last.get((tenant, name))

    def conversations(self, tenant: str) -> list[tuple[str, Tokens]]:
        """A tenant's conversations of late with their newest tokens, the newest one last."""
        return [(name, tokens) for (whose, name), tokens in self._last.items() if whose == tenant]

    def pin(
        self, tenant: str, name: str, tokens: Tokens, *, operator: bool = False
    ) -> PinDescription:
        """Keep the state of a path, as far as it is in memory; replaces a pin of that name.

        A tenant's first pin sets its whole part aside. So a refusal of a further one depends on its
        own pins alone, and no size that it tries tells what others pin. An operator may use what is
        not set aside, and is told of others' use.

        Raises:
            PinError: nothing of it is in memory, or pins would take too much.
        """
        lease = self._lease(tenant, name, tokens, operator=operator)
        if tenant == SHARED:
            tokens = tokens[: lease.cached]
        self._keep(tenant, name, tokens, lease)
        if self._tier is not None:
            self._tier.pin(name, tenant, tokens.tobytes())
        return PinDescription(name, len(tokens), lease.cached)

    def _keep(self, tenant: str, name: str, tokens: Tokens, lease: Lease) -> None:
        """Make a lease a pin, in place of an older one of that name. Takes ownership.

        If that fails, the lease is closed and the older pin stays.
        """
        with ExitStack() as unless_kept:
            unless_kept.callback(lease.close)
            if tenant == SHARED:
                self._cache.shared.declare(name, tokens, lease)
            unless_kept.pop_all()
        self._stop_waiting(tenant, name)
        _, older = self._pinned.pop((tenant, name), (None, None))
        self._pinned[tenant, name] = tokens, lease
        if tenant != SHARED:
            _close(older)

    def unpin(self, tenant: str, name: str) -> bool:
        """Let a path age like any other; False if there is no such pin."""
        waited = self._stop_waiting(tenant, name)
        pinned = self._pinned.pop((tenant, name), None)
        if pinned is None and not waited:
            return False
        if tenant == SHARED:
            self._cache.shared.retract(name)
        elif pinned is not None:
            _close(pinned[1])
        if self._tier is not None:
            self._tier.unpin(name, tenant)
        return True

    def close(self) -> None:
        """Let go of all, as the model is unloaded; the index has them for the next time."""
        pinned = self._pinned.items()
        own = [lease for (tenant, _), (_, lease) in pinned if tenant != SHARED]
        self._pinned.clear()
        self._cache.pool.pins.remove(self)
        with ExitStack() as leases:  # each, whatever the others raise
            leases.callback(self._cache.shared.close)
            for lease in own:
                leases.callback(lease.close)

    def listed(self, tenant: str) -> list[PinDescription]:
        """A tenant's pins; those of before a restart hold nothing until they are read."""
        held = [
            PinDescription(name, len(tokens), lease.cached)
            for (whose, name), (tokens, lease) in self._pinned.items()
            if whose == tenant
        ]
        return held + [
            PinDescription(pin.name, len(np.frombuffer(pin.tokens, np.int32)), 0)
            for pin in self._pending
            if pin.tenant == tenant
        ]

    @property
    def tenants(self) -> set[str]:
        """Whose pins there are, of those that hold something."""
        return {tenant for tenant, _ in self._pinned}

    def held_by(self, tenant: str) -> int:
        """What a tenant's pins hold in memory, in bytes."""
        return self._held_by(self._leases_of(tenant))

    def leases_of(self, tenant: str | None = None) -> int:
        """How many leases the pins of a tenant hold, or all of them for None."""
        return sum(tenant in (None, whose) for whose, _ in self._pinned)

    def restore(self, pager: Pager) -> None:
        """Take up pins of before a restart, one after another, once their state was read.

        One that does not fit is not tried again before the next start.
        """
        if not self._pending:
            return
        pin = self._pending[0]
        tokens = np.frombuffer(pin.tokens, np.int32)
        namespace = Namespace(pin.tenant, self._fingerprint)
        if pager.wait_for(pin, namespace, np.append(tokens, _NO_TOKEN)):
            return
        self._pending = self._pending[1:]
        self._take_up(pin, tokens)

    def is_awaited(self, namespace: Namespace, prompt: Tokens) -> bool:
        """Whether a prompt begins with a shared one that is read back at present."""
        return self._cache.shared.is_awaited(namespace, prompt)

    def _take_up(self, pin: Pin, tokens: Tokens) -> None:
        try:
            lease = self._lease(pin.tenant, pin.name, tokens, operator=True)  # it was granted
            if pin.tenant == SHARED:
                _check_whole(lease, len(tokens))
            self._keep(pin.tenant, pin.name, tokens, lease)
        except BaseException as error:  # noqa: BLE001  (one pin is not the disk tier's end)
            log.warning("pin not restored", pin=pin.name, reason=str(error))
            if pin.tenant == SHARED:
                self._cache.shared.retract(pin.name)

    def _stop_waiting(self, tenant: str, name: str) -> bool:
        """Read a pin back no more; False if it was not waited for."""
        left = [pin for pin in self._pending if (pin.tenant, pin.name) != (tenant, name)]
        waited = len(left) < len(self._pending)
        self._pending = left
        return waited

    def _lease(self, tenant: str, name: str, tokens: Tokens, *, operator: bool) -> Lease:
        # A lease leaves a token to compute, which would be the path's last one.
        path = np.append(tokens, _NO_TOKEN)
        lease = self._cache.begin(Namespace(tenant, self._fingerprint), path)
        try:
            self._check(tenant, name, lease, operator=operator)
        except BaseException:
            lease.close()
            raise
        return lease

    def _leases_of(self, tenant: str) -> list[Lease]:
        return [lease for (whose, _), (_, lease) in self._pinned.items() if whose == tenant]

    def _check(self, tenant: str, name: str, lease: Lease, *, operator: bool) -> None:
        if not lease.cached:
            raise PinError(f"nothing of {name!r} is in memory, so nothing can be pinned")
        operator = operator or tenant == SHARED
        is_new = (tenant, name) not in self._pinned
        if is_new and not operator and self.leases_of(tenant) >= _MOST:
            message = f"you have {_MOST} pins of this model, which is the most; unpin something"
            raise PinError(message)
        pool = self._cache.pool
        own = self._held_by([lease, *self._leases_of(tenant)])
        own += sum(pins.held_by(tenant) for pins in pool.pins if pins is not self)
        held = {each: self._held_in_all(each) for pins in pool.pins for each in pins.tenants}
        part, ceiling = self._part(tenant), pool.bounds(tenant).ceiling
        kept = {each: max(held[each], self._part(each)) for each in held if each != tenant}
        left = self._limit - sum(kept.values())
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
            "not pinned", tenant=tenant, pin=name, takes=own, limit=self._limit, held=_listed(held)
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

    def _held_in_all(self, tenant: str) -> int:
        return sum(pins.held_by(tenant) for pins in self._cache.pool.pins)

    def _largest(self, tenant: str) -> str:
        held = {
            name: self._held_by([lease])
            for (whose, name), (_, lease) in self._pinned.items()
            if whose == tenant
        }
        largest = sorted(held.items(), key=lambda each: -each[1])[:_NAMED]
        return f" (bytes that yours hold: {_listed(dict(largest))})" if largest else ""

    @staticmethod
    def _held_by(leases: Iterable[Lease]) -> int:
        nodes = {id(node): node for lease in leases for node in lease.deepest.path()}
        return sum(size_in_memory(node).nbytes for node in nodes.values())


def _check_whole(lease: Lease, length: int) -> None:
    """Close a lease that has only a part of a prompt: it is common as a whole or not at all."""
    if lease.cached < length:
        lease.close()
        raise PinError(f"only {lease.cached} of its {length} tokens are on disk")


def _close(lease: Lease | None) -> None:
    try:
        if lease is not None:
            lease.close()
    except BaseException:
        log.exception("state that is not pinned any more is still in memory")


def _listed(held: dict[str, int]) -> str:
    return ", ".join(f"{name!r} {nbytes}" for name, nbytes in held.items())
